"""TensorRT-LLM's polled events: what an event says, ids, what cannot be read, and when a rank is in doubt."""

from collections import Counter
from typing import Any

import pytest

from kv_protocol.hashing import mm_hash
from kv_protocol.openai.option_table import CACHE_SALT_CHARACTERS_MAX
from tests.unit.worker_agent.trtllm_json import (
    BLOCK_SIZE,
    Json,
    block,
    created,
    diff,
    event,
    gone,
    numbered,
    of_rank,
    of_rank_0,
    removed,
    store,
    stored,
    updated,
)
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineCleared, EngineStored, RankEvent

DIGEST = "00000000000000ff" + "0" * 48
UUID = "0b8a9f1e-7c55-4c63-9c61-5f6f0f5a2d11"


def the_store(rules: TrtllmRules, data: Json, **fields: object) -> EngineStored:
    ((_, published),) = rules.translate([event(0, data, **fields)])
    assert isinstance(published, EngineStored)
    return published


# -------------------------------------------------------------------- what an event says
def test_full_blocks_are_published_in_chain_order_with_all_their_tokens(rules: TrtllmRules) -> None:
    data = stored(block(1, (1, 2, 3, 4)), block(2, (5, 6, 7, 8)), parent=9)
    assert the_store(rules, data) == EngineStored(
        block_hashes=(1, 2), parent_block_hash=9, token_ids=(1, 2, 3, 4, 5, 6, 7, 8), block_size=BLOCK_SIZE
    )


def test_hashes_are_u64_whatever_the_sign_they_come_with(rules: TrtllmRules) -> None:
    published = rules.translate(numbered(stored(block(-1), parent=-2), removed(-1, 2**64 - 3, -(2**63))))
    assert published == of_rank_0(store(2**64 - 1, parent=2**64 - 2), gone(2**64 - 1, 2**64 - 3, 2**63))


def test_unknown_keys_are_skipped(rules: TrtllmRules) -> None:
    newer = event(0, stored(block(1, mm_hash=None), later=[1]), sequence=7)
    assert rules.translate([newer]) == of_rank_0(store(1))


def test_nulls_where_the_engine_may_say_nothing_are_no_values(rules: TrtllmRules) -> None:
    envelope = dict.fromkeys(("window_size", "attention_dp_rank", "layer_group_id", "hash_algo"))
    data = stored(block(1, cache_salt=None, mm_keys=None), parent=None, lora_name=None, cache_salt=None)
    assert rules.translate([event(0, data, **envelope)]) == of_rank_0(store(1))


def test_a_block_of_an_old_version_has_neither_items_nor_a_salt(rules: TrtllmRules) -> None:
    tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in (1, 2, 3, 4)]
    old = {"type": "stored_block", "block_hash": 1, "cache_level": 0, "priority": 35, "tokens": tokens}
    assert rules.translate([event(0, stored(old))]) == of_rank_0(store(1))


def test_a_store_of_no_blocks_and_a_removal_of_none_publish_nothing(rules: TrtllmRules) -> None:
    assert rules.translate(numbered(stored(), removed())) == []


def test_the_adapter_s_name_is_published_where_there_is_one(rules: TrtllmRules) -> None:
    assert the_store(rules, stored(block(1), lora_name="adapter")).namespace.lora_name == "adapter"


def test_hashes_of_numeric_algorithms_are_numbers_and_other_algorithms_are_refused() -> None:
    for hash_algo in ("v1_block_key", "v2_sha256_64"):
        assert the_store(TrtllmRules(BLOCK_SIZE), stored(block(1)), hash_algo=hash_algo) == store(1)
    for hash_algo in ("auto", "", "v3"):
        rules = TrtllmRules(BLOCK_SIZE)
        assert rules.translate([event(0, stored(block("ab" * 32)), hash_algo=hash_algo)]) == []
        assert rules.counts == Counter(refused=1)
        allowed = "allowed v1_block_key, v2_sha256_64, v2_sha256"
        assert rules.stale(0) == f"engine event not read: hash_algo: found {hash_algo!r}, {allowed}"


