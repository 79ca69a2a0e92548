"""TensorRT-LLM's polled events, as its JSON has them, and what of them is published."""

from collections.abc import Iterable
from typing import Any

import pytest

from worker_agent.core.dialects.trtllm import PublisherCounts, TrtllmRules
from worker_agent.core.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored, RankEvent

BLOCK_SIZE = 4
Json = dict[str, Any]


def event(event_id: int, data: object, **fields: object) -> Json:
    return {"event_id": event_id, "data": data, **fields}


def created() -> Json:
    return {"type": "created", "num_blocks_per_cache_level": [100, 0]}


def block(block_hash: object, tokens: Iterable[object] = (1, 2, 3, 4), **fields: object) -> Json:
    rendered = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {
        "type": "stored_block",
        "block_hash": block_hash,
        "tokens": rendered,
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
        **fields,
    }


def stored(*blocks: Json, parent: object = None, **fields: object) -> Json:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks), **fields}


def removed(*hashes: object) -> Json:
    return {"type": "removed", "block_hashes": list(hashes)}


def updated(block_hash: int) -> Json:
    diff = {"type": "event_diff", "new_value": 1, "old_value": 0}
    return {"type": "updated", "block_hash": block_hash, "cache_level": diff, "priority": None}


def of_rank_0(*events: EngineEvent) -> list[RankEvent]:
    return [RankEvent(0, each) for each in events]


def hop_a_store(*hashes: int, parent: int | None = None, cache_salt: str | None = None) -> EngineStored:
    return EngineStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=(1, 2, 3, 4) * len(hashes),
        block_size=BLOCK_SIZE,
        cache_salt=cache_salt,
    )


@pytest.fixture
def rules() -> TrtllmRules:
    return TrtllmRules(BLOCK_SIZE)


# -------------------------------------------------------------------- stored and removed
def test_full_blocks_are_published_in_chain_order_with_all_their_tokens(rules: TrtllmRules) -> None:
    data = stored(block(1, (1, 2, 3, 4)), block(2, (5, 6, 7, 8)), parent=9)
    (published,) = rules.translate([event(0, data)])
    assert published == RankEvent(
        0,
        EngineStored(
            block_hashes=(1, 2), parent_block_hash=9, token_ids=(1, 2, 3, 4, 5, 6, 7, 8), block_size=BLOCK_SIZE
        ),
    )


def test_hashes_are_u64_whatever_the_sign_they_come_with(rules: TrtllmRules) -> None:
    published = rules.translate([event(0, stored(block(-1), parent=-2)), event(1, removed(-1, 2**64 - 3))])
    assert published == of_rank_0(
        hop_a_store(2**64 - 1, parent=2**64 - 2), EngineRemoved(block_hashes=(2**64 - 1, 2**64 - 3))
    )


def test_the_keys_that_newer_versions_add_are_skipped(rules: TrtllmRules) -> None:
    newer = event(0, stored(block(1, mm_hash=None)), window_size=32, layer_group_id=None, hash_algo="v1_block_key")
    assert rules.translate([newer]) == of_rank_0(hop_a_store(1))


def test_nulls_where_the_engine_may_say_nothing_are_no_values(rules: TrtllmRules) -> None:
    data = stored(block(1, cache_salt=None), parent=None, lora_name=None)
    assert rules.translate([event(0, data, window_size=None)]) == of_rank_0(hop_a_store(1))


def test_a_store_of_no_blocks_and_a_removal_of_none_publish_nothing(rules: TrtllmRules) -> None:
    assert rules.translate([event(0, stored()), event(1, removed())]) == []


def test_the_adapter_s_name_is_published_where_there_is_one(rules: TrtllmRules) -> None:
    ((_, published),) = rules.translate([event(0, stored(block(1), lora_name="adapter"))])
    assert isinstance(published, EngineStored)
    assert published.lora_name == "adapter"


