"""What a world consists of, and what goes wrong in it how often; drawn from a seed."""

from random import Random
from typing import Literal

import msgspec

from tests.simulation.link import Faults

DELAY_MAX_S = 1.0
NEVER_FULL = 100_000
NO_FAULTS = Faults()

Kind = Literal["faulty", "restless", "silent", "calm"]
"""All faults; many restarts, and late messages of former lives; wrong hashes in messages that can be read; none at all,
not even a delay."""


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one worker, small enough that everything gives way sometimes."""

    dp_ranks: tuple[int, ...] = (0,)
    total_kv_blocks: int = 24
    host_blocks: int = 6
    ring_payloads: int = NEVER_FULL
    event_buffer_max_size: int = NEVER_FULL
    stall_ratio: float = 0.0
    outbox_bytes_max: int = 1 << 20
    hop_a: Faults = NO_FAULTS
    replay_delay_max_s: float = 0.0


class WorldSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Who is there, and what befalls them."""

    agents: tuple[AgentSetup, ...]
    hop_b: Faults = NO_FAULTS
    publish_failure_ratio: float = 0.0
    deaths: int = 0
    deploys: int = 0
    index_restarts: int = 0
    outages: int = 0
    kept_max: int = 4096


def drawn_setup(kind: Kind, random: Random) -> WorldSetup:
    """Return the setup that `random` chooses."""
    dp_ranks = random.choice([(0,), (0,), (0, 1)])
    if kind == "calm":
        return WorldSetup(agents=(AgentSetup(dp_ranks=dp_ranks),) * 2)
    agent = AgentSetup(
        dp_ranks=dp_ranks,
        total_kv_blocks=random.choice([20, 32]),
        host_blocks=random.choice([0, 6]),
        ring_payloads=random.choice([NEVER_FULL, NEVER_FULL, 3]),
        event_buffer_max_size=random.choice([NEVER_FULL, NEVER_FULL, 4]),
        stall_ratio=random.choice([0.0, 0.3]),
        outbox_bytes_max=random.choice([1 << 20, 200]),
        hop_a=Faults(loss_ratio=random.choice([0.0, 0.1, 0.3]), delay_max_s=random.choice([0.0, 0.3])),
        replay_delay_max_s=random.choice([0.01, 0.3, DELAY_MAX_S]),
    )
    return WorldSetup(
        agents=(agent,) * (3 if kind == "restless" else random.choice([1, 2, 3])),
        hop_b=Faults(
            loss_ratio=random.choice([0.0, 0.05, 0.3]) if kind == "faulty" else 0.0,
            double_ratio=random.choice([0.0, 0.1]),
            spoil_ratio=0.2 if kind == "silent" else random.choice([0.0, 0.05]),
            delay_max_s=DELAY_MAX_S if kind == "restless" else random.choice([0.01, 0.1, DELAY_MAX_S]),
        ),
        publish_failure_ratio=random.choice([0.0, 0.2]),
        deaths=random.randrange(4),
        deploys=3 if kind == "restless" else random.choice([0, 0, 1]),
        index_restarts=random.randrange(3),
        outages=random.randrange(2),
        kept_max=random.choice([2, 4096]),
    )
