"""What the event bench measures, and how much of it."""

from typing import NamedTuple

GROUPS = ("freshness", "throughput", "cold", "recovery", "pulse")


class EventsPlan(NamedTuple):
    """Sizes in blocks or batches, times in seconds. The defaults are what the targets are for."""

    is_full: bool = True
    rounds: int = 3
    """Of all but freshness and the pulse, which look at many events and seconds; medians are shown."""

    # freshness
    rates_blocks_s: tuple[int, ...] = (1_000, 10_000, 50_000)
    uncollected_rates_blocks_s: tuple[int, ...] = (10_000, 50_000)
    """Once more with agents that collect no garbage, to tell what that costs."""
    agents: int = 4
    flowing_s: float = 6.0
    warming_s: float = 1.0
    has_fleet: bool = True

    # throughput
    throughput: tuple[tuple[int, int], ...] = ((1, 30_000), (8, 120_000), (64, 200_000), (512, 200_000))
    """Blocks of an event, and of a round."""
    bare_messages_min: int = 512
    """Published again and again until there are so many: those of a round are few, and soon published."""

    # cold start
    ranks: int = 8
    rank_blocks: int = 125_000
    tail_blocks: int = 1_250
    """Of each rank: what the log has behind the snapshot."""

    # recovery
    lost_batches: tuple[int, ...] = (1, 100, 10_000)
    batch_blocks: int = 8

    # pulse
    heartbeat_ranks: tuple[int, ...] = (1, 64)
    heartbeat_blocks: int = 1_000
    heartbeat_s: float = 10.0


QUICK = EventsPlan(
    is_full=False,
    rounds=1,
    rates_blocks_s=(2_000,),
    uncollected_rates_blocks_s=(),
    agents=2,
    flowing_s=1.0,
    warming_s=0.2,
    has_fleet=False,
    throughput=((8, 4_000), (64, 16_000)),
    bare_messages_min=16,
    ranks=2,
    rank_blocks=4_000,
    tail_blocks=64,
    lost_batches=(1, 10),
    heartbeat_ranks=(1, 4),
    heartbeat_blocks=100,
    heartbeat_s=1.0,
)
"""Whether all of it runs; the figures say nothing."""
