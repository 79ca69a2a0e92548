from typing import Any

import pytest

from kv_protocol.hashing import lora_id
from worker_agent.engines.simulated.blocks import BlockPool, BlockTable
from worker_agent.engines.simulated.events import RankEventLog, render
from worker_agent.engines.simulated.identity import EngineNamespace, trtllm_block_hash
from worker_agent.engines.types import PRIORITY_DEFAULT

PLAIN = EngineNamespace()


class Cache:
    """A pool of 4-token blocks and what it told."""

    def __init__(self, total_blocks: int) -> None:
        self.log = RankEventLog()
        self.pool = BlockPool(total_blocks, 4, self.log.window(512, total_blocks))

    def admit(self, prompt: range, namespace: EngineNamespace = PLAIN, priority: int = PRIORITY_DEFAULT) -> BlockTable:
        table = self.pool.admit(prompt, len(prompt), namespace, priority)
        assert table is not None
        return table

    def hold(self, prompt: range, namespace: EngineNamespace = PLAIN, priority: int = PRIORITY_DEFAULT) -> None:
        self.pool.release(self.admit(prompt, namespace, priority), prompt)

    def reusable_blocks(self, prompt: range, namespace: EngineNamespace = PLAIN) -> int:
        return len(self.pool.match(prompt, namespace))

    def told(self) -> list[dict[str, Any]]:
        return [render(event) for event in self.log.take()]


@pytest.fixture
def cache() -> Cache:
    cache = Cache(4)
    cache.told()
    return cache


def test_creation_is_the_first_event() -> None:
    assert Cache(7).told() == [
        {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [7, 0]}, "window_size": 512}
    ]


def test_events_have_the_engines_shape(cache: Cache) -> None:
    cache.hold(range(6), EngineNamespace.of(None, "pepper"))
    salt_id = 0x96F8CED929CFBB8C
    first = trtllm_block_hash(range(4), cache_salt_id=salt_id)
    second = trtllm_block_hash((4, 5), first, cache_salt_id=salt_id)
    blocks = [
        {
            "type": "stored_block",
            "block_hash": block_hash,
            "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
            "cache_level": 0,
            "priority": 35,
            "mm_keys": [],
            "cache_salt": "pepper",
        }
        for block_hash, tokens in ((first, range(4)), (second, (4, 5)))
    ]
    data = {"type": "stored", "parent_hash": None, "blocks": blocks}
    assert cache.told() == [{"event_id": 1, "data": data, "window_size": 512}]


def test_the_last_prompt_token_is_always_computed(cache: Cache) -> None:
    cache.hold(range(8))
    assert [cache.reusable_blocks(range(length)) for length in (4, 5, 8, 9, 12)] == [0, 1, 1, 2, 2]


def test_a_partial_block_occupies_but_is_never_reused(cache: Cache) -> None:
    cache.hold(range(6))
    assert cache.pool.statistics().cached_blocks == 2
    assert cache.reusable_blocks(range(7)) == 1
    assert cache.pool.held_hashes() == {trtllm_block_hash(range(4))}


def test_adapter_and_salt_keep_equal_tokens_apart(cache: Cache) -> None:
    cache.hold(range(4), EngineNamespace.of("adapter", None))
    askers = [EngineNamespace.of("adapter", ""), EngineNamespace.of("", "salt"), EngineNamespace.of(None, None)]
    assert [cache.reusable_blocks(range(5), asker) for asker in askers] == [1, 0, 0]
    assert cache.pool.held_hashes() == {trtllm_block_hash(range(4), lora_task_id=lora_id("adapter"))}


def test_the_end_of_a_context_makes_its_full_blocks_reusable(cache: Cache) -> None:
    cache.pool.store_context(cache.admit(range(8)), range(8))
    assert cache.reusable_blocks(range(9)) == 1
    assert cache.pool.statistics().used_blocks == 2


def test_a_later_store_names_its_parent(cache: Cache) -> None:
    cache.hold(range(4))
    cache.hold(range(8))
    first = trtllm_block_hash(range(4))
    data = [event["data"] for event in cache.told()]
    assert [(each["parent_hash"], [block["block_hash"] for block in each["blocks"]]) for each in data] == [
        (None, [first]),
        (first, [trtllm_block_hash(range(4, 8), first)]),
    ]


