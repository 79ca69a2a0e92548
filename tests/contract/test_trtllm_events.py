"""Each version's polled events as JSON, by hand from `docs/SOURCES.md` E1.3 and E1.4, and what is published.

The blocks have 4 tokens. The number of a UUID is XXH3 of its reference library, pad values are rule 6 of section 6.
"""

import json

import pytest

from kv_protocol.events import Tier
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineRemoved, EngineStored, RankEvent

Golden = tuple[str, list[RankEvent]]

OLD: Golden = (  # no window_size, no attention_dp_rank, no mm_keys, no cache_salt; the last block is partial
    """[
    {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [101, 0]}},
    {"event_id": 1, "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": 924206229973855, "cache_level": 0, "priority": 35, "tokens": [
            {"type": "unique_token", "token_id": 1, "token_extra_id": 0},
            {"type": "unique_token", "token_id": 2, "token_extra_id": 0},
            {"type": "unique_token", "token_id": 3, "token_extra_id": 0},
            {"type": "unique_token", "token_id": 4, "token_extra_id": 0}]},
        {"type": "stored_block", "block_hash": 6875034662206558884, "cache_level": 0, "priority": 35, "tokens": [
            {"type": "unique_token", "token_id": 5, "token_extra_id": 0},
            {"type": "unique_token", "token_id": 6, "token_extra_id": 0}]}]}},
    {"event_id": 2, "data": {"type": "removed", "block_hashes": [6875034662206558884]}},
    {"event_id": 3, "data": {"type": "removed", "block_hashes": [924206229973855]}}
    ]""",
    [
        RankEvent(
            0,
            EngineStored(block_hashes=(924206229973855,), parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=4),
        ),
        RankEvent(0, EngineRemoved(block_hashes=(924206229973855,))),
    ],
)

WINDOWS: Golden = (  # VSWA: two pools, both speak of the same blocks; u64 hashes above 2^63
    """[
    {"event_id": 0, "window_size": 32, "data": {"type": "created", "num_blocks_per_cache_level": [40, 0]}},
    {"event_id": 1, "window_size": 256, "data": {"type": "created", "num_blocks_per_cache_level": [90, 0]}},
    {"event_id": 2, "window_size": 32, "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": 18446744073709551611, "cache_level": 0, "priority": 35, "mm_keys": [],
         "tokens": [{"type": "unique_token", "token_id": 7, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 8, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 9, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 10, "token_extra_id": 0}]}]}},
    {"event_id": 3, "window_size": 256, "data": {"type": "stored", "parent_hash": 9223372036854775808, "blocks": [
        {"type": "stored_block", "block_hash": 18446744073709551611, "cache_level": 0, "priority": 35, "mm_keys": [],
         "tokens": [{"type": "unique_token", "token_id": 7, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 8, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 9, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 10, "token_extra_id": 0}]}]}},
    {"event_id": 4, "window_size": 32, "data": {"type": "removed", "block_hashes": [18446744073709551611]}},
    {"event_id": 5, "window_size": 256, "data": {"type": "removed", "block_hashes": [1, 18446744073709551611]}}
    ]""",
    [
        RankEvent(
            0,
            EngineStored(
                block_hashes=(0xFFFF_FFFF_FFFF_FFFB,),
                parent_block_hash=0x8000_0000_0000_0000,
                token_ids=(7, 8, 9, 10),
                block_size=4,
            ),
        ),
        RankEvent(0, EngineRemoved(block_hashes=(1, 0xFFFF_FFFF_FFFF_FFFB))),
    ],
)

ATTENTION_DP: Golden = (  # ids count per rank, and ranks come in any order; both ranks hold the same partial block
    """[
    {"event_id": 0, "window_size": 256, "attention_dp_rank": 1,
     "data": {"type": "created", "num_blocks_per_cache_level": [90, 0]}},
    {"event_id": 0, "window_size": 256, "attention_dp_rank": 0,
     "data": {"type": "created", "num_blocks_per_cache_level": [90, 0]}},
    {"event_id": 1, "window_size": 256, "attention_dp_rank": 1,
     "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": 5, "cache_level": 0, "priority": 35, "mm_keys": [], "cache_salt": null,
         "tokens": [{"type": "unique_token", "token_id": 1, "token_extra_id": 0}]}]}},
    {"event_id": 1, "window_size": 256, "attention_dp_rank": 0,
     "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": 5, "cache_level": 0, "priority": 35, "mm_keys": [], "cache_salt": null,
         "tokens": [{"type": "unique_token", "token_id": 1, "token_extra_id": 0}]}]}},
    {"event_id": 2, "window_size": 256, "attention_dp_rank": 0, "data": {"type": "removed", "block_hashes": [5]}},
    {"event_id": 2, "window_size": 256, "attention_dp_rank": 1, "data": {"type": "removed", "block_hashes": [5, 6]}}
    ]""",
    [RankEvent(1, EngineRemoved(block_hashes=(6,)))],
)