def test_texts_that_are_no_hashes_are_refused() -> None:
    for data in (stored(block("ab" * 31)), stored(block(1), parent="xy" * 32), removed("ab"), updated("")):
        rules = TrtllmRules(BLOCK_SIZE)
        assert rules.translate([event(0, data)]) == []
        assert rules.counts == Counter(refused=1)
        assert "allowed u64, or 64 hex digits" in rules.stale(0)


def test_a_block_of_hex_hashes_is_found_below_its_parent(rules: TrtllmRules) -> None:
    first, second = f"{1:016x}" + "ab" * 24, f"{2:016x}" + "cd" * 24
    data = [stored(block(first)), stored(block(second), parent=first)]
    found = rules.translate([event(at, each, hash_algo="v2_sha256") for at, each in enumerate(data)])
    assert found == [*of_rank_0(store(1)), *of_rank_0(store(2, parent=1))]


def test_the_one_salt_of_an_event_is_published() -> None:
    for salts in (("s",), ("s", "s"), ("s", None), (None, "s"), ("", "s")):
        blocks = [block(number, cache_salt=salt) for number, salt in enumerate(salts)]
        for of_event in ({}, {"cache_salt": None}, {"cache_salt": "s"}):
            published = the_store(TrtllmRules(BLOCK_SIZE), stored(*blocks, **of_event))
            assert published.namespace.cache_salt == "s", (salts, of_event)


def test_the_longest_salt_of_a_request_can_be_read_in_an_event(rules: TrtllmRules) -> None:
    longest = "😀" * CACHE_SALT_CHARACTERS_MAX
    assert the_store(rules, stored(block(1), cache_salt=longest)).namespace.cache_salt == longest
    assert rules.stale(0) == ""


def test_an_event_of_several_salts_is_refused() -> None:
    of_a = block(1, cache_salt="a")
    for mixed in (stored(of_a, block(2, cache_salt="b")), stored(of_a, cache_salt="b")):
        rules = TrtllmRules(BLOCK_SIZE)
        assert rules.translate(numbered(mixed, stored(block(3)))) == of_rank_0(store(3))
        assert rules.counts == Counter(refused=1, stored=1)
        assert rules.stale(0) == "engine event not read: cache_salt: found ['a', 'b'], allowed one salt an event"


# -------------------------------------------------------------------- multimodal items
def test_an_item_is_named_by_its_uuid_else_by_its_hash() -> None:
    cases: list[tuple[Json, str]] = [
        ({"type": "mm_key", "hash": DIGEST, "start_offset": 0}, DIGEST),
        ({"type": "mm_key", "hash": UUID, "start_offset": 3}, UUID),
        ({"type": "mm_key", "hash": DIGEST, "start_offset": 0, "uuid": UUID}, UUID),
        ({"type": "mm_key", "hash": "", "start_offset": 0, "uuid": UUID}, UUID),
        ({"type": "mm_key", "hash": None, "uuid": UUID}, UUID),
        ({"hash": "not hex"}, "not hex"),
    ]
    for key, identity in cases:
        rules = TrtllmRules(BLOCK_SIZE)
        assert the_store(rules, stored(block(1), block(2, mm_keys=[key]))).mm_hashes == ((), (mm_hash(identity),))
        assert rules.counts["named_items"] == (identity != DIGEST)


def test_all_items_of_a_block_are_named_in_their_order_and_other_keys_are_none(rules: TrtllmRules) -> None:
    keys = [{"type": "mm_key", "hash": identity} for identity in (UUID, DIGEST)]
    others = [{"type": "other", "hash": DIGEST}, {"type": "mm_key", "hash": ""}, {}]
    assert the_store(rules, stored(block(1, mm_keys=[*keys, *others]))).mm_hashes == ((mm_hash(UUID), mm_hash(DIGEST)),)
    assert the_store(TrtllmRules(BLOCK_SIZE), stored(block(1, mm_keys=others))).mm_hashes == ()


