"""A random life of a fleet under a real `Routing`, and all that it recorded.

Workers join, differ, drain, leave and return, fall silent, fail, the log is lost and found; the policy changes;
requests are routed, pinned, refused, retried, answered, cancelled or forgotten; another router tells of its own. What
was recorded is encoded when all is over: nothing that a record holds may change behind it.
"""

import random
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import numpy as np

from indexer.embedded import OverlapColumns
from kv_protocol.codec import pack_u64
from kv_protocol.decided import RequestPhase, RouteRequest
from kv_protocol.fleet import WorkerDraining, WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    AttemptEnded,
    CheckpointBegan,
    FleetApplied,
    JournalBegan,
    JournalRecord,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    OutcomeKnown,
    WorkerHeard,
    decode_journal,
)
from kv_protocol.ledger import Finished, FirstToken, LedgerEvent, Routed
from kv_protocol.load import LoadReport
from router.decision.eligibility import NoEligibleWorker
from router.decision.policy import CostParameters, PhaseOverrides, Policy
from router.decision.state import AffinityLimits, ApproximateLimits, RouterState, StateSettings
from router.fleet.breakers import BreakerLimits
from router.journal.encoder import JournalCheckpoint, JournalEncoder
from router.native import built
from tests.reference.following import Answered
from tests.support.manual_clock import ManualClock
from tests.support.replayed import continuous
from tests.support.watched_routing import Told, WatchedRouting, Watcher
from tests.unit.router.samples import BLOCK_SIZE, TEXT, registered

STEPS = 400
WORKERS = [f"w{number}" for number in range(8)]
MODELS = ("m", "n")
DOUBTS = ("", "", "", "behind", "resyncing", "log_away", "never_heard", "never_heard", "refused")
EPOCHS = (0, 1, 1, 1, 2)
SETTINGS = StateSettings(
    text=TEXT,
    lease_s=8.0,
    approximate=ApproximateLimits(ttl_s=20.0, blocks_max=24),
    affinity=AffinityLimits(idle_s=4.0, sessions_max=5),
    breakers=BreakerLimits(failures=2, open_s=2.0),
)
WEIGHED = CostParameters(overlap_credit=0.7, host_weight=0.5, disk_weight=0.1, ttft_weight=1.7, lateness_s=0.3)
POLICIES = {
    "kv": Policy(),
    "unpredicting": Policy(predict_on_route=False),
    "weighed": Policy(parameters=WEIGHED),
    "hot": Policy(temperature=0.4),
    "soft": Policy(parameters=WEIGHED, affinity="soft"),
    "hard": Policy(affinity="hard", newcomers=False),
    "predicted-ttft": Policy(mode="predicted-ttft", itl_target_s=0.006, ttft_target_s=0.05, unmet="queue"),
    "round-robin": Policy(mode="round-robin"),
    "random": Policy(mode="random"),
    "power-of-two": Policy(mode="power-of-two"),
    "least-loaded": Policy(mode="least-loaded", affinity="soft"),
    "phased": Policy(
        prefill=PhaseOverrides(mode="round-robin"), decode=PhaseOverrides(mode="predicted-ttft", host_weight=0.5)
    ),
}
LIFE = 77
_IMPOSSIBLE_EVERY = 20
ANSWERS = (
    (built.Answer(7, 5), True),
    (built.Answer(7, 5, later_tokens=6), False),
    (built.Answer(7, 5, later_tokens=6, decode_s=1e-3), False),
)
"""With whether they are streams."""
PHASES: tuple[RequestPhase, ...] = ("whole", "whole", "whole", "whole", "whole", "whole", "prefill", "decode", "alone")


