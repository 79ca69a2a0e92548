"""Engine events that could not be taken: whatever an engine says, nothing is raised, and what is kept is small."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.errors import LimitExceeded
from tests.unit.worker_agent.trtllm_json import BLOCK_SIZE, block, created, diff, event, numbered, store, stored
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.dialects.trtllm_wire import read_event
from worker_agent.events.engine_events import EngineBatch, RankEvent
from worker_agent.events.quarantine import (
    NEWEST_MAX,
    PROBLEM_CHARACTERS_MAX,
    REASONS,
    SHOWN_CHARACTERS_MAX,
    EventTooLarge,
    Quarantine,
)

WORDS = ("event_id", "data", "type", "stored", "removed", "updated", "created", "blocks", "block_hash", "tokens")
MORE_WORDS = ("block_hashes", "parent_hash", "mm_keys", "cache_salt", "token_id", "cache_level", "attention_dp_rank")
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.builds(lambda: 10**5000)  # built: it cannot be shown
    | st.sampled_from([*WORDS, "\ud800", -(10**400), 2**63, 2**64, "ab" * 32])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*WORDS, *MORE_WORDS]) | st.integers(), inner, max_size=6)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)
blocks = st.fixed_dictionaries(
    {"block_hash": anything, "tokens": st.lists(st.fixed_dictionaries({"token_id": anything}), max_size=5) | anything},
    optional={"mm_keys": anything, "cache_salt": anything, "cache_level": anything},
)
data = (
    anything
    | st.fixed_dictionaries(
        {"type": st.just("stored"), "parent_hash": anything, "blocks": st.lists(blocks, max_size=3) | anything}
    )
    | st.fixed_dictionaries({"type": st.just("removed"), "block_hashes": st.lists(anything, max_size=3) | anything})
    | st.fixed_dictionaries(
        {"type": st.just("updated"), "block_hash": anything, "cache_level": anything, "priority": anything}
    )
)
events = anything | st.fixed_dictionaries(
    {"event_id": st.integers(-2, 9) | anything, "data": data},
    optional={
        "attention_dp_rank": st.integers(0, 1) | anything,
        "window_size": st.integers(0, 9) | anything,
        "layer_group_id": anything,
        "hash_algo": anything,
    },
)


@given(st.lists(events, max_size=8))
def test_whatever_a_poll_brings_nothing_is_raised_and_what_is_told_of_it_is_small(polled: list[Any]) -> None:
    rules = TrtllmRules(BLOCK_SIZE)
    published = rules.translate(polled)
    core = Consolidation((0, 1), BLOCK_SIZE, "i", lambda: 1)
    for sequence, (dp_rank, each) in enumerate(published):
        core.on_batch(EngineBatch(sequence=sequence, time_s=0.0, dp_rank=dp_rank, events=(each,)))
    assert [core.stale(dp_rank) for dp_rank in core.dp_ranks] == ["", ""]
    counts, kept = rules.counts, rules.quarantine.kept
    assert sum(rules.quarantine.counts.values()) == counts["refused"] + counts["unreadable"]
    assert len(kept) == min(NEWEST_MAX, counts["refused"] + counts["unreadable"])
    assert all(len(each.shown) <= SHOWN_CHARACTERS_MAX for each in kept)
    assert all(len(each.problem) <= PROBLEM_CHARACTERS_MAX for each in kept)
    assert all(len(rules.stale(rank)) <= PROBLEM_CHARACTERS_MAX + 100 for rank in (0, 1))
    assert msgspec.json.encode([each._asdict() for each in kept])
    assert float(sum(rules.events_lost.values())) >= 0.0


@given(st.lists(events, max_size=8))
def test_what_came_before_a_good_event_does_not_keep_it_out(polled: list[Any]) -> None:
    rules = TrtllmRules(BLOCK_SIZE)
    rules.translate(polled)
    refused = sum(rules.quarantine.counts.values())
    published = rules.translate(numbered(created(), stored(block(1)), first=100))
    assert RankEvent(0, store(1)) in published
    assert sum(rules.quarantine.counts.values()) == refused


@pytest.mark.parametrize(
    ("engine_event", "error", "dp_rank", "reason"),
    [
        ([], ValueError(), 0, "not_a_map"),
        ({}, ValueError(), None, "no_place"),
        ({}, RecursionError(), 0, "too_deep"),
        ({}, EventTooLarge("blocks", 1, "0"), 0, "too_large"),
        ({}, LimitExceeded("hash_algo", "md5", "others"), 0, "hash_algo"),
        ({}, LimitExceeded("something_else", 1, "2"), 0, "wrong_type"),
        ({}, msgspec.ValidationError("x"), 0, "wrong_type"),
    ],
)
def test_each_event_is_counted_by_one_reason(
    engine_event: object, error: Exception, dp_rank: int | None, reason: str
) -> None:
    quarantine = Quarantine()
    quarantine.add(engine_event, error, dp_rank)
    assert {name for name, count in quarantine.counts.items() if count} == {reason}
    assert tuple(quarantine.counts) == REASONS


@pytest.mark.parametrize(
    "data",
    [stored(block(1), block(2), block(1)), stored(block(7), parent=7), stored(block(2**64 - 1), block(-1))],
    ids=["a block twice", "its own parent", "a block in two spellings"],
)
def test_an_event_that_names_a_block_twice_is_kept_out_and_its_rank_is_in_doubt(data: Any) -> None:
    rules = TrtllmRules(BLOCK_SIZE)
    assert rules.translate(numbered(created(), data, stored(block(5)))) == [RankEvent(0, store(5))]
    assert {reason for reason, count in rules.quarantine.counts.items() if count} == {"block_hash"}
    assert "a hash twice, or the parent" in rules.stale(0)


# -------------------------------------------------------------------- sizes
@pytest.mark.parametrize(("tokens", "items"), [(9, 0), (0, 2)])
def test_tokens_and_items_of_an_event_are_counted_together(
    monkeypatch: pytest.MonkeyPatch, tokens: int, items: int
) -> None:
    monkeypatch.setattr("worker_agent.events.dialects.trtllm_wire.EVENT_NUMBERS_MAX", 9 if tokens else 16)
    keys = [{"type": "mm_key", "hash": "x"}] * items
    with pytest.raises(EventTooLarge, match=r"^blocks: found '1[07] numbers', allowed at most"):
        read_event(event(0, stored(block(1, range(tokens), mm_keys=keys))))


def test_a_move_is_never_too_large() -> None:
    assert read_event(event(0, {"type": "updated", "block_hash": 1, "cache_level": diff(0, 1)})).change is not None
