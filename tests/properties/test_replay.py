"""Replay: from the bytes of a journal alone, every decision in it is taken again, bit for bit.

A run is a random life of a fleet under a real `Routing`: workers join, differ, drain, leave and return, fall silent,
fail, the log is lost and found; requests are routed, pinned, retried, answered, cancelled or forgotten. Of the index
only what a decision recorded is used: its own replay is the index's affair. What was routed, and what is on its way, is
found again by the fold alone.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from indexer.embedded import RankView
from kv_protocol.decision import Candidate, Decision
from kv_protocol.fleet import WorkerDraining, WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    BreakerChanged,
    Decided,
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    WorkerHeard,
    decode_journal,
    encode_journal,
)
from kv_protocol.load import LoadReport
from kv_runtime.clock import ManualClock
from router.core.approximate import ApproximateIndex, ApproximateLimits
from router.core.cost import CostParameters
from router.core.decide import Policy, decide
from router.core.errors import NoEligibleWorker
from router.core.fleet import Fleet
from router.core.ledger import Ledger
from router.core.state import Overlap, RouterState
from router.core.view import RouteRequest
from router.routing import Lease, Routing
from tests.unit.router.samples import BLOCK_SIZE, TEXT, registered

LEASE_S = 8.0
STEPS = 400
WORKERS = [f"w{number}" for number in range(6)]
MODELS = ("m", "n")
STALE = ("", "", "", "behind", "resyncing", "log_away", "never_heard", "never_heard", "refused")
STALE_OF = {
    "no KV events heard; approximate": "never_heard",
    "no room in the index; approximate": "refused",
    "event log away": "log_away",
}
EPOCHS = (0, 1, 1, 1)
APPROXIMATE = ApproximateLimits(ttl_s=20.0, blocks_max=24)
POLICIES = {
    "kv": Policy(),
    "unforeseeing": Policy(predict_on_route=False),
    "weighed": Policy(parameters=CostParameters(overlap_credit_decay=0.7, request_weight=0.3, prefill_scale=1.7)),
    "hot": Policy(temperature=0.4),
    "round-robin": Policy(mode="round-robin"),
}
SEEDS = range(6)


class Journalled(RouterState):
    """A state that keeps what was applied to it."""

    def __init__(self) -> None:
        super().__init__(Fleet(TEXT), Ledger(LEASE_S), ApproximateIndex(APPROXIMATE))
        self.records: list[JournalRecord] = []

    def apply(self, record: JournalRecord) -> None:
        self.records.append(record)
        super().apply(record)


class RandomIndex:
    """Holds whatever it likes, differently at every question."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def overlap(self, hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> list[RankView]:
        """Return a random view of each rank."""
        views = []
        for _ in ranks:
            a, b, c, d = sorted(self._draw.randint(0, len(hashes)) for _ in range(4))
            epoch, seq = self._draw.choice(EPOCHS), self._draw.randrange(1000)
            views.append(RankView((a, b, c, d), epoch, seq, self._draw.choice(STALE)))
        return views

    def catching_up(self) -> str:
        """Return that there is nothing to wait for."""
        return ""


