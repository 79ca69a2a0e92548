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


class RankCache:
    """One rank's pools, and the events of their changes."""

    def __init__(
        self,
        engine: EngineDescription,
        layout: CacheLayout,
        attention_dp_rank: int | msgspec.UnsetType,
        block_hash: BlockHash,
    ) -> None:
        self.events = RankEventLog(attention_dp_rank)
        widest = self.events.window(engine.max_seq_len, engine.total_kv_blocks, layout.host_blocks)
        host = HostTier(layout.host_blocks, widest) if layout.host_blocks else None
        sizes = (engine.total_kv_blocks, engine.block_size)
        narrow_blocks = layout.narrow_blocks or engine.total_kv_blocks
        narrow = [
            NarrowPool(window, narrow_blocks, engine.block_size, self.events.window(window, narrow_blocks))
            for window in layout.narrow_windows
        ]
        self.pool = (
            WindowedPool(*sizes, widest, block_hash, host, narrow=narrow)
            if narrow
            else BlockPool(*sizes, widest, block_hash, host)
        )
