"""What the event bench measures, and the sizes."""

from typing import NamedTuple


class EventsPlan(NamedTuple):
    """Sizes in blocks, times in seconds. The defaults are what the targets are for."""

    rounds: int = 3
    """Of all but freshness, which measures many events; medians are shown."""

    # freshness
    rates_blocks_s: tuple[int, ...] = (1_000, 10_000, 50_000)
    agents: int = 4
    flowing_s: float = 6.0
    warming_s: float = 1.0
    has_fleet: bool = True

    # throughput
    throughput: tuple[tuple[int, int], ...] = ((1, 30_000), (8, 120_000), (64, 200_000), (512, 200_000))
    """Blocks of an event, and of a round."""
    bare_messages_min: int = 512
    """Published repeatedly until there are so many: a round has few messages."""

    # cold start
    ranks: int = 8
    rank_blocks: int = 125_000
    tail_blocks: int = 1_250
    """Of each rank: what the log has after the snapshot."""


QUICK = EventsPlan(
    rounds=1,
    rates_blocks_s=(2_000,),
    agents=2,
    flowing_s=1.0,
    warming_s=0.2,
    has_fleet=False,
    throughput=((8, 4_000), (64, 16_000)),
    bare_messages_min=16,
    ranks=2,
    rank_blocks=4_000,
    tail_blocks=64,
)
"""A check that everything runs; the figures mean nothing."""
