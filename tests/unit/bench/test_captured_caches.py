"""Caches of a capture: single steps come to the same as whole events, and every state between two of them is seen."""

from itertools import count
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bench.capture.capture import Capture, CapturedFrame
from bench.capture.command import CapturedCaches
from kv_protocol.hashing import sequence_hashes
from worker_agent.events.consolidation import Consolidation

BLOCK_SIZE = 4


def stored(first: int, blocks: int, **changed: Any) -> dict[str, Any]:
    """A store of `blocks` blocks with engine hashes from `first`, whose tokens are all the hash of their block."""
    hashes = list(range(first, first + blocks))
    tokens = [block for block in hashes for _ in range(BLOCK_SIZE)]
    fields = {"block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens, "block_size": BLOCK_SIZE}
    return {"type": "BlockStored", **fields, "medium": "GPU", **changed}


def removed(*hashes: int, **changed: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **changed}


def frames(*payloads: Any) -> list[CapturedFrame]:
    return [CapturedFrame(0.0, b"", at, msgspec.msgpack.encode(payload)) for at, payload in enumerate(payloads)]


def one_batch(*events: dict[str, Any], dp_rank: int | None = 0) -> list[Any]:
    return [1.0, list(events), dp_rank]


def prompt(*blocks: int) -> list[int]:
    return sequence_hashes([block for block in blocks for _ in range(BLOCK_SIZE)], BLOCK_SIZE)


def overlaps(captured: list[CapturedFrame], *blocks: int) -> list[int]:
    """Return the overlap of a prompt after each step."""
    caches = CapturedCaches(Capture(BLOCK_SIZE, tuple(captured), ()))
    return [caches.overlap(prompt(*blocks)) for frame in captured for _ in caches.steps(frame)]


def test_every_block_of_a_store_and_of_a_removal_is_a_step() -> None:
    captured = frames(one_batch(stored(1, 3), removed(3, 2)), one_batch(removed(1)))
    assert overlaps(captured, 1, 2, 3) == [1, 2, 3, 2, 1, 0]


def test_a_hole_ends_the_overlap_and_a_refill_restores_it() -> None:
    captured = frames(one_batch(stored(1, 3), removed(2), stored(2, 1, parent_block_hash=1)))
    assert overlaps(captured, 1, 2, 3) == [1, 2, 3, 1, 3]


def test_a_block_that_moves_to_another_tier_stays_in_the_overlap() -> None:
    captured = frames(one_batch(stored(1, 2), stored(1, 2, medium="CPU", token_ids=[]), removed(1, 2)))
    assert overlaps(captured, 1, 2) == [1, 2, 2, 2, 2, 2]


def test_publishers_of_single_ranks_count_and_lose_for_themselves() -> None:
    (first,), (second,) = frames(one_batch(stored(1, 1))), frames(one_batch(stored(2, 1), dp_rank=3))
    later = CapturedFrame(0.0, b"", 2, msgspec.msgpack.encode(one_batch(stored(4, 1), dp_rank=None)))
    captured = [first._replace(publisher=0), second._replace(publisher=3), later._replace(publisher=3)]
    caches = CapturedCaches(Capture(BLOCK_SIZE, tuple(captured), ()))
    steps = [changed for frame in captured for changed in caches.steps(frame)]
    assert steps == [{*prompt(1)}, {*prompt(2)}, {*prompt(2)}, {*prompt(4)}]
    assert [set(caches.held(rank)) for rank in (0, 3)] == [{*prompt(1)}, {*prompt(4)}]


def test_a_hole_in_the_recording_clears_all_ranks() -> None:
    first, _, third = frames(one_batch(stored(1, 2)), one_batch(removed(1)), one_batch(stored(5, 1)))
    assert overlaps([first, third], 1, 2) == [1, 2, 0, 0]
    assert overlaps([third], 5) == [1]


# ---------------------------------------------------------------- any events

HASHES = st.integers(1, 6)
MEDIUM = st.sampled_from(["GPU", "CPU", "DISK", None])
MAIN_GROUP = st.integers(0, 1).map(lambda group: {"group_idx": group, "kv_cache_spec_kind": "full_attention"})
CHAINS = st.tuples(st.lists(HASHES, min_size=1, max_size=4), st.none() | HASHES, MEDIUM, MAIN_GROUP, st.booleans())
EVENT = (
    CHAINS.map(
        lambda drawn: {
            **stored(0, 0, medium=drawn[2], **drawn[3]),
            "block_hashes": drawn[0],
            "parent_block_hash": drawn[1],
            "token_ids": [] if drawn[4] else [each % 3 for each in drawn[0] for _ in range(BLOCK_SIZE)],
        }
    )
    | st.tuples(st.lists(HASHES, max_size=4), MEDIUM, MAIN_GROUP).map(
        lambda drawn: removed(*drawn[0], medium=drawn[1], **drawn[2])
    )
    | st.just({"type": "AllBlocksCleared"})
)


@given(st.lists(st.lists(EVENT, max_size=6), max_size=8))
def test_after_each_frame_the_caches_hold_what_a_consolidator_dumps(batches: list[list[dict[str, Any]]]) -> None:
    captured = frames(*(one_batch(*events) for events in batches))
    caches, epochs = CapturedCaches(Capture(BLOCK_SIZE, tuple(captured), ())), count()
    consolidation = Consolidation((0,), BLOCK_SIZE, "i", lambda: next(epochs))
    for frame in captured:
        for changed in caches.steps(frame):
            assert changed
        consolidation.on_payload(frame.sequence, frame.payload)
        assert caches.held(0) == {each.sequence_hash: each.tier_bits for each in consolidation.mirrors[0].dump()}