@pytest.mark.parametrize("salts", [("s",), ("s", "s"), ("s", None), (None, "s"), ("", "s")])
def test_the_one_salt_of_an_event_s_blocks_is_published(rules: TrtllmRules, salts: tuple[str | None, ...]) -> None:
    blocks = [block(number, cache_salt=salt) for number, salt in enumerate(salts)]
    ((_, published),) = rules.translate([event(0, stored(*blocks))])
    assert isinstance(published, EngineStored)
    assert published.cache_salt == "s"


def test_an_event_of_several_salts_is_unreadable(rules: TrtllmRules) -> None:
    mixed = stored(block(1, cache_salt="a"), block(2, cache_salt="b"))
    assert rules.translate([event(0, mixed), event(1, stored(block(3)))]) == of_rank_0(hop_a_store(3))
    assert rules.counts.unreadable == 1
    assert "cache_salt" in rules.last_unreadable


# -------------------------------------------------------------------- partial and oversize blocks
def test_a_partial_block_ends_the_walk_and_is_not_published(rules: TrtllmRules) -> None:
    data = stored(block(1), block(2, (5, 6)), block(3, (7, 8, 9, 10)))
    assert rules.translate([event(0, data)]) == of_rank_0(hop_a_store(1))
    assert rules.counts.partial_blocks_dropped == 1


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2, 3)])
def test_a_store_of_a_partial_block_alone_publishes_nothing(rules: TrtllmRules, tokens: tuple[int, ...]) -> None:
    assert rules.translate([event(0, stored(block(2, tokens)))]) == []


def test_the_removal_of_a_partial_block_is_not_published_and_the_rest_is(rules: TrtllmRules) -> None:
    events = [event(0, stored(block(1), block(2, (5,)))), event(1, removed(2, 1))]
    assert rules.translate(events) == of_rank_0(hop_a_store(1), EngineRemoved(block_hashes=(1,)))


def test_the_removal_of_a_partial_block_alone_publishes_nothing(rules: TrtllmRules) -> None:
    assert rules.translate([event(0, stored(block(2, (5,)))), event(1, removed(2))]) == []


def test_a_partial_block_is_remembered_until_its_removal_and_no_longer(rules: TrtllmRules) -> None:
    rules.translate([event(0, stored(block(2, (5,)))), event(1, removed(2))])
    assert rules.translate([event(2, removed(2))]) == of_rank_0(EngineRemoved(block_hashes=(2,)))


def test_the_negative_spelling_of_a_partial_block_is_the_same_block(rules: TrtllmRules) -> None:
    rules.translate([event(0, stored(block(-2, (5,))))])
    assert rules.translate([event(1, removed(2**64 - 2))]) == []


def test_partial_blocks_are_remembered_for_each_rank_apart(rules: TrtllmRules) -> None:
    events = [
        event(0, stored(block(2, (5,))), attention_dp_rank=0),
        event(0, stored(block(2, (5,))), attention_dp_rank=1),
        event(1, removed(2), attention_dp_rank=0),
        event(1, removed(2), attention_dp_rank=1),
        event(2, removed(2), attention_dp_rank=1),
    ]
    assert rules.translate(events) == [RankEvent(1, EngineRemoved(block_hashes=(2,)))]


def test_blocks_under_a_partial_one_are_dropped(rules: TrtllmRules) -> None:
    events = [event(0, stored(block(2, (5,)))), event(1, stored(block(3), parent=2))]
    assert rules.translate(events) == []
    assert rules.counts.under_partial_dropped == 1


def test_a_store_with_an_oversize_block_is_dropped_whole(rules: TrtllmRules) -> None:
    events = [event(0, stored(block(1), block(2, range(5)))), event(1, stored(block(3)))]
    assert rules.translate(events) == of_rank_0(hop_a_store(3))
    assert rules.counts.oversize_dropped == 1


