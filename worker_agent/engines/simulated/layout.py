"""The layout of a rank's KV cache, and its construction.

pool            blocks                              window                  host tier
widest          `total_kv_blocks`                   `max_seq_len`           `host_blocks`
each narrow     `narrow_blocks`, 0: as the widest   of `narrow_windows`     none
"""

import msgspec

from worker_agent.engines.simulated.blocks import BlockPool, HostTier
from worker_agent.engines.simulated.events import RankEventLog
from worker_agent.engines.simulated.identity import BlockHash
from worker_agent.engines.simulated.windows import NarrowPool, WindowedPool
from worker_agent.port.types import EngineDescription

KV_TOKEN_BYTES = 144 * 1024
"""K/V of one token in all layers: 36 layers, 8 heads of 128, keys and values, bf16. The model of `timing.H200_8B`."""


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Beyond the widest window: the host tier (0 blocks: none), and narrower windows, in tokens."""

    host_blocks: int = 0
    narrow_windows: tuple[int, ...] = ()
    narrow_blocks: int = 0


GPU_ONLY = CacheLayout()


def rank_pool(engine: EngineDescription, layout: CacheLayout, events: RankEventLog, block_hash: BlockHash) -> BlockPool:
    """Return one rank's pools, whose changes go to `events`."""
    widest = events.window(engine.max_seq_len, engine.total_kv_blocks, layout.host_blocks)
    host = HostTier(layout.host_blocks, widest) if layout.host_blocks else None
    sizes, narrow_blocks = (engine.total_kv_blocks, engine.block_size), layout.narrow_blocks or engine.total_kv_blocks
    narrow = [
        NarrowPool(window, narrow_blocks, engine.block_size, events.window(window, narrow_blocks))
        for window in layout.narrow_windows
    ]
    if not narrow:
        return BlockPool(*sizes, widest, block_hash, host)
    return WindowedPool(*sizes, widest, block_hash, host, narrow=narrow)