def test_a_token_that_names_an_item_is_the_item_s_pad(rules: TrtllmRules) -> None:
    """Source of the number: rule 6 of `docs/SOURCES.md` E6."""
    of_item = the_store(rules, stored(block(1, ("f" * 16 + "0" * 48, 2, 3, 4))))
    assert of_item.token_ids == (1_000_000 + 0x3FFF_FFFF, 2, 3, 4)


def test_a_jump_of_ids_publishes_the_rank_as_cleared_before_the_event() -> None:
    for next_id in (2, 100, 0, -1):  # one lost, many lost, again, back
        rules = TrtllmRules(BLOCK_SIZE)
        rules.translate([event(0, stored(block(1)))])
        assert rules.translate([event(next_id, stored(block(2)))]) == of_rank_0(EngineCleared(), store(2))
        assert rules.counts["event_id_gaps"] == 1


def test_events_with_missing_ids_are_counted_as_lost() -> None:
    for ids, lost in (
        *(((0, 1), 0), ((0, 2), 1), ((0, 100), 99), ((0, 3, 7), 5), ((0, 1, 0), 0), ((0, 9, 3), 11), ((41,), 41)),
    ):
        rules = TrtllmRules(BLOCK_SIZE)
        rules.translate([event(event_id, removed(1), attention_dp_rank=3) for event_id in ids])
        assert rules.events_lost.get(3, 0) == lost, ids
        assert set(rules.events_lost) <= {3}


def test_a_jump_clears_even_when_the_event_itself_publishes_nothing(rules: TrtllmRules) -> None:
    rules.translate([event(0, removed())])
    assert rules.translate([event(2, updated(1))]) == of_rank_0(EngineCleared())


def test_ids_count_for_each_rank_apart(rules: TrtllmRules) -> None:
    rules.translate([event(0, removed(), attention_dp_rank=0), event(0, removed(), attention_dp_rank=1)])
    events = [event(1, removed(1), attention_dp_rank=0), event(2, removed(1), attention_dp_rank=1)]
    assert rules.translate(events) == [RankEvent(0, gone(1)), *of_rank(1, EngineCleared(), gone(1))]


def test_events_that_are_filtered_ignored_or_not_read_use_up_their_ids(rules: TrtllmRules) -> None:
    events = [
        event(0, created(), window_size=1024),
        event(1, stored(block(1)), window_size=128),
        event(2, updated(1), window_size=1024),
        event(3, {"type": "stored", "blocks": "none"}, window_size=1024),
        event(4, removed("x"), window_size=1024),
        event(5, removed(5), window_size=1024),
    ]
    assert rules.translate(events) == of_rank_0(gone(5))
    assert rules.counts["event_id_gaps"] == 0


def test_a_jump_is_published_even_where_the_event_behind_it_cannot_be_read(rules: TrtllmRules) -> None:
    rules.translate([event(0, removed())])
    assert rules.translate([event(5, removed(1.5))]) == of_rank_0(EngineCleared())
    assert rules.stale(0) != ""


# -------------------------------------------------------------------- what cannot be read
@pytest.mark.parametrize(
    ("data", "reason", "counted"),
    [
        pytest.param(None, "", "unreadable", id="null"),
        pytest.param(stored(block(1, cache_salt="\ud800")), "", "unreadable", id="salt is half a character"),
        pytest.param(stored(block(1), lora_name="\ud800"), "", "unreadable", id="adapter is half a character"),
        pytest.param(stored(block(1, mm_keys=[{"hash": "\ud800"}])), "", "unreadable", id="item is half a character"),
        pytest.param(updated(1, level={"old_value": 0}), "", "unreadable", id="diff without its new value"),
        pytest.param(stored(block(2**64)), "block_hash: found 18446744073709551616", "refused", id="hash beyond u64"),
        pytest.param(removed(-(2**63) - 1), "block_hash: found -9223372036854775809", "refused", id="hash below i64"),
        pytest.param(stored(block(1, (1, 2, 3, UUID))), f"token_id: found '{UUID}'", "refused", id="token is a name"),
        pytest.param(
            stored(block(1, cache_level=2)), "cache_level: found 2, allowed 0 (GPU), 1 (host)", "refused", id="level"
        ),
        pytest.param(
            updated(1, diff(0, -1)), "cache_level: found -1, allowed 0 (GPU), 1 (host)", "refused", id="moved nowhere"
        ),
    ],
)
def test_one_bad_event_never_costs_its_batch(rules: TrtllmRules, data: object, reason: str, counted: str) -> None:
    assert rules.translate(numbered(removed(1), data, removed(2))) == of_rank_0(gone(1), gone(2))
    assert rules.counts == Counter(removed=2, **{counted: 1})
    assert rules.stale(0).startswith(f"engine event not read: {reason}")