def test_an_equal_block_computed_twice_is_told_once_and_given_back(cache: Cache) -> None:
    one, other = cache.admit(range(8)), cache.admit(range(8))
    cache.pool.store_context(one, range(8))
    cache.pool.store_context(other, range(8))
    assert len(cache.told()) == 1
    assert cache.pool.statistics().used_blocks == 3
    cache.pool.release(one, range(8))
    cache.pool.release(other, range(8))
    now = cache.pool.statistics()
    assert (now.used_blocks, now.cached_blocks, now.free_blocks) == (0, 2, 2)
    assert len(cache.told()) == 1


def test_the_oldest_leaf_goes_first_and_no_child_is_orphaned(cache: Cache) -> None:
    cache.hold(range(8))
    cache.hold(range(100, 108))
    cache.hold(range(5))  # its first block is the first one's, used again; its second takes the oldest leaf's place
    assert [cache.reusable_blocks(prompt) for prompt in (range(9), range(100, 109))] == [1, 2]
    cache.hold(range(200, 204))
    assert [cache.reusable_blocks(prompt) for prompt in (range(9), range(100, 109))] == [1, 1]


def test_removals_in_a_row_are_one_event(cache: Cache) -> None:
    cache.hold(range(16))
    cache.told()
    cache.hold(range(100, 108))
    removed, stored = (event["data"] for event in cache.told())
    assert (removed["type"], len(removed["block_hashes"]), stored["type"]) == ("removed", 2, "stored")


def test_what_running_sequences_have_or_may_want_is_not_given_away(cache: Cache) -> None:
    table = cache.pool.admit(range(4), 12, PLAIN)
    assert table is not None
    assert cache.pool.admit(range(100, 108), 8, PLAIN) is None
    cache.hold(range(100, 104))
    for tokens in range(5, 13):
        cache.pool.extend(table, tokens)
    assert cache.pool.statistics().used_blocks == 3


def test_reused_blocks_count_against_what_can_be_had(cache: Cache) -> None:
    cache.hold(range(8))
    cache.admit(range(100, 108))
    assert cache.pool.admit(range(12), 13, PLAIN) is None
    cache.hold(range(8))


def test_statistics_count_reused_and_missed_blocks(cache: Cache) -> None:
    cache.hold(range(8))
    cache.hold(range(9))
    now = cache.pool.statistics()
    assert (now.reused_blocks, now.missed_blocks, now.alloc_new_blocks, now.alloc_total_blocks) == (2, 3, 3, 5)


def test_a_stored_block_says_its_request_s_priority(cache: Cache) -> None:
    cache.hold(range(4), priority=80)
    (stored,) = cache.told()
    assert [block["priority"] for block in stored["data"]["blocks"]] == [80]


def test_the_lowest_priority_gives_way_first_and_of_equals_the_oldest(cache: Cache) -> None:
    for first, priority in ((0, 80), (10, 35), (20, 35), (30, 10)):
        cache.hold(range(first, first + 4), priority=priority)
    prompts = [range(first, first + 5) for first in (0, 10, 20, 30)]
    found = []
    for new in (40, 50, 60):
        cache.hold(range(new, new + 4), priority=90)
        found.append([cache.reusable_blocks(prompt) for prompt in prompts])
    assert found == [[1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0]]


def test_reuse_raises_a_priority_and_tells_so(cache: Cache) -> None:
    cache.hold(range(4))
    cache.told()
    cache.admit(range(5), priority=80)
    (updated,) = cache.told()
    assert updated["data"] == {
        "type": "updated",
        "block_hash": trtllm_block_hash(range(4)),
        "cache_level": None,
        "priority": {"type": "event_diff", "new_value": 80, "old_value": 35},
    }


def test_reuse_never_lowers_a_priority_so_a_parent_outlives_its_children(cache: Cache) -> None:
    cache.hold(range(8), priority=80)
    cache.hold(range(5), priority=0)
    cache.told()
    cache.hold(range(100, 108), priority=90)
    assert cache.reusable_blocks(range(9)) == 2
    cache.hold(range(200, 204), priority=90)
    assert cache.reusable_blocks(range(9)) == 1
