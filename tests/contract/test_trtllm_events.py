"""Each version's polled events as JSON, by hand from `docs/SOURCES.md` E1.3 and E1.4, and what is published.

The blocks have 4 tokens. The number of a UUID is XXH3 of its reference library, pad values are rule 6 of section 6.
"""

import json

import pytest

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


@pytest.mark.parametrize("golden", [OLD, MULTIMODAL, LAYER_GROUPS], ids=["old", "multimodal", "layer-groups"])
def test_each_version_s_events_are_published_as_specified(golden: Golden) -> None:
    events, published = golden
    rules = TrtllmRules(4)
    assert rules.translate(json.loads(events)) == published
    assert (rules.stale(0), rules.counts["refused"], rules.counts["unreadable"]) == ("", 0, 0)
