"""Whatever chains are added and removed, in whatever order: the tree counts what a list of them counts."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.codec import pack_u64
from kv_protocol.splitmix import choice_index
from router.prompt.chains import BLOCK_BYTES, ChainCounts, Path, block_count, shared_blocks
from tests.support.amount import examples
from tests.support.planting import plant

KEYS = ("a", "b", "c")

blocks = st.sampled_from([0, 1, 256, 1 << 63])  # alike in most of their bytes, at either end
packed = st.lists(blocks, max_size=9).map(pack_u64)
steps = st.lists(st.one_of(st.tuples(st.sampled_from(KEYS), packed), st.integers(0, 99)), max_size=40)
Step = tuple[str, bytes] | int
"""A chain is added; or the one that was added so many before, of those that are there, is removed."""


def prefixes(chain: bytes) -> list[bytes]:
    """Return what a sequence hash stands for: each block with all before it."""
    return [chain[: end * BLOCK_BYTES] for end in range(1, block_count(chain) + 1)]


class Naive:
    """Of each block, with all before it, how many chains of each key have it."""

    def __init__(self) -> None:
        self.counts: dict[bytes, Counter[str]] = {}

    def count(self, key: str, chain: bytes, number: int) -> None:
        for prefix in prefixes(chain):
            counts = self.counts.setdefault(prefix, Counter())
            counts[key] += number
            if not counts[key]:
                del counts[key]

    def blocks(self, key: str) -> int:
        return sum(key in counts for counts in self.counts.values())

    def depths(self, chain: bytes) -> dict[str, int]:
        return dict(Counter(key for prefix in prefixes(chain) for key in self.counts.get(prefix, ())))


def run(script: list[Step]) -> None:
    """Do all of it to both, which must never differ in an answer; then remove what is left, and nothing is."""
    tree: ChainCounts[str] = ChainCounts()
    naive, there = Naive(), list[tuple[str, bytes, Path[str]]]()
    asked = {each[1] for each in script if isinstance(each, tuple)}
    asked |= {pack_u64((1,)), *(chain + pack_u64((7,)) for chain in asked), *(chain[:-BLOCK_BYTES] for chain in asked)}
    for step in [*script, *range(len(script))]:
        if isinstance(step, tuple):
            key, chain = step
            there.append((key, chain, tree.add(key, chain)))
            naive.count(key, chain, 1)
        elif there:
            key, chain, path = there.pop(step % len(there))
            tree.remove(path)
            naive.count(key, chain, -1)
        assert [tree.blocks(key) for key in KEYS] == [naive.blocks(key) for key in KEYS]
        for chain in asked:
            assert tree.depths(chain) == naive.depths(chain)
        assert tree.is_empty() == (not there)
        assert tree.node_count() <= 2 * len({chain for _, chain, _ in there if chain})
    assert tree.is_empty()


@given(steps)
@settings(max_examples=examples(300), deadline=None)
def test_every_answer_is_that_of_a_naive_count(script: list[Step]) -> None:
    run(script)


@given(packed, packed, packed)
@settings(max_examples=examples(300), deadline=None)
def test_shared_blocks_are_those_of_a_block_by_block_comparison(before: bytes, chain: bytes, other: bytes) -> None:
    alike = [each == prefix for each, prefix in zip(prefixes(chain), prefixes(other), strict=False)]
    assert shared_blocks(chain, before + other, block_count(before)) == [*alike, False].index(False)


@pytest.mark.parametrize("length", [1, 2, 3, 500, 512])
def test_one_block_that_differs_is_found_wherever_it_is(length: int) -> None:
    chain = pack_u64(range(length))
    for at in range(length):
        spoilt = bytearray(chain)
        spoilt[at * BLOCK_BYTES + 7] ^= 1
        assert shared_blocks(chain, bytes(spoilt)) == shared_blocks(bytes(spoilt), chain) == at
    assert shared_blocks(chain, chain + chain) == shared_blocks(chain + chain, chain) == length


@pytest.mark.parametrize("seed", range(3))
def test_a_hot_prefix_does_not_fall_to_pieces_by_what_came_and_went(seed: int) -> None:
    tree: ChainCounts[int] = ChainCounts()
    stays = pack_u64(range(500))
    path = tree.add(0, stays)
    for number in range(300):
        at = choice_index(seed, 500, number)
        forked = stays[: at * BLOCK_BYTES] + pack_u64((1000 + number,))
        tree.remove(tree.add(number % 3, forked))
    assert tree.node_count() == 1
    assert tree.depths(stays) == {0: 500}
    tree.remove(path)
    assert tree.is_empty()


# ---------------------------------------------------------------- the harness sees what is wrong

A, AB, ABC = (pack_u64(each) for each in ((1,), (1, 2), (1, 2, 3)))
SCRIPT: list[Step] = [("a", ABC), ("b", AB), ("a", A), ("a", ABC), 0, ("b", pack_u64((1, 2, 4))), 1, 0, 0]


@pytest.mark.interpreted
@pytest.mark.planted
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run(SCRIPT)
    plant(ChainCounts, "_join", lambda _self, _stretch, _parent: None, monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run(SCRIPT)
