"""The reference (`tests/reference`) decides, forgets and remembers as the router does, through random lives."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.journal import (
    CheckpointBegan,
    CheckpointPart,
    FleetApplied,
    LearntRates,
    LedgerApplied,
    LoadApplied,
    RatesRestored,
    Refused,
    WorkerHeard,
)
from kv_protocol.ledger import Expired, Renewed, Routed
from kv_protocol.load import LoadReport
from router.decision.eligibility import WorkerNotNamed
from router.decision.policy import CostParameters, Policy
from router.decision.routing import Lease
from router.decision.state import RouterState
from router.decision.verdict import Verdict
from router.journal.encoder import JournalCheckpoint
from router.native import built
from tests.reference.following import KV_SEQ, Answered, Decided, Following
from tests.reference.policies import MODES
from tests.support.amount import examples
from tests.unit.properties.router_life import MODELS, POLICIES, SETTINGS, STEPS, Life
from tests.unit.router.samples import registered, route

MORE = {
    "open to newcomers": Policy(affinity="soft", newcomers=False),
    "without credit": Policy(affinity="hard", parameters=CostParameters(overlap_credit=0.0)),
    "late": Policy(mode="predicted-ttft", ttft_target_s=0.02, affinity="hard", unmet="reject"),
}
"""Policies that `POLICIES` lacks."""


class SlackLife(Life):
    """A life with seldom a tick, in which spans are over at the very moment when something else happens.

    Its leases live for so long that engines' reports end some.
    """

    settings = replace(SETTINGS, lease_s=60.0)

    async def _wait(self) -> None:
        await self.clock.advance(self.draw.choice([0.0, 0.5, 1.0]))
        if self.draw.random() < 0.1:
            self.routing.tick()


def decided_by(what: object) -> Decided | None:
    """Return the decision or the refusal that a recorder was told of."""
    if isinstance(what, Refused):
        return Decided(what.request, what.now_s, exclusions=what.exclusions)
    if not isinstance(what, Verdict):
        return None
    return Decided(what.request, what.now_s, what.seed, what.journal_record(KV_SEQ))


def tables_of(state: RouterState) -> Callable[[CheckpointBegan], dict[str, list[bytes]]]:
    """Return a function that returns the parts of a checkpoint of the state, by table."""

    def parts(began: CheckpointBegan) -> dict[str, list[bytes]]:
        found = dict[str, list[bytes]]()
        for part in JournalCheckpoint(state, began).parts():
            if isinstance(part, CheckpointPart):
                found.setdefault(part.table, []).append(part.rows)
        return found

    return parts


def followed(seed: int, policy: Policy, kind: type[Life] = Life) -> tuple[Life, Following]:
    """Return a life that has begun, and the reference that follows it."""
    followers = list[Following]()

    def answered() -> Answered:
        assert life.index.answered is not None
        return life.index.answered

    def follow(_clock: object, state: RouterState) -> Following:
        followers.append(Following(kind.settings, decided_by, tables_of(state), answered))
        return followers[0]

    life = kind(seed, policy, follow)
    if seed % 2:
        learnt = tuple(LearntRates(model, 1.5, 0.7, 90.0, 4) for model in MODELS[seed % 3 :])
        life.routing.apply(RatesRestored(now_s=life.clock.now(), models=learnt))
    life.begin()
    return life, followers[0]


@pytest.mark.parametrize("kind", [Life, SlackLife])
@pytest.mark.parametrize("policy", sorted(POLICIES | MORE))
def test_a_life_has_the_records_and_checkpoints_of_the_reference(policy: str, kind: type[Life]) -> None:
    for seed in range(examples(8, least=1)):
        life, following = followed(seed, (POLICIES | MORE)[policy], kind)
        asyncio.run(life.go_on(STEPS))
        following.compare_tables(life.clock.now())
        assert min(following.decisions, following.refusals, following.brought) > 0, seed


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_worker_of_all_endpoints_that_answers_often_is_known_as_by_the_reference(mode: str) -> None:
    life, following = followed(1, Policy(mode=mode), SlackLife)
    now_s, event = life.clock.now(), _worker_of_every_endpoint()
    life.routing.apply(FleetApplied(now_s=now_s, event=event))
    life.routing.apply(WorkerHeard(now_s=now_s, worker_id=event.worker_id, instance=event.instance))
    leases = list[Lease]()
    for number in range(60):
        request = route(
            10 * number,
            decision_id=f"d{number}",
            endpoint="embeddings" if number in range(1, 12, 2) else "chat",
            pinned_worker=event.worker_id if mode == "direct" or number >= 12 else None,
            pinned_dp_rank=0 if number >= 12 else None,
            expected_osl=number,
        )
        lease = life.routing.take(life.routing.decide(request))
        leases.append(lease)
        asyncio.run(life.clock.advance(3.0 if number == 30 else 0.02 + 0.001 * (number % 7)))
        lease.on_bytes()
        asyncio.run(life.clock.advance(2000.0 if number == 40 else 0.1))
        if number < 53:
            lease.end("ok", built.Answer(9))
        elif number == 53:
            other = Routed(lease_id="other", worker_id=event.worker_id, dp_rank=0, blocks=b"", uncached_tokens=7)
            life.routing.apply(LedgerApplied(now_s=life.clock.now(), event=other, router="router-2"))
    report = LoadReport(
        instance=event.instance, iteration=1, running_requests=2, waiting_requests=1, used_blocks=9, total_blocks=9
    )
    for second in range(12):
        asyncio.run(life.clock.advance(1.0))
        for lease in leases[53:] if second == 4 else ():
            renewed = Renewed(lease_id=lease.verdict.decision_id)
            life.routing.apply(LedgerApplied(now_s=life.clock.now(), event=renewed))
        life.routing.apply(LoadApplied(now_s=life.clock.now(), worker_id=event.worker_id, dp_rank=0, report=report))
    following.compare_tables()
    leases[53].end("cancelled")
    assert life.routing.tick() == []
    asyncio.run(life.clock.advance(3.0))
    ended = [each.event for each in life.routing.tick() if isinstance(each, LedgerApplied)]
    assert ended == [Expired(lease_id=f"d{number}", cause="engine") for number in range(54, 57)]
    following.compare_tables()
    assert following.decisions == 60


def test_the_reference_wants_a_worker_named_where_the_router_does() -> None:
    life, following = followed(0, Policy(mode="direct"))
    with pytest.raises(WorkerNotNamed) as error:
        life.routing.decide(route())
    with pytest.raises(WorkerNotNamed) as other:
        following.reference.decide(route(), life.index.columns, life.clock.now(), 1)
    assert str(other.value) == str(error.value)


def _worker_of_every_endpoint() -> WorkerRegistered:
    return registered(
        "w9", served_names=MODELS, dp_ranks=(0, 1, 2), api_endpoints=("chat", "completions", "embeddings")
    )