# -------------------------------------------------------------------- windows
def test_events_of_narrower_windows_than_the_widest_created_are_dropped(rules: TrtllmRules) -> None:
    events = [
        event(0, created(), window_size=128),
        event(1, created(), window_size=1024),
        event(2, created(), window_size=512),
        event(3, stored(block(1)), window_size=128),
        event(4, removed(1), window_size=512),
        event(5, stored(block(2)), window_size=1024),
        event(6, removed(2), window_size=1024),
    ]
    assert rules.translate(events) == of_rank_0(hop_a_store(2), EngineRemoved(block_hashes=(2,)))
    assert (rules.counts.created, rules.counts.window_filtered) == (3, 2)


def test_the_first_store_is_filtered_like_any_other(rules: TrtllmRules) -> None:
    events = [event(0, created(), window_size=1024), event(1, stored(block(1)), window_size=128)]
    assert rules.translate(events) == []


def test_a_partial_block_of_a_narrow_window_is_not_remembered(rules: TrtllmRules) -> None:
    events = [
        event(0, created(), window_size=1024),
        event(1, stored(block(2, (5,))), window_size=128),
        event(2, removed(2), window_size=1024),
    ]
    assert rules.translate(events) == of_rank_0(EngineRemoved(block_hashes=(2,)))


def test_without_windows_nothing_is_filtered(rules: TrtllmRules) -> None:
    old = [event(0, created()), event(1, stored(block(1)))]
    assert rules.translate(old) == of_rank_0(hop_a_store(1))
    assert rules.translate([event(2, stored(block(2)), window_size=128)]) == of_rank_0(hop_a_store(2))


# -------------------------------------------------------------------- event ids
def test_the_first_id_of_a_rank_may_be_any(rules: TrtllmRules) -> None:
    assert rules.translate([event(41, stored(block(1)))]) == of_rank_0(hop_a_store(1))


@pytest.mark.parametrize("next_id", [2, 100, 0, -1], ids=["one lost", "many lost", "again", "back"])
def test_a_jump_of_ids_publishes_the_rank_as_cleared_before_the_event(rules: TrtllmRules, next_id: int) -> None:
    rules.translate([event(0, stored(block(1)))])
    assert rules.translate([event(next_id, stored(block(2)))]) == of_rank_0(EngineCleared(), hop_a_store(2))
    assert rules.counts.event_id_gaps == 1


def test_after_a_jump_ids_go_on_from_there(rules: TrtllmRules) -> None:
    rules.translate([event(0, removed()), event(7, removed())])
    assert rules.translate([event(8, removed(1))]) == of_rank_0(EngineRemoved(block_hashes=(1,)))


def test_a_jump_clears_even_when_the_event_itself_publishes_nothing(rules: TrtllmRules) -> None:
    rules.translate([event(0, removed())])
    assert rules.translate([event(2, updated(1))]) == of_rank_0(EngineCleared())


def test_ids_count_for_each_rank_apart(rules: TrtllmRules) -> None:
    rules.translate([event(0, removed(), attention_dp_rank=0), event(0, removed(), attention_dp_rank=1)])
    events = [event(1, removed(1), attention_dp_rank=0), event(2, removed(1), attention_dp_rank=1)]
    assert rules.translate(events) == [
        RankEvent(0, EngineRemoved(block_hashes=(1,))),
        RankEvent(1, EngineCleared()),
        RankEvent(1, EngineRemoved(block_hashes=(1,))),
    ]


def test_events_that_are_filtered_ignored_or_unreadable_use_up_their_ids(rules: TrtllmRules) -> None:
    events = [
        event(0, created(), window_size=1024),
        event(1, stored(block(1)), window_size=128),
        event(2, updated(1), window_size=1024),
        event(3, {"type": "stored", "blocks": "none"}, window_size=1024),
        event(4, removed(5), window_size=1024),
    ]
    assert rules.translate(events) == of_rank_0(EngineRemoved(block_hashes=(5,)))
    assert rules.counts.event_id_gaps == 0