class RandomIndex:
    """Holds whatever it likes, differently at every question; where streams stand changes less often."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._standing: dict[WorkerRank, tuple[int, str]] = {}
        self.answered: Answered | None = None
        """Its last answer, which nobody else changes."""

    def columns(self, chain: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return what it likes of each rank."""
        blocks, draw = len(chain) // 8, self._draw
        depths = [sorted(draw.choice([0, draw.randint(0, blocks)]) for _ in range(4)) for _ in ranks]
        for rank in ranks:
            if rank not in self._standing or draw.random() < 0.1:
                self._standing[rank] = draw.choice(EPOCHS), draw.choice(DOUBTS)
        answer = OverlapColumns(
            np.array(depths, dtype=np.int32).reshape(len(ranks), 4).T.copy(),
            tuple(self._standing[rank][0] for rank in ranks),
            tuple(draw.randrange(1000) for _ in ranks),
            tuple(self._standing[rank][1] for rank in ranks),
        )
        self.answered = Answered(chain, ranks, answer._replace(depths=answer.depths.copy()))
        return answer

    def catching_up(self) -> str:
        """Return that there is nothing to wait for."""
        return ""


class Shelf:
    """A recorder that keeps a journal, in messages of what it was told at a time, 64 times at most."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.encoder = JournalEncoder(LIFE, lambda: 1)
        self.told = list[Told | JournalCheckpoint]()
        self._messages = list[bytes]()
        self._left = 0

    def record(self, what: JournalRecord | JournalCheckpoint) -> None:
        """Keep it."""
        if not self._left:
            self._cut()
            self._left = self._draw.randint(1, 64)
        self._left -= 1
        self.told.append(what)
        self.encoder.record(what)

    def _cut(self) -> None:
        while len(self.encoder) or self.encoder.is_in_checkpoint:
            self._messages.append(self.encoder.cut().data)

    def messages(self) -> list[bytes]:
        """Return the messages of its journal."""
        self._cut()
        return self._messages

    def records(self) -> list[JournalRecord]:
        """Return what the bytes of its journal say."""
        return list(continuous(map(decode_journal, self.messages())))


class Life:
    """One random run."""

    settings: ClassVar[StateSettings] = SETTINGS

    def __init__(
        self, seed: int, policy: Policy, also: Callable[[ManualClock, RouterState], Watcher] | None = None
    ) -> None:
        """`also` makes another recorder of all that is applied to the state."""
        self.draw = random.Random(seed)
        self.clock = ManualClock(now_s=self.draw.random() * 1e5, wall_ns=1)
        self.state = RouterState(self.settings)
        self.index = RandomIndex(self.draw)
        self.shelf = Shelf(random.Random(seed))
        others = [] if also is None else [also(self.clock, self.state)]
        self.shelf.record(
            JournalBegan(
                now_s=self.clock.now(), router="router-1", started_ns=1, settings=msgspec.to_builtins(self.settings)
            )
        )
        self.routing = WatchedRouting(
            self.state,
            self.index,
            self.clock,
            policy,
            seed=seed,
            lease_s=self.settings.lease_s,
            decisions_max=10_000,
            journal=self.shelf.encoder.journal,
            recorders=[self.shelf.record, *(each.record for each in others)],
            watch=[self.shelf.told.append, *(each.record for each in others)],
        )
        self._policy = policy
        self._lives = dict.fromkeys(WORKERS, 0)
        self._leases = list[Any]()
        self._newest_id = ""
        self._requests = self._foreign = 0

    async def run(self, checkpoint_every: int = 0) -> list[JournalRecord]:
        """Live, and return the journal, with a checkpoint before every so manyth step; 0: with none."""
        self.begin()
        await self.go_on(STEPS, checkpoint_every)
        return self.shelf.records()

    def begin(self) -> None:
        """Most workers join."""
        for worker_id in WORKERS[:6]:
            self._join(worker_id)

    async def go_on(self, steps: int, checkpoint_every: int = 0) -> None:
        """Live for so many steps more."""
        happenings: list[Callable[[], None]] = [
            *[self._request] * 12,
            *[self._beat] * 6,
            *[self._progress] * 8,
            *[self._load] * 2,
            *[self._foreign_event] * 2,
            self._attempt,
            self._leave_or_drain,
            self._connection,
            self._change_policy,
            lambda: self._join(self._any_worker()),
        ]
        for step in range(steps):
            if checkpoint_every and step % checkpoint_every == 0:
                self._take_checkpoint()
            await self._wait()
            self.draw.choice(happenings)()
            if step % _IMPOSSIBLE_EVERY == 0:
                self._end_impossibly()

    async def _wait(self) -> None:
        await self.clock.advance(self.draw.choice([0.0, 0.01, 0.3, self.draw.random()]))
        self.routing.tick()

    def _take_checkpoint(self) -> None:
        began = CheckpointBegan(now_s=self.clock.now(), router="router-1", settings=msgspec.to_builtins(self.settings))
        self.shelf.record(JournalCheckpoint(self.state, began))

    def _end_impossibly(self) -> None:
        """Tell that the newest request was answered in no time, of which nothing can be learnt."""
        known = OutcomeKnown(
            now_s=self.clock.now(), decision_id=self._newest_id, outcome="ok", ttft_s=0.0, itl_s=0.0, came_whole=False
        )
        self.routing.apply(known)

    def _any_worker(self) -> str:
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
            "role": self.draw.choice(["aggregated"] * 5 + ["prefill", "decode"]),
            "transfer_domain": self.draw.choice(["", "rack"]),
            "kv_cache_dtype": self.draw.choice(["fp8", "fp8", "bfloat16", ""]),
            "transfer_buffer_tokens": self.draw.choice([0] * 7 + [100]),
            "max_seq_len": self.draw.choice([0, 120, 300]),
            "total_kv_blocks": self.draw.choice([0, 7, 20, 400]),
            "loras": self.draw.choice([(), ("l",)]),
            "taints": self.draw.choice([(), ("big",), ("big", "slow")]),
        }
        self.routing.apply(FleetApplied(now_s=self.clock.now(), event=registered(worker_id, **changed)))
        self._heard(worker_id)

    def _leave_or_drain(self) -> None:
        kind, worker_id = self.draw.choice([WorkerLeft, WorkerDraining]), self._any_worker()
        instance = self.draw.choice([self._instance(worker_id), f"{worker_id}-0"])
        self.routing.apply(FleetApplied(now_s=self.clock.now(), event=kind(worker_id=worker_id, instance=instance)))

    def _heard(self, worker_id: str) -> None:
        instance = self._instance(worker_id)
        self.routing.apply(WorkerHeard(now_s=self.clock.now(), worker_id=worker_id, instance=instance))

    def _beat(self) -> None:
        for worker_id in self.draw.sample(WORKERS, 7):
            self._heard(worker_id)

    def _load(self) -> None:
        worker_id = self._any_worker()
        for _ in range(self.draw.choice([1, 6])):
            report = LoadReport(
                instance=self._instance(worker_id),
                iteration=1,
                running_requests=self.draw.randrange(9),
                waiting_requests=0,
                used_blocks=self.draw.randrange(999),
                total_blocks=999,
            )
            self.routing.apply(LoadApplied(now_s=self.clock.now(), worker_id=worker_id, dp_rank=0, report=report))

    def _connection(self) -> None:
        self.routing.apply(LogConnection(now_s=self.clock.now(), heard=self.draw.random() < 0.7))

    def _change_policy(self) -> None:
        if self.draw.random() < 0.4:
            self.routing.set_policy(self.draw.choice([self._policy, *POLICIES.values()]))

    def _foreign_event(self) -> None:
        """Tell what another router does."""
        self._foreign += 1
        number = self.draw.randint(max(1, self._foreign - 5), self._foreign)
        events: list[LedgerEvent] = [
            Routed(
                lease_id=f"other-{number}",
                worker_id=self._any_worker(),
                dp_rank=0,
                blocks=self._chain(),
                uncached_tokens=self.draw.randrange(200),
                session_id=self._session(),
            ),
            FirstToken(lease_id=f"other-{number}"),
            Finished(lease_id=f"other-{number}"),
        ]
        event = self.draw.choice([events[0], *events])
        self.routing.apply(LedgerApplied(now_s=self.clock.now(), event=event, router="router-2"))

    def _chain(self, blocks: int | None = None) -> bytes:
        family, blocks = self.draw.randrange(3) * 1000, self.draw.randrange(12) if blocks is None else blocks
        return pack_u64([2**63 + family + at for at in range(blocks)])

    def _session(self) -> str:
        return self.draw.choice(["", *(f"s{number}" for number in range(8))])

    def _request(self) -> None:
        model = self.draw.choice(MODELS)
        hashing = self.state.fleet.hashing(model, self.clock.now())
        if hashing is None:
            return
        self._requests += 1
        isl_tokens = self.draw.randint(1, 250)
        self._attempts(
            RouteRequest(
                decision_id=f"d{self._requests}",
                request_id=f"r{self._requests}",
                model=model,
                isl_tokens=isl_tokens,
                block_size=hashing.block_size,
                hash_scheme=hashing.scheme,
                sequence_hashes=self._chain(isl_tokens // hashing.block_size),
                max_tokens=self.draw.choice([0, 30]),
                session_id=self._session(),
                lora=self.draw.choice([""] * 8 + ["l"]),
                required_taints=self.draw.choice([(), (), (), ("big",)]),
                preferred_taints=self.draw.choice([(), (("slow", -0.3), ("big", 1.5))]),
                itl_target_s=self.draw.choice([None, 0.02]),
                pinned_worker=self.draw.choice([None] * 6 + [self._any_worker()]),
                pinned_dp_rank=self.draw.choice([None] * 6 + [1]),
                phase=self.draw.choice(PHASES),
                transfer_domain=self.draw.choice([None, None, "rack"]),
                prefill_worker=self.draw.choice([None, None, "", self._any_worker()]),
            )
        )

    def _attempts(self, request: RouteRequest) -> None:
        for _ in range(self.draw.choice([1, 1, 3])):
            try:
                verdict = self.routing.decide(request)
            except NoEligibleWorker as error:
                self.routing.refuse(request, error.exclusions)
                return
            if self.draw.random() < 0.1:
                return  # it was only asked what would be decided
            lease = self.routing.take(verdict)
            tried = (*request.tried, verdict.winner)
            request = msgspec.structs.replace(request, decision_id=request.decision_id + "+", tried=tried)
            if self.draw.random() < 0.5:
                self._leases.append(lease)
                self._newest_id = verdict.decision_id
                return
            self._attempt(verdict.winner, verdict.decision_id)
            lease.end("failed")

    def _attempt(self, rank: WorkerRank | None = None, decision_id: str = "") -> None:
        """Tell how an attempt at a rank ended."""
        rank = rank or WorkerRank(self._any_worker(), 0)
        self.routing.apply(
            AttemptEnded(
                now_s=self.clock.now(),
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                outcome=self.draw.choice(["ok", "client_fault", "back_pressure", "erred", "failed", "cancelled"]),
                phase=self.draw.choice(["", "connect", "first_byte", "body"]),
                reason="said so",
                retry_after_s=self.draw.choice([None, 1.5]),
                decision_id=decision_id,
                erred_before=self.draw.choice([(), (WorkerRank(self._any_worker(), 0),)]),
            )
        )

    def _progress(self) -> None:
        if not self._leases:
            return
        lease = self.draw.choice(self._leases)
        match self.draw.randrange(5):
            case 0 | 1:
                lease.on_bytes()
            case 2:
                lease.end("ok", *self.draw.choice(ANSWERS))
            case 3:
                lease.end("cancelled")
            case _:
                self._leases.remove(lease)  # its router never ends it


async def journal(seed: int, policy: Policy, checkpoint_every: int = 0) -> tuple[Life, list[JournalRecord]]:
    """Return a life and what the bytes of its journal say."""
    life = Life(seed, policy)
    return life, await life.run(checkpoint_every)
