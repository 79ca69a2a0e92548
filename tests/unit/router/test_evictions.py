"""Removals are charged to the requests that came to the rank just before, and to no more than could cause them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol import subjects
from kv_protocol.codec import encode_message
from kv_protocol.events import Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.journal import OutcomeKnown
from router.attribution.contents import AttributionLimits
from router.attribution.journal import AFTER_S, BEFORE_S, Evictions, Removals, count_removals, new_blocks
from router.decision.policy import Policy
from router.native import built
from tests.support.decide import decide
from tests.unit.router.samples import BLOCK_SIZE, MODEL, rank, route, row, view

W0, W1 = rank("w0/0"), rank("w1/0")


def answered(held_blocks: int, outcome: OutcomeKnown) -> built.Placement:
    """Return a decision for a prompt of 10 blocks, of which its rank held so many, that was answered."""
    found = built.Attribution(*AttributionLimits())
    held = view(row(overlap_blocks=(held_blocks,) * 4))
    found.decided(decide(held, route(160, decision_id=outcome.decision_id), Policy(mode="kv-blocks"), 1))
    placement = found.ended(outcome.decision_id, is_ok=True, cached_tokens=outcome.cached_tokens)
    assert placement is not None
    return placement


class Charges:
    """What is charged to each tenant."""

    def __init__(self, *removed: tuple[int, int], placed_max: int = 100) -> None:
        self.removals, self.of = Removals(), Counter[str]()
        for second, blocks in removed:
            self.removals.add(W0, second, blocks)
        self.evictions = Evictions[str](self.removals, self._charge, placed_max)

    def _charge(self, tenant: str, blocks: float) -> None:
        self.of[tenant] += blocks  # type: ignore[assignment]

    def placed(self, tenant: str, second: int, blocks: int) -> None:
        self.evictions.placed(W0, second, tenant, blocks)


def test_a_removal_is_shared_in_proportion_to_new_blocks() -> None:
    seen = Charges((100, 6))
    seen.placed("a", 99, 9)
    seen.placed("b", 100, 3)
    seen.evictions.settle()
    assert seen.of == {"a": 4.5, "b": 1.5}


def test_a_request_is_charged_at_most_its_new_blocks() -> None:
    seen = Charges((100, 50), (101, 50))
    seen.placed("a", 99, 9)
    seen.evictions.settle()
    assert (seen.of["a"], seen.removals.total) == (9.0, 100)


@pytest.mark.parametrize(
    ("second", "charged"),
    [(100 - AFTER_S - 1, 0), (100 - AFTER_S, 5), (100 + BEFORE_S, 5), (100 + BEFORE_S + 1, 0)],
)
def test_only_removals_soon_after_a_request_came_are_charged_to_it(second: int, charged: int) -> None:
    seen = Charges((100, 5))
    seen.placed("a", second, 9)
    seen.evictions.settle()
    assert seen.of["a"] == charged


def test_a_removal_at_another_rank_is_not_charged() -> None:
    seen = Charges()
    seen.removals.add(W1, 100, 5)
    seen.placed("a", 100, 9)
    seen.evictions.settle()
    assert seen.of == {}


def test_more_placements_at_once_than_are_kept_are_not_charged() -> None:
    seen = Charges((100, 50), placed_max=3)
    for tenant in "abcd":
        seen.placed(tenant, 100, 9)
    seen.evictions.settle()
    assert seen.of == {"a": 9.0, "b": 9.0, "c": 9.0}
    late = Charges((103, 50), placed_max=3)
    for tenant in "abcd":
        late.placed(tenant, 100, 9)
    late.evictions.settle()
    assert late.of == {"d": 9.0}


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=30),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.integers(0, 20)), max_size=30),
    st.integers(2, 40),
)
def test_no_more_is_charged_than_was_removed_nor_than_was_new(
    removed: list[tuple[int, int]], placed: list[tuple[str, int, int]], placed_max: int
) -> None:
    seen, new = Charges(*removed, placed_max=placed_max), Counter[str]()
    for tenant, second, blocks in sorted(placed, key=lambda each: each[1]):
        seen.placed(tenant, second, blocks)
        new[tenant] += blocks
    seen.evictions.settle()
    assert sum(seen.of.values()) <= seen.removals.total + 1e-6
    assert all(charged <= new[tenant] + 1e-6 for tenant, charged in seen.of.items())
    early = Charges(*removed)
    for tenant, second, blocks in sorted(placed, key=lambda each: each[1]):
        early.placed(tenant, second, blocks)
    early.evictions.settle()
    assert sum(seen.of.values()) <= sum(early.of.values()) + 1e-6


def test_new_blocks_are_full_ones_of_prompt_and_answer_that_were_not_reused() -> None:
    stated = OutcomeKnown(now_s=1.0, decision_id="d", outcome="ok", cached_tokens=64, output_tokens=20)
    assert new_blocks(answered(0, stated), stated) == (160 + 20) // BLOCK_SIZE - 64 // BLOCK_SIZE
    silent = OutcomeKnown(now_s=1.0, decision_id="d", outcome="ok")
    assert new_blocks(answered(2, silent), silent) == 10 - 2


def test_removals_of_the_gpu_tier_are_read_from_the_event_stream_and_nothing_else() -> None:
    removals = Removals()
    events: tuple[Event, ...] = (Stored((1, 2)), Removed((1,)), Removed((2,), Tier.HOST), Cleared(), Removed((3, 4)))
    message = encode_message([Batch(1, seq, event) for seq, event in enumerate(events, 1)])
    count_removals(removals, subjects.events(MODEL, W0), 7_900_000_000, message)
    count_removals(removals, "kv.v1.fleet.m.w0", 7_900_000_000, message)
    count_removals(removals, subjects.events(MODEL, W0), 7_900_000_000, b"\x01")
    assert (removals.of(W0), removals.total) == ([(7, 3)], 3)
