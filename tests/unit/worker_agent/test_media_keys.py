"""Multimodal keys: which blocks of a prompt have keys of an image, and what is hashed of them."""

from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.hashing import (
    MmRun,
    chain,
    expanded,
    keys_of_blocks,
    local_block_hashes,
    mm_block_hashes,
    sequence_hashes,
)
from tests.unit.worker_agent.media_samples import GIF, PNG
from tests.unit.worker_agent.trtllm_json import BLOCK_SIZE
from worker_agent.media.parts import content_digest

A, B = content_digest(PNG), content_digest(GIF)
IMAGE = 9
PROMPT = [1, IMAGE, 2, IMAGE, 3]


def test_each_image_token_becomes_as_many_as_the_image_has() -> None:
    tokens, runs = expanded(PROMPT, IMAGE, [A, B], [3, 1])
    assert tokens == [1, IMAGE, IMAGE, IMAGE, 2, IMAGE, 3]
    assert runs == [MmRun(A, 1, 3), MmRun(B, 5, 1)]


def test_an_item_in_two_runs_has_two_keys_in_a_block_that_both_touch() -> None:
    runs = [MmRun(A, 1, 2), MmRun(A, 4, 2)]  # T M M T M M, as TensorRT-LLM's own example
    assert keys_of_blocks(runs, 6, 2) == [[A], [A], [A]]
    assert keys_of_blocks(runs, 6, 6) == [[A, A]]


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=4))
def test_a_block_has_a_key_of_an_item_if_and_only_if_it_has_tokens_of_it(
    block_size: int, gaps: list[tuple[int, int]]
) -> None:
    owners: list[int | None] = []
    runs = []
    for at, (gap, length) in enumerate(gaps):
        owners += [None] * gap
        runs.append(MmRun(str(at), len(owners), length))
        owners += [at] * length
    keys = keys_of_blocks(runs, len(owners), block_size)
    for index, found in enumerate(keys):
        first = index * block_size
        here = owners[first : first + block_size]
        assert found == [str(at) for at in dict.fromkeys(here) if at is not None]


def test_another_image_is_another_block_from_where_it_stands_on() -> None:
    tokens, runs = expanded([*range(1, 6), IMAGE, *range(20, 30)], IMAGE, [A], [2])
    ours = chain(mm_block_hashes(tokens, runs, BLOCK_SIZE))
    others = chain(mm_block_hashes(tokens, [runs[0]._replace(digest=B)], BLOCK_SIZE))
    assert ours[0] == others[0] == sequence_hashes(tokens, BLOCK_SIZE)[0]
    assert not set(ours[1:]) & set(others[1:])


def test_a_seed_counts_as_for_text() -> None:
    assert mm_block_hashes(range(4), [], 4, seed=5) == local_block_hashes(range(4), 4, seed=5)
