"""Reports each change in the fleet once: by a line of the log, a mark of `/v1/history`, a record of the journal.

| event of the log | level | mark | when |
|---|---|---|---|
| `worker_silent` | warning | `worker_silent` | no heartbeat for `SILENT_S` |
| `worker_heard_again` | info | `worker_heard` | a silent worker sent a heartbeat |
| `breaker_opened`, `breaker_half_open` | warning, info | | the breaker of a rank or worker opened, half-opened |
| `breaker_closed` | info | | that breaker closed |
| `predictions_doubted`, `predictions_trusted` | warning, info | | `Calibration` began or ended a doubt of a rank |
| `rank_trust_changed` | warning; info to EXACT | `trust` | trust in a rank changed |
| | | `worker_joined`, `worker_left`, `worker_draining` | a fleet event came, which `feeds.py` logs |
| | | `policy`, `resync`, `log_lost`, `log_found` | another policy, a dump taken by the index, event log away or back |
| | | `router_started`, `others` | the first look; a look with more marks than are kept |

`FleetWatch` compares two looks, a second apart: a change that is undone in between is not seen. Silence is not reported
while the event log is away: no heartbeat comes then. New trust is reported once two looks in a row found it: a
heartbeat that overtakes its batches lowers trust for one look.

In the log a rank has one line per state and reason in 10 s; beyond 256 lines in that time the others share one, with
their number (`suppressed`). A look has `MARKS_OF_A_LOOK` marks at most, and one that counts the others. The
journal has all changes of trust. Each process of a router watches and logs for itself.

`EventOrigins` finds event addresses that were swapped: the blocks of a worker's requests appear at another worker.

    the new blocks of a request appear    what follows
    ----------------------------------    -----------------------------------------------------------
    at the rank that got it               its events are its own: its stream is not watched any longer
    at exactly one other rank             a vote for that rank; after `VOTES` votes both ranks are named
    nowhere, for `_GIVEN_UP_S`            nothing: the prompt was not computed, or its engine is slow

A request shows nothing if its rank is not EXACT, or if a rank holds all blocks of its prompt.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import structlog

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import TrustMoved
from kv_runtime.telemetry import RateLimitedLog
from router.decision.policy_store import fields_of
from router.decision.routing import OverlapIndex, Routing
from router.fleet.breakers import BreakerState
from router.fleet.registry import SILENT_S
from router.fleet.trust import COMPARE_DOUBTS, EXACT, CompareDoubt, Disparity, Move, Trust
from router.prompt.chains import BLOCK_BYTES

VOTES = 4
_WATCHED_MAX = 64
_LOOKED_AT_MAX = 256
"""How many decisions since the last look are read: the newest."""
_AFTER_S, _GIVEN_UP_S = 2.0, 30.0
"""Seconds between a decision and the first look for its blocks, and the last look."""
_log = structlog.get_logger("router")
MARKS_MAX = 1000
MARKS_OF_A_LOOK = 50


class _Sent(NamedTuple):
    """A request; no rank held more than the first `held` blocks of its prompt."""

    at_s: float
    rank: WorkerRank
    epoch: int
    hashes: bytes
    held: int


class EventOrigins:
    """Finds workers that publish another worker's events, by the newest decisions of a router."""

    def __init__(self, routing: Routing, index: OverlapIndex) -> None:
        self._routing, self._index = routing, index
        self._seen = routing.decisions.added_total
        self._ranks = routing.state.fleet.ranks
        self._sent: list[_Sent] = []
        self._own: dict[WorkerRank, int] = {}
        """Ranks whose events are known to be their own, with the epoch of the stream."""
        self._votes: dict[WorkerRank, Counter[WorkerRank]] = {}

    def differs(self, worker_id: str) -> tuple[Disparity, ...]:
        """Return the field `kv_events` if the worker publishes events of another one; empty: that was not seen."""
        for rank, votes in self._votes.items():
            ((other, count),) = votes.most_common(1)
            if rank.worker_id == worker_id and count >= VOTES:
                return (Disparity("kv_events", f"those of {other}", f"those of {rank}"),)
        return ()

    def look(self) -> None:
        """Find the ranks at which the blocks of the watched requests appeared, and forget requests that are judged."""
        ranks, is_new = self._routing.state.fleet.ranks, self._routing.decisions.added_total > self._seen
        if not (self._sent or is_new) and ranks is self._ranks:
            return
        now_s, self._ranks = self._routing.clock.now(), ranks
        self._own = {rank: epoch for rank, epoch in self._own.items() if rank in ranks}
        self._votes = {rank: votes for rank, votes in self._votes.items() if rank in ranks}
        new = reversed(list(islice(self._new(), _WATCHED_MAX)))
        watched = [
            sent
            for sent in [*self._sent, *new][-_WATCHED_MAX:]
            if sent.rank in ranks and now_s - sent.at_s < _GIVEN_UP_S
        ]
        self._sent = [sent for sent in watched if now_s - sent.at_s < _AFTER_S or not self._is_judged(sent, ranks)]

    def _new(self) -> Iterator[_Sent]:
        """Yield the decisions since the last look that bring new blocks to a watched rank, newest first."""
        decisions, own = self._routing.decisions, self._own
        new, self._seen = decisions.since(self._seen, _LOOKED_AT_MAX), decisions.added_total
        for lease in new:
            verdict = lease.verdict
            if verdict.is_blank or own.get(verdict.winner) == verdict.epoch or verdict.trust != "EXACT":
                continue
            hashes, held = verdict.request.sequence_hashes, int(verdict.overlap[-1].max())
            if verdict.request.phase != "decode" and len(hashes) > held * BLOCK_BYTES:
                yield _Sent(verdict.now_s, verdict.winner, verdict.epoch, hashes, held)

    def _is_judged(self, sent: _Sent, ranks: tuple[WorkerRank, ...]) -> bool:
        depths = self._index.columns(sent.hashes, ranks).depths[-1].tolist()
        found = [rank for rank, depth in zip(ranks, depths, strict=True) if depth > sent.held]
        if sent.rank in found:
            self._own[sent.rank] = sent.epoch
            if self._votes.pop(sent.rank, Counter()).total() >= VOTES:
                _log.info("engine_events_are_its_own", worker=sent.rank.worker_id, dp_rank=sent.rank.dp_rank)
        elif len(found) == 1:
            votes = self._votes.setdefault(sent.rank, Counter())
            votes[found[0]] += 1
            if votes[found[0]] == VOTES:
                _log.error("engine_events_of_another", worker=sent.rank.worker_id, found=str(found[0]))
        return bool(found)