MULTIMODAL: Golden = (  # a digest in one block; in the next the caller's UUID, as V1 has it; then V2: digest and UUID
    """[
    {"event_id": 0, "window_size": 256, "data": {"type": "created", "num_blocks_per_cache_level": [90, 0]}},
    {"event_id": 1, "window_size": 256, "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": 1, "cache_level": 0, "priority": 35, "cache_salt": null, "mm_keys": [
            {"type": "mm_key", "hash": "00000000000000010000000000000000000000000000000000000000000000aa",
             "start_offset": 0}],
         "tokens": [{"type": "unique_token", "token_id": 1, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 32000, "token_extra_id": 11},
                    {"type": "unique_token", "token_id": 32001, "token_extra_id": 11},
                    {"type": "unique_token", "token_id": 2, "token_extra_id": 0}]},
        {"type": "stored_block", "block_hash": 2, "cache_level": 0, "priority": 35, "cache_salt": null, "mm_keys": [
            {"type": "mm_key", "hash": "0b8a9f1e-7c55-4c63-9c61-5f6f0f5a2d11", "start_offset": 4}],
         "tokens": [{"type": "unique_token", "token_id": 3, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 4, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 5, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 6, "token_extra_id": 0}]},
        {"type": "stored_block", "block_hash": 3, "cache_level": 0, "priority": 35, "cache_salt": null, "mm_keys": [
            {"type": "mm_key", "hash": "ffffffffffffffff0000000000000000000000000000000000000000000000bb",
             "start_offset": 0, "uuid": "0b8a9f1e-7c55-4c63-9c61-5f6f0f5a2d11"}],
         "tokens": [{"type": "unique_token", "token_extra_id": 0,
                     "token_id": "ffffffffffffffff0000000000000000000000000000000000000000000000bb"},
                    {"type": "unique_token", "token_id": 32001, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 32002, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 9, "token_extra_id": 0}]}]}}
    ]""",
    [
        RankEvent(
            0,
            EngineStored(
                block_hashes=(1, 2, 3),
                parent_block_hash=None,
                token_ids=(1, 32000, 32001, 2, 3, 4, 5, 6, 1_000_000 + 0x3FFF_FFFF, 32001, 32002, 9),
                block_size=4,
                mm_hashes=((1,), (0x101D_2A3D_0509_3B66,), (0x101D_2A3D_0509_3B66,)),
            ),
        )
    ],
)

SALTS: Golden = (  # TensorRT-LLM >= 1.3: one salt over the blocks; a block without one is of the event's
    """[
    {"event_id": 0, "window_size": 256, "data": {"type": "created", "num_blocks_per_cache_level": [90, 0]}},
    {"event_id": 1, "window_size": 256, "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": 1, "cache_level": 0, "priority": 35, "mm_keys": [],
         "cache_salt": "tenant-a",
         "tokens": [{"type": "unique_token", "token_id": 1, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 2, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 3, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 4, "token_extra_id": 0}]},
        {"type": "stored_block", "block_hash": 2, "cache_level": 0, "priority": 35, "mm_keys": [],
         "cache_salt": null,
         "tokens": [{"type": "unique_token", "token_id": 5, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 6, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 7, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 8, "token_extra_id": 0}]}]}}
    ]""",
    [
        RankEvent(
            0,
            EngineStored(
                block_hashes=(1, 2),
                parent_block_hash=None,
                token_ids=(1, 2, 3, 4, 5, 6, 7, 8),
                block_size=4,
                cache_salt="tenant-a",
            ),
        )
    ],
)

