"""What a world consists of, and what goes wrong in it how often; drawn from a seed."""

from random import Random
from typing import Literal

import msgspec

from indexer.follow.follower import FollowerLimits
from router.fleet.registry import TextDigests
from tests.simulation.network import Faults

MODEL = "m"
DIGESTS = TextDigests(tokenizer="tokenizer", template="template")
DELAY_MAX_S = 1.0
NEVER_FULL = 100_000
NEVER_EXPIRES_S = 300.0
NO_FAULTS = Faults()

Kind = Literal["faulty", "restless", "torn", "silent", "calm"]
"""All faults, a little of each; many restarts, and late messages of former lives; partitions, and a broker and a log
that fail, over connections; wrong hashes in messages that can be read; none at all, not even a delay."""


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one worker, small enough that everything gives way sometimes."""

    dp_ranks: tuple[int, ...] = (0,)
    total_kv_blocks: int = 24
    host_blocks: int = 6
    ring_payloads: int = NEVER_FULL
    event_buffer_max_size: int = NEVER_FULL
    stall_ratio: float = 0.0
    outbox_bytes_max: int = 1 << 20
    ring_bytes_max: int = 1 << 20
    window: int = 32
    answer_part_s: float = 0.002
    hop_a: Faults = NO_FAULTS
    replay_delay_max_s: float = 0.0


class RouterSetup(msgspec.Struct, frozen=True, kw_only=True):
    """How a router chooses, and how long its leases live."""

    lease_s: float = NEVER_EXPIRES_S
    temperature: float = 0.0
    predict_on_route: bool = True


class LogSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the broker's log keeps (0: all), and how often indexes look whether a snapshot is due (0: never)."""

    bytes_max: int = 0
    age_max_s: float = 0.0
    refusal_ratio: float = 0.0
    keep_every_s: float = 0.0
    snapshot_period_s: float = 4.0


class Troubles(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each befall the world."""

    deaths: int = 0
    deploys: int = 0
    restarts: int = 0
    crashes: int = 0
    freezes: int = 0
    cuts: int = 0
    clock_steps: int = 0


class WorldSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a world, and the faults that they suffer."""

    agents: tuple[AgentSetup, ...]
    routers: int = 1
    indexers: int = 0
    router: RouterSetup = RouterSetup()
    log: LogSetup = LogSetup()
    hop_b: Faults = NO_FAULTS
    is_connection: bool = True
    arrivals_per_s: float = 5.0
    troubles: Troubles = Troubles()
    follower: FollowerLimits = FollowerLimits()


def drawn_setup(kind: Kind, random: Random) -> WorldSetup:
    """Return the setup that `random` chooses."""
    dp_ranks = random.choice([(0,), (0,), (0, 1)])
    if kind == "calm":
        log = LogSetup(bytes_max=8000, keep_every_s=1.0)
        return WorldSetup(agents=(AgentSetup(dp_ranks=dp_ranks),) * 2, indexers=1, log=log)
    is_connection = kind == "torn" or (kind == "faulty" and random.random() < 0.3)
    hop_b = _hop_b(kind, random, is_connection=is_connection)
    return WorldSetup(
        agents=(_agent(dp_ranks, random),) * (3 if kind == "restless" else random.choice([1, 2, 3])),
        routers=random.choice([1, 1, 2]),
        indexers=random.choice([0, 1]),
        router=_router(random),
        log=_log(kind, random),
        hop_b=hop_b,
        is_connection=is_connection,
        arrivals_per_s=random.choice([3.0, 9.0]),
        troubles=_troubles(kind, random) if kind != "silent" else Troubles(deaths=random.randrange(2)),
        follower=_follower(random, hop_b),
    )


def _router(random: Random) -> RouterSetup:
    return RouterSetup(
        lease_s=random.choice([NEVER_EXPIRES_S, 0.7]),
        temperature=random.choice([0.0, 0.5]),
        predict_on_route=random.choice([True, False]),
    )


def _agent(dp_ranks: tuple[int, ...], random: Random) -> AgentSetup:
    return AgentSetup(
        dp_ranks=dp_ranks,
        total_kv_blocks=random.choice([20, 32, 80]),
        host_blocks=random.choice([0, 6]),
        ring_payloads=random.choice([NEVER_FULL, NEVER_FULL, 3]),
        event_buffer_max_size=random.choice([NEVER_FULL, NEVER_FULL, 4]),
        stall_ratio=random.choice([0.0, 0.3]),
        outbox_bytes_max=random.choice([1 << 20, 1 << 20, 400]),
        ring_bytes_max=random.choice([1 << 20, 1 << 20, 1 << 20, 1000, 0]),
        window=random.choice([32, 4, 1]),
        answer_part_s=random.choice([0.002, 0.3]),
        hop_a=Faults(loss_ratio=random.choice([0.0, 0.1, 0.3]), delay_max_s=random.choice([0.0, 0.3])),
        replay_delay_max_s=random.choice([0.01, 0.3, DELAY_MAX_S]),
    )


def _follower(random: Random, hop_b: Faults) -> FollowerLimits:
    """Return limits whose patience is about that of production; less than an answer takes would be none."""
    answer_s = 2.0 if hop_b.delay_max_s == DELAY_MAX_S else random.choice([1.0, 2.0])
    return FollowerLimits(answer_s=answer_s, backoff_max_s=4 * answer_s, early_batches_max=random.choice([2, 4096]))


def _log(kind: Kind, random: Random) -> LogSetup:
    return LogSetup(
        bytes_max=random.choice([0, 4000, 20_000]),
        age_max_s=random.choice([0.0, 0.0, 5.0]),
        refusal_ratio=random.choice([0.0, 0.2]),
        keep_every_s=random.choice([0.0, 1.0]) if kind != "torn" else 1.0,
    )


def _hop_b(kind: Kind, random: Random, *, is_connection: bool) -> Faults:
    delay_max_s = DELAY_MAX_S if kind == "restless" else random.choice([0.01, 0.1, DELAY_MAX_S])
    if is_connection:
        return Faults(delay_max_s=delay_max_s / 5)
    return Faults(
        loss_ratio=random.choice([0.0, 0.03, 0.15]) if kind == "faulty" else 0.0,
        double_ratio=random.choice([0.0, 0.05]),
        spoil_ratio=0.1 if kind == "silent" else random.choice([0.0, 0.03, 0.08]),
        delay_max_s=delay_max_s,
    )


def _troubles(kind: Kind, random: Random) -> Troubles:
    is_torn = kind == "torn"
    return Troubles(
        deaths=random.randrange(4),
        deploys=3 if kind == "restless" else random.choice([0, 0, 1]),
        restarts=random.randrange(3),
        crashes=random.randrange(3) if is_torn else random.choice([0, 0, 1]),
        freezes=random.randrange(2) if is_torn else 0,
        cuts=random.randrange(1, 4) if is_torn else random.choice([0, 0, 1]),
        clock_steps=random.randrange(3),
    )