class Mark(msgspec.Struct, frozen=True):
    """One event, at a Unix time; of a worker or a rank, if these are named."""

    at_s: float
    kind: str
    text: str
    worker_id: str = ""
    dp_rank: int | None = None


class FleetWatch:
    """Looks at the fleet, and reports what has changed since the last look."""

    def __init__(self, routing: Routing, dumps: Callable[[], dict[WorkerRank, int]]) -> None:
        """`dumps` returns how many complete dumps the index has taken of each rank."""
        self._routing, self._count_dumps, self._clock = routing, dumps, routing.clock
        self.marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        """The newest marks, the eldest first."""
        self._found = list[Mark]()
        """The marks of the present look."""
        self._workers = dict[str, tuple[str, bool, bool]]()
        """By worker: its instance, and whether it drains and is silent."""
        self._policy, self._is_log_connected = routing.policy, True
        self._dumps: dict[WorkerRank, int] = {}
        self._breakers = dict[WorkerRank, BreakerState]()
        self._evidence = dict[WorkerRank, Move]()
        self._lines = RateLimitedLog(_log, self._clock)
        self._seen = dict[WorkerRank, Trust]()
        self._logged = dict[WorkerRank, Trust]()

    def look(self) -> None:
        """Report what has changed since the last look. The first look marks only that the router started."""
        now_s = self._clock.now()
        self._look_at_router()
        self._look_at_workers(now_s)
        self._look_at_breakers(now_s)
        self._look_at_trust()
        if not self.marks:
            self._found.clear()
            self._mark("router_started", "the router began to watch")
        elif (others := len(self._found) - MARKS_OF_A_LOOK) > 0:
            del self._found[MARKS_OF_A_LOOK:]
            self._mark("others", f"{others} other changes")
        self.marks += self._found
        self._found.clear()

    def _mark(self, kind: str, text: str, worker_id: str = "", dp_rank: int | None = None) -> None:
        self._found.append(Mark(round(self._clock.wall_ns() / 1e9, 3), kind, text, worker_id, dp_rank))

    def _look_at_router(self) -> None:
        is_connected, policy = self._routing.state.fleet.is_log_connected, self._routing.policy
        if self._is_log_connected and not is_connected:
            self._mark("log_lost", "the event log is away")
        elif is_connected and not self._is_log_connected:
            self._mark("log_found", "the event log is connected again")
        if policy != self._policy:
            was = fields_of(self._policy)
            news = [
                f"{name} {was.get(name)} -> {now}" for name, now in fields_of(policy).items() if now != was.get(name)
            ]
            self._mark("policy", ", ".join(news))
        self._is_log_connected, self._policy = is_connected, policy
        before, self._dumps = self._dumps, self._count_dumps()
        for rank, dumps in self._dumps.items():
            if dumps > before.get(rank, dumps):
                self._mark("resync", f"{rank}: the index took a complete dump", *rank)

    def _look_at_workers(self, now_s: float) -> None:
        fleet = self._routing.state.fleet
        before, self._workers = self._workers, {}
        for worker in fleet.workers():
            worker_id, instance = worker.registration.worker_id, worker.registration.instance
            heard_at_s, is_draining = worker.heard_at_s, worker.draining
            known, was_draining, was_silent = before.pop(worker_id, ("", False, False))
            if known != instance:
                again = " again, as another instance" if known else ""
                self._mark("worker_joined", f"{worker_id} joined{again}", worker_id)
                was_draining = is_draining
            is_silent = was_silent
            if fleet.is_log_connected:
                is_silent = heard_at_s is not None and now_s >= heard_at_s + SILENT_S
            self._workers[worker_id] = instance, is_draining, is_silent
            if is_draining and not was_draining:
                self._mark("worker_draining", f"{worker_id} drains", worker_id)
            if is_silent and not was_silent:
                _log.warning("worker_silent", worker=worker_id, silent_s=round(now_s - (heard_at_s or 0.0), 1))
                self._mark("worker_silent", f"{worker_id} is silent", worker_id)
            elif was_silent and not is_silent:
                _log.info("worker_heard_again", worker=worker_id)
                self._mark("worker_heard", f"{worker_id} is heard again", worker_id)
        for worker_id in before:
            self._mark("worker_left", f"{worker_id} left", worker_id)

    def _look_at_breakers(self, now_s: float) -> None:
        breakers, before = self._routing.state.breakers, self._breakers
        if not (breakers.by_key or before):
            return
        states = {rank: breakers.state(rank, now_s) for rank in self._routing.state.fleet.ranks}
        self._breakers = {rank: state for rank, state in states.items() if state != "closed"}
        for rank, state in states.items():
            if state != before.get(rank, "closed"):
                fields = {"worker": rank.worker_id, "dp_rank": rank.dp_rank}
                if state == "open":
                    _log.warning("breaker_opened", **fields, reason=breakers.reason(rank, now_s))
                elif state == "half_open":
                    _log.info("breaker_half_open", **fields, reason=breakers.reason(rank, now_s))
                else:
                    _log.info("breaker_closed", **fields)

    def _look_at_trust(self) -> None:
        """Report what requests showed, and each new trust that the look before found as well."""
        moves = self._routing.calibration.moves
        while moves:
            move = moves.popleft()
            self._evidence[move.rank] = move
            shown = {"worker": move.rank.worker_id, "dp_rank": move.rank.dp_rank, **move.evidence()}
            if move.is_over:
                self._lines.info("predictions_trusted", key=(move.rank, move.doubt), **shown)
            else:
                self._lines.warning("predictions_doubted", key=(move.rank, move.doubt), **shown)
        before, self._seen = self._seen, self._routing.trust()
        self._logged = {rank: trust for rank, trust in self._logged.items() if rank in self._seen}
        self._evidence = {rank: move for rank, move in self._evidence.items() if rank in self._seen}
        for rank, trust in self._seen.items():
            if trust == EXACT:
                self._logged.setdefault(rank, EXACT)
            was = self._logged.get(rank, EXACT)
            if trust == was or trust != before.get(rank):
                continue
            if rank in self._logged:  # a rank's first state is no mark: at a start all ranks have one
                reason = f": {trust.reason}" if trust.reason else ""
                self._mark("trust", f"{rank} {was.state} -> {trust.state}{reason}", *rank)
            self._logged[rank] = trust
            told: dict[str, Any] = {"dp_rank": rank.dp_rank, "trust": trust.state, "reason": trust.reason}
            told["was"] = was.state
            evidence = self._evidence_of(rank, trust, was)
            record = TrustMoved(
                now_s=self._clock.now(), worker_id=rank.worker_id, was_reason=was.reason, **told, **evidence
            )
            self._routing.apply(record)
            say = self._lines.info if trust == EXACT else self._lines.warning
            say("rank_trust_changed", key=(rank, trust), worker=rank.worker_id, **told)

    def _evidence_of(self, rank: WorkerRank, trust: Trust, was: Trust) -> dict[str, Any]:
        """Return what requests showed of the rank, if that changed the trust in it; else nothing."""
        move = self._evidence.get(rank)
        if move is None or move.doubt != (_doubt_of(trust) or _doubt_of(was)):
            return {}
        return {name: value for name, value in move.evidence().items() if name != "doubt"}


def _doubt_of(trust: Trust) -> CompareDoubt | None:
    """Return the doubt of requests that is the reason of this trust; None: there is another reason, or none."""
    return next((doubt for doubt in COMPARE_DOUBTS if trust.reason.partition(";")[0] == doubt), None)