class Life:
    """One random run."""

    def __init__(self, seed: int, policy: Policy) -> None:
        self.draw = random.Random(seed)
        self.clock = ManualClock(now_s=self.draw.random() * 1e5)
        self.state = Journalled()
        self.routing = Routing(
            self.state,
            RandomIndex(self.draw),
            self.clock,
            policy,
            seed=seed,
            lease_s=LEASE_S,
            decisions_max=10,
        )
        self._lives = dict.fromkeys(WORKERS, 0)
        self._leases: list[Lease] = []
        self._requests = 0

    async def run(self) -> list[JournalRecord]:
        """Live, and return the journal."""
        for worker_id in WORKERS[:3]:
            self._join(worker_id)
        happenings = (
            [self._request] * 12 + [self._beat] * 6 + [self._progress] * 8 + [self._load] * 2
            + [self._fail, self._leave_or_drain, self._connection, lambda: self._join(self._anyone())]
        )  # fmt: skip
        for _ in range(STEPS):
            await self.clock.advance(self.draw.choice([0.0, 0.01, 0.3, self.draw.random()]))
            for record in self.state.tick(self.clock.now()):
                self.state.apply(record)
            self.draw.choice(happenings)()
        return self.state.records

    def _anyone(self) -> str:
        return self.draw.choice(WORKERS)

    def _instance(self, worker_id: str) -> str:
        return f"{worker_id}-{self._lives[worker_id]}"

    def _join(self, worker_id: str) -> None:
        self._lives[worker_id] += self.draw.random() < 0.5
        changed: dict[str, Any] = {
            "instance": self._instance(worker_id),
            "served_names": self.draw.choice([MODELS, MODELS[:1]]),
            "dp_ranks": self.draw.choice([(0,), (0, 1)]),
            "block_size": self.draw.choice([BLOCK_SIZE] * 5 + [32]),
            "tokenizer_digest": self.draw.choice([TEXT.tokenizer] * 5 + ["other"]),
            "role": self.draw.choice(["aggregated"] * 5 + ["prefill"]),
            "max_seq_len": self.draw.choice([0, 120, 300]),
            "total_kv_blocks": self.draw.choice([0, 7, 20]),
        }
        self.state.apply(FleetApplied(now_s=self.clock.now(), event=registered(worker_id, **changed)))
        self._heard(worker_id)

    def _leave_or_drain(self) -> None:
        kind, worker_id = self.draw.choice([WorkerLeft, WorkerDraining]), self._anyone()
        instance = self.draw.choice([self._instance(worker_id), f"{worker_id}-0"])
        self.state.apply(FleetApplied(now_s=self.clock.now(), event=kind(worker_id=worker_id, instance=instance)))

    def _heard(self, worker_id: str) -> None:
        instance = self._instance(worker_id)
        self.state.apply(WorkerHeard(now_s=self.clock.now(), worker_id=worker_id, instance=instance))

    def _beat(self) -> None:
        for worker_id in self.draw.sample(WORKERS, 5):
            self._heard(worker_id)

    def _load(self) -> None:
        worker_id = self._anyone()
        report = LoadReport(
            instance=self._instance(worker_id),
            iteration=1,
            running_requests=self.draw.randrange(9),
            waiting_requests=0,
            used_blocks=self.draw.randrange(999),
            total_blocks=999,
        )
        self.state.apply(LoadApplied(now_s=self.clock.now(), worker_id=worker_id, dp_rank=0, report=report))

    def _connection(self) -> None:
        self.state.apply(LogConnection(now_s=self.clock.now(), heard=self.draw.random() < 0.7))

    def _fail(self) -> None:
        self.routing.open_breaker(self._anyone(), "connect: refused", self.draw.choice([0.5, 3.0]))

    def _request(self) -> None:
        model = self.draw.choice(MODELS)
        hashing = self.state.fleet.hashing(model, self.clock.now())
        if hashing is None:
            return
        self._requests += 1
        isl_tokens, family = self.draw.randint(1, 250), self.draw.randrange(3) * 1000
        request = RouteRequest(
            decision_id=f"d{self._requests}",
            request_id=f"r{self._requests}",
            model=model,
            isl_tokens=isl_tokens,
            block_size=hashing.block_size,
            hash_scheme=hashing.scheme,
            sequence_hashes=tuple(2**63 + family + at for at in range(isl_tokens // hashing.block_size)),
            max_tokens=self.draw.choice([0, 30]),
            pinned_worker=self.draw.choice([None] * 6 + [self._anyone()]),
            pinned_dp_rank=self.draw.choice([None] * 6 + [1]),
        )
        for _ in range(self.draw.choice([1, 1, 3])):  # attempts
            try:
                decision = self.routing.decide(request)
            except NoEligibleWorker:
                return
            lease = self.routing.take(request, decision)
            tried = WorkerRank(decision.chosen.worker_id, decision.chosen.dp_rank)
            request = msgspec.structs.replace(
                request, decision_id=request.decision_id + "+", tried=(*request.tried, tried)
            )
            if self.draw.random() < 0.5:
                self._leases.append(lease)
                return
            lease.end("failed")

    def _progress(self) -> None:
        if not self._leases:
            return
        lease = self.draw.choice(self._leases)
        match self.draw.randrange(5):
            case 0 | 1:
                lease.on_bytes()
            case 2:
                lease.end("ok", cached_tokens=5)
            case 3:
                lease.end("cancelled")
            case _:
                self._leases.remove(lease)  # nobody will ever end it


def request_of(record: Decided) -> RouteRequest:
    """Return what was asked, as far as it had a say: pins, limits and failed ranks are in the reasons given."""
    decision = record.decision
    request = RouteRequest(
        decision_id=decision.decision_id,
        request_id=decision.request_id,
        model=decision.model,
        isl_tokens=decision.isl_tokens,
        block_size=decision.block_size,
        sequence_hashes=record.sequence_hashes,
    )
    for excluded in decision.excluded:
        changed: dict[str, Any] = {}
        if found := re.fullmatch(r"max_seq_len: \d+ \+ (\d+) tokens, at most \d+", excluded.reason):
            changed["max_tokens"] = int(found[1])
        elif found := re.fullmatch(r"pinned to dp_rank (\d+)", excluded.reason):
            changed["pinned_dp_rank"] = int(found[1])
        elif found := re.fullmatch(r"pinned to (\S+)", excluded.reason):
            changed["pinned_worker"] = found[1]
        elif excluded.reason == "failed this request":
            changed["tried"] = (*request.tried, WorkerRank(excluded.worker_id, excluded.dp_rank))
        request = msgspec.structs.replace(request, **changed)
    return request


def recorded_overlap(decision: Decision, ranks: Sequence[WorkerRank]) -> list[Overlap]:
    """Return what the index said of each rank; of those without a say, nothing."""
    candidates = {WorkerRank(each.worker_id, each.dp_rank): each for each in decision.candidates}
    return [_overlap(candidates[rank]) if rank in candidates else ((0, 0, 0, 0), 0, 0, "") for rank in ranks]


def _overlap(candidate: Candidate) -> Overlap:
    """Return what the index said: where it was not believed, nothing of the blocks."""
    stale = STALE_OF.get(candidate.trust_reason, candidate.trust_reason)
    held = candidate.overlap_blocks if candidate.overlap_source == "index" else (0, 0, 0, 0)
    return held, candidate.epoch, candidate.seq, stale


def decided_again(
    records: Sequence[JournalRecord], policy: Policy, leave_out: tuple[type[Any], ...] = ()
) -> Iterator[tuple[Decision, Decision | None]]:
    """Yield every recorded decision, and the one that the fold of all before it leads to."""
    state = RouterState(Fleet(TEXT), Ledger(LEASE_S), ApproximateIndex(APPROXIMATE))
    for record in records:
        if isinstance(record, Decided):
            told = record.decision

            def overlap(_: Sequence[int], ranks: Sequence[WorkerRank], told: Decision = told) -> list[Overlap]:
                return recorded_overlap(told, ranks)

            request = request_of(record)
            view = state.view(request, overlap, told.now_s, predict_on_route=policy.predict_on_route)
            try:
                yield told, decide(view, request, policy, told.seed)
            except NoEligibleWorker:
                yield told, None
        if not isinstance(record, leave_out):
            state.apply(record)


def encoded(decision: Decision | None) -> bytes:
    return msgspec.msgpack.encode(decision)


async def journal(seed: int, policy: Policy) -> tuple[Life, list[JournalRecord]]:
    """Return a life and what the bytes of its journal say."""
    life = Life(seed, policy)
    written = await life.run()
    messages = [encode_journal(written[at : at + 16]) for at in range(0, len(written), 16)]
    return life, [record for message in messages for record in decode_journal(message)]


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
async def test_every_decision_is_taken_again_bit_for_bit(seed: int, policy: Policy) -> None:
    _, records = await journal(seed, policy)
    decisions = list(decided_again(records, policy))
    assert len(decisions) > 50, f"seed {seed}: too little happened"
    assert sum(len(told.candidates) > 1 for told, _ in decisions) > 20
    for told, again in decisions:
        assert again == told, f"seed {seed}"
        assert encoded(again) == encoded(told), f"seed {seed}"


@pytest.mark.asyncio
async def test_among_them_are_such_as_went_by_what_was_routed_and_by_what_was_on_its_way() -> None:
    candidates = [each for seed in SEEDS for each in candidates_of((await journal(seed, POLICIES["kv"]))[1])]
    routed = [each for each in candidates if each.overlap_source == "approximate" and each.overlap_blocks[0]]
    known = [each for each in candidates if each.overlap_source == "index"]
    on_their_way = [each for each in known if each.expected_blocks > each.overlap_blocks[0]]
    assert min(len(routed), len(on_their_way)) > 50
    unforeseen = candidates_of((await journal(1, POLICIES["unforeseeing"]))[1])
    assert {each.predicted_blocks for each in unforeseen} == {0}


def candidates_of(records: Sequence[JournalRecord]) -> list[Candidate]:
    return [each for record in records if isinstance(record, Decided) for each in record.decision.candidates]


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", SEEDS)
async def test_the_folded_journal_is_the_state_that_wrote_it(seed: int) -> None:
    life, records = await journal(seed, POLICIES["kv"])
    folded = RouterState(Fleet(TEXT), Ledger(LEASE_S), ApproximateIndex(APPROXIMATE))
    for record in records:
        folded.apply(record)
    live = life.state
    assert list(folded.fleet.workers()) == list(live.fleet.workers())
    assert folded.fleet.refused_total == live.fleet.refused_total
    assert folded.ledger.loads() == live.ledger.loads()
    assert folded.ledger.expired_total == live.ledger.expired_total
    assert live.ledger.expired_total > 0, f"seed {seed}: too little happened"
    for after_s in (0.0, 3.0, 100.0):
        now_s = life.clock.now() + after_s
        assert folded.tick(now_s) == live.tick(now_s)
        assert folded.approximate.statistics() == live.approximate.statistics()
        for model in MODELS:
            for stale in ("", "never_heard"):
                assert shown(folded, model, now_s, stale) == shown(live, model, now_s, stale)
    assert live.approximate.statistics().evicted_blocks_total > 0
    assert live.approximate.statistics().left_blocks_total > 0


def shown(state: RouterState, model: str, now_s: float, stale: str) -> Any:
    request = RouteRequest(
        decision_id="d",
        request_id="r",
        model=model,
        isl_tokens=200,
        block_size=BLOCK_SIZE,
        sequence_hashes=tuple(2**63 + at for at in range(12)),
    )
    held: Overlap = ((1, 1, 1, 1), 1, 1, stale)
    return state.view(request, lambda _, ranks: [held] * len(ranks), now_s, predict_on_route=True)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        (LedgerApplied, "kv"),
        (FleetApplied, "kv"),
        (WorkerHeard, "kv"),
        (BreakerChanged, "kv"),
        (LogConnection, "kv"),
        (Decided, "round-robin"),
    ],
)
async def test_a_journal_that_leaves_out_a_kind_of_record_does_not_replay(kind: type[Any], policy: str) -> None:
    journals = [(await journal(seed, POLICIES[policy]))[1] for seed in SEEDS]
    assert any(again != told for one in journals for told, again in decided_again(one, POLICIES[policy], (kind,)))


@pytest.mark.asyncio
async def test_a_journal_in_another_order_does_not_replay() -> None:
    _, records = await journal(2, POLICIES["kv"])
    swapped = [*records]
    for at in range(0, len(swapped) - 1, 2):
        swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
    assert any(again != told for told, again in decided_again(swapped, POLICIES["kv"]))


@pytest.mark.asyncio
async def test_another_policy_decides_otherwise() -> None:
    _, records = await journal(3, POLICIES["kv"])
    assert any(again != told for told, again in decided_again(records, POLICIES["weighed"]))