def test_an_envelope_that_cannot_be_read_costs_its_event_alone() -> None:
    for field in ("window_size", "layer_group_id", "hash_algo"):
        for found in (-1, "1024", 2**70, [1]):
            rules = TrtllmRules(BLOCK_SIZE)
            events = [event(0, removed(1)), event(1, removed(2), **{field: found}), event(2, removed(3))]
            assert rules.translate(events) == of_rank_0(gone(1), gone(3)), (field, found)
            assert rules.counts["refused"] + rules.counts["unreadable"] == 1


UNPLACED: list[Any] = [
    {"data": removed(3)},
    *({"event_id": event_id, "data": removed(3)} for event_id in (None, "1")),
    *({"event_id": 1, "data": removed(3), "attention_dp_rank": dp_rank} for dp_rank in ("0", -1, 2**20)),
    *({}, None, "event"),
]


def test_an_event_without_a_readable_place_is_a_jump_for_the_next() -> None:
    for bad in UNPLACED:
        events = [event(0, removed(1)), bad, event(2, removed(2))]
        assert TrtllmRules(BLOCK_SIZE).translate(events) == of_rank_0(gone(1), EngineCleared(), gone(2)), bad


def test_an_event_that_is_none_is_counted() -> None:
    for event_of_none in (None, 7, "event", {"data": 0}, [None], object()):
        rules = TrtllmRules(BLOCK_SIZE)
        assert rules.translate([event_of_none]) == []
        assert rules.counts["unreadable"] >= 1
        assert rules.translate([event(0, removed(1))]) == of_rank_0(gone(1))


def test_each_kind_is_counted(rules: TrtllmRules) -> None:
    rules.translate(numbered(created(), stored(block(1)), removed(1), updated(1), None))
    assert rules.counts == Counter(created=1, stored=1, removed=1, updated=1, unreadable=1)


# -------------------------------------------------------------------- doubt
def test_a_rank_is_in_doubt_from_an_unreadable_event_until_it_is_cleared(rules: TrtllmRules) -> None:
    rules.translate(numbered(stored(block(1)), removed(1.5), stored(block(2))))
    assert rules.stale(0) != ""
    rules.translate([event(7, stored(block(3)))])
    assert rules.stale(0) == ""


def test_other_ranks_are_not_in_doubt(rules: TrtllmRules) -> None:
    rules.translate([event(0, None, attention_dp_rank=1), event(0, removed(), attention_dp_rank=0)])
    assert [rules.stale(dp_rank) == "" for dp_rank in range(3)] == [True, False, True]


def test_after_an_event_of_no_rank_each_rank_is_in_doubt_until_its_next_event(rules: TrtllmRules) -> None:
    both = [event(0, removed(), attention_dp_rank=dp_rank) for dp_rank in (0, 1)]
    rules.translate([*both, None])
    assert all(rules.stale(rank).startswith("engine event of an unknown rank not read: ") for rank in range(3))
    rules.translate([event(1, removed(), attention_dp_rank=0)])
    assert [rules.stale(dp_rank) == "" for dp_rank in (0, 1)] == [True, False]
    assert rules.translate([event(2, removed(), attention_dp_rank=1)]) == of_rank(1, EngineCleared())
    assert rules.stale(1) == ""
