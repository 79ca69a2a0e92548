from typing import Any

import msgspec
import pytest

from worker_agent.engines.simulated.blocks import BlockPool, BlockTable
from worker_agent.engines.simulated.events import RankEventLog
from worker_agent.engines.simulated.identity import EngineNamespace, trtllm_block_hash
from worker_agent.port.types import PRIORITY_DEFAULT

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
        return [msgspec.to_builtins(event) for event in self.log.take()]


@pytest.fixture
def cache() -> Cache:
    cache = Cache(4)
    cache.told()
    return cache


def test_creation_is_the_first_event() -> None:
    assert Cache(7).told() == [
        {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [7, 0]}, "window_size": 512}
    ]


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
