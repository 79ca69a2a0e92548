"""What a simulated KV cache gives up first, and what it keeps on the host.

That it tells what it holds, and reuses what it tells, is a property: `tests/unit/properties/test_simulated_blocks.py`.
"""

from typing import Any

from kv_protocol.events import Tier
from kv_protocol.hashing import Namespace
from tests.support.held_hashes import held_hashes
from worker_agent.engines.simulated.blocks import BlockPool, RankEvents

PLAIN = Namespace()


class Cache:
    """A pool of four 4-token blocks, with three more on the host if that is wanted, and what it told."""

    def __init__(self, host_blocks: int = 0) -> None:
        self.pool = BlockPool(4, 4, RankEvents(512), host_blocks=host_blocks)
        self.told()

    def hold(self, prompt: range) -> None:
        table = self.pool.admit(prompt, len(prompt), PLAIN)
        assert table is not None
        self.pool.release(table, prompt)

    def reusable_blocks(self, *prompts: range) -> list[int]:
        return [len(self.pool.match(prompt, PLAIN)) for prompt in prompts]

    def told(self) -> list[dict[str, Any]]:
        return [event["data"] for event in self.pool.events.take()]


def test_the_oldest_leaf_goes_first_and_no_child_is_orphaned() -> None:
    cache = Cache()
    cache.hold(range(8))
    cache.hold(range(100, 108))
    cache.hold(range(5))  # its first block is the first one's, used again; its second takes the oldest leaf's place
    assert cache.reusable_blocks(range(9), range(100, 109)) == [1, 2]
    cache.hold(range(200, 204))
    assert cache.reusable_blocks(range(9), range(100, 109)) == [1, 1]


def test_removals_in_a_row_are_one_event() -> None:
    cache = Cache()
    cache.hold(range(16))
    cache.told()
    cache.hold(range(100, 108))
    removed, stored = cache.told()
    assert (removed["type"], len(removed["block_hashes"]), stored["type"]) == ("removed", 2, "stored")


def test_a_full_block_moves_to_the_host_and_a_partial_one_is_not_worth_the_copy() -> None:
    cache = Cache(host_blocks=3)
    cache.hold(range(6))
    full, partial = (block["block_hash"] for block in cache.told()[-1]["blocks"])
    cache.hold(range(100, 116))
    told = cache.told()
    assert partial in {block for data in told for block in data.get("block_hashes", ())}
    assert held_hashes(cache.pool, Tier.HOST) == {full}
    level = {"type": "event_diff", "new_value": 1, "old_value": 0}
    assert {"type": "updated", "block_hash": full, "cache_level": level, "priority": None} in told