def test_a_jump_forgets_the_rank_s_partial_blocks_for_their_removals_may_be_lost(rules: TrtllmRules) -> None:
    rules.translate([event(0, stored(block(2, (5,))))])
    assert rules.translate([event(2, removed(2))]) == of_rank_0(EngineCleared(), EngineRemoved(block_hashes=(2,)))


# -------------------------------------------------------------------- others
def test_updates_are_counted_and_ignored_even_with_null_diffs(rules: TrtllmRules) -> None:
    empty = {"type": "updated", "block_hash": 1, "cache_level": None, "priority": None}
    assert rules.translate([event(0, updated(1)), event(1, empty)]) == []
    assert rules.counts == PublisherCounts(updated=2)
    assert rules.last_unreadable == ""


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(None, id="null"),
        pytest.param([], id="array"),
        pytest.param({}, id="no type"),
        pytest.param({"type": "teleported"}, id="unknown type"),
        pytest.param({"type": "removed"}, id="removed without hashes"),
        pytest.param(removed(None), id="removed null"),
        pytest.param(removed("ab"), id="removed text"),
        pytest.param({"type": "stored", "blocks": []}, id="stored without parent"),
        pytest.param({"type": "stored", "parent_hash": None}, id="stored without blocks"),
        pytest.param({"type": "stored", "parent_hash": None, "blocks": None}, id="blocks null"),
        pytest.param(stored(block(None)), id="hash null"),
        pytest.param(stored(block("0" * 64)), id="hash in hex, as v2_sha256 has it"),
        pytest.param(stored(block(1.5)), id="hash as float"),
        pytest.param(stored(block(1), parent="0"), id="parent as text"),
        pytest.param(stored(block(1, (1, 2, 3, None))), id="token null"),
        pytest.param(stored(block(1, (1, 2, 3, "f" * 64))), id="token is a digest"),
        pytest.param(stored(block(1, (1, 2, 3, -1))), id="negative token"),
        pytest.param(stored(block(1, (1, 2, 3, 2**32))), id="token beyond u32"),
        pytest.param(stored(block(1, cache_salt=7)), id="salt is a number"),
    ],
)
def test_one_bad_event_never_costs_its_batch(rules: TrtllmRules, data: object) -> None:
    events = [event(0, removed(1)), event(1, data), event(2, removed(2))]
    assert rules.translate(events) == of_rank_0(EngineRemoved(block_hashes=(1,)), EngineRemoved(block_hashes=(2,)))
    assert rules.counts.unreadable == 1
    assert rules.last_unreadable


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"data": removed(3)}, id="no id"),
        pytest.param({"event_id": None, "data": removed(3)}, id="id null"),
        pytest.param({"event_id": "1", "data": removed(3)}, id="id as text"),
        pytest.param({"event_id": 1, "data": removed(3), "attention_dp_rank": "0"}, id="rank as text"),
        pytest.param({}, id="empty"),
        pytest.param(None, id="null"),
    ],
)
def test_an_event_without_a_readable_id_is_a_jump_for_the_next(rules: TrtllmRules, bad: Json) -> None:
    events = [event(0, removed(1)), bad, event(2, removed(2))]
    assert rules.translate(events) == of_rank_0(
        EngineRemoved(block_hashes=(1,)), EngineCleared(), EngineRemoved(block_hashes=(2,))
    )


def test_a_jump_is_published_even_where_the_event_behind_it_cannot_be_read(rules: TrtllmRules) -> None:
    rules.translate([event(0, removed())])
    assert rules.translate([event(5, removed(None))]) == of_rank_0(EngineCleared())


def test_each_kind_is_counted(rules: TrtllmRules) -> None:
    rules.translate(
        [event(0, created()), event(1, stored(block(1))), event(2, removed(1)), event(3, updated(1)), event(4, None)]
    )
    assert rules.counts == PublisherCounts(created=1, stored=1, removed=1, updated=1, unreadable=1)