LAYER_GROUPS: Golden = (  # KV cache manager V2: three groups, two of the widest window; v2_sha256_64
    """[
    {"event_id": 0, "window_size": 128, "layer_group_id": 0, "hash_algo": "v2_sha256_64",
     "data": {"type": "created", "num_blocks_per_cache_level": [40, 20]}},
    {"event_id": 1, "window_size": 4096, "layer_group_id": 1, "hash_algo": "v2_sha256_64",
     "data": {"type": "created", "num_blocks_per_cache_level": [40, 20]}},
    {"event_id": 2, "window_size": 4096, "layer_group_id": 2, "hash_algo": "v2_sha256_64",
     "data": {"type": "created", "num_blocks_per_cache_level": [40, 20]}},
    {"event_id": 3, "window_size": 128, "layer_group_id": 0, "hash_algo": "v2_sha256_64",
     "data": {"type": "removed", "block_hashes": [9223372036854775809]}},
    {"event_id": 4, "window_size": 4096, "layer_group_id": 1, "hash_algo": "v2_sha256_64",
     "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": 9223372036854775809, "cache_level": 0, "priority": 35, "mm_keys": [],
         "cache_salt": null,
         "tokens": [{"type": "unique_token", "token_id": 1, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 2, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 3, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 4, "token_extra_id": 0}]}]}},
    {"event_id": 5, "window_size": 4096, "layer_group_id": 2, "hash_algo": "v2_sha256_64",
     "data": {"type": "removed", "block_hashes": [9223372036854775809]}}
    ]""",
    [
        RankEvent(
            0,
            EngineStored(
                block_hashes=(0x8000_0000_0000_0001,),
                parent_block_hash=None,
                token_ids=(1, 2, 3, 4),
                block_size=4,
                group_idx=1,
            ),
        ),
        RankEvent(0, EngineRemoved(block_hashes=(0x8000_0000_0000_0001,), group_idx=2)),
    ],
)

NULL_DIFFS_AND_MOVES: Golden = (
    """[
    {"event_id": 0, "window_size": 256, "data": {"type": "created", "num_blocks_per_cache_level": [90, 30]}},
    {"event_id": 1, "window_size": 256, "data": {"type": "updated", "block_hash": 1,
        "cache_level": null, "priority": null}},
    {"event_id": 2, "window_size": 256, "data": {"type": "updated", "block_hash": 1, "cache_level": null,
        "priority": {"type": "event_diff", "new_value": 80, "old_value": 35}}},
    {"event_id": 3, "window_size": 256, "data": {"type": "updated", "block_hash": 1, "priority": null,
        "cache_level": {"type": "event_diff", "new_value": 1, "old_value": 0}}},
    {"event_id": 4, "window_size": 256, "data": {"type": "removed", "block_hashes": [1, null]}},
    {"event_id": 5, "window_size": 256, "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": null, "cache_level": 0, "priority": 35, "mm_keys": [],
         "tokens": [{"type": "unique_token", "token_id": 1, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 2, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 3, "token_extra_id": 0},
                    {"type": "unique_token", "token_id": 4, "token_extra_id": 0}]}]}}
    ]""",
    [
        RankEvent(
            0,
            EngineStored(block_hashes=(1,), parent_block_hash=None, token_ids=(), block_size=0, tier=Tier.HOST),
        ),
        RankEvent(0, EngineRemoved(block_hashes=(1,))),
        RankEvent(0, EngineRemoved(block_hashes=(1,), tier=Tier.HOST)),
    ],
)


@pytest.mark.parametrize(
    "golden",
    [
        pytest.param(OLD, id="old"),
        pytest.param(WINDOWS, id="windows"),
        pytest.param(ATTENTION_DP, id="attention-dp"),
        pytest.param(MULTIMODAL, id="multimodal"),
        pytest.param(SALTS, id="salts"),
        pytest.param(LAYER_GROUPS, id="layer-groups"),
        pytest.param(NULL_DIFFS_AND_MOVES, id="null-diffs-and-moves"),
    ],
)
def test_each_version_s_events_are_published_as_specified(golden: Golden) -> None:
    events, published = golden
    rules = TrtllmRules(4)
    assert rules.translate(json.loads(events)) == published
    assert (rules.stale(0), rules.counts.refused, rules.counts.unreadable) == ("", 0, 0)


def test_a_hex_hash_of_v2_sha256_is_the_number_that_the_engine_calls_v2_sha256_64() -> None:
    event = """[{"event_id": 3, "window_size": 256, "layer_group_id": 0, "hash_algo": "v2_sha256",
        "data": {"type": "removed", "block_hashes":
            ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]}}]"""
    created = {"event_id": 2, "window_size": 256, "data": {"type": "created", "num_blocks_per_cache_level": [9, 0]}}
    removed = EngineRemoved(block_hashes=(0x9F86D081884C7D65,))
    rules = TrtllmRules(4)
    assert rules.translate([created, *json.loads(event)]) == [RankEvent(0, removed)]
    assert rules.stale(0) == ""
