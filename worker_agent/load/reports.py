"""Publishes load reports: polls the engine's statistics, and sends the newest report of each rank.

    the engine                                            announced
    ---------------------------------------------------   ----------------------------------------------------------
    reports new statistics of a rank                      the newest, at most every `REPORT_PERIOD_S`
    is idle: it has none of our requests and reports      every `REST_PERIOD_S`: zero requests, the last block counts,
      nothing for `REST_PERIOD_S`                           so that a router corrects requests that it still counts
    has requests of ours, and reports nothing             nothing: an iteration may take long
    cannot be polled                                      nothing: the load is unknown

Reports are snapshots: if iterations are faster than announcements, only the newest of a rank counts. A router discards
a report after 5 s without a new one (`router/native/ledger.hpp`); so an idle engine is reported more often.

TensorRT-LLM's iteration statistics become load reports; incomplete rows are skipped.

    field of a row                                    absent, null            another type, not a count
    -----------------------------------------------   ---------------------   -------------------------
    the row itself                                    skipped: not_a_map      skipped: not_a_map
    `attentionDpRank`                                 rank 0                  skipped: rank
    a rank that the engine does not have                                      skipped: rank
    `iter`, `numActiveRequests`, `numQueuedRequests`  skipped: requests       skipped: requests
    `kvCacheStats`, its used and largest number       skipped: cache          skipped: cache
    `inflightBatchingStats`                           no phases reported      skipped: batching
    one of its figures, or `iterLatencyMS`            the figure is omitted   the figure is omitted

`iter` counts iterations. `numActiveRequests` is counted at an iteration's beginning: the last row before an engine
becomes idle still counts the requests that ended in it. The engine then reports nothing more; the agent knows from its
own requests that the engine is idle (`at_rest`).

With attention DP there is one row a rank. Only rank 0's row has the queue, and all rows have a copy of one rank's block
counts and of rank 0's `specDecodingStats`: TensorRT-LLM does not report them for each rank.

Source: `docs/SOURCES.md` E1.7; NVIDIA/TensorRT-LLM `tensorrt_llm/_torch/pyexecutor/py_executor.py`
(`_get_init_iter_stats`, which counts the active requests before the iteration; `_update_iter_stats`, after it);
`tensorrt_llm/executor/iteration_stats.py` @ b1179014 (`specDecodingStats`; every rank's row is a copy of it).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import structlog

from kv_protocol import subjects
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from kv_protocol.load import COUNT_MAX, LoadReport, PhaseLoad, encode_load
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.supervise import SupervisedWork
from worker_agent.port.types import POLL_S, Engine, EngineError

REPORT_PERIOD_S = 0.1
REST_PERIOD_S = 2.0

PROBLEMS = ("not_a_map", "rank", "requests", "cache", "batching")
_PHASES = {
    "context_requests": "numContextRequests",
    "context_tokens": "numCtxTokens",
    "context_kv_tokens": "numCtxKvTokens",
    "generation_requests": "numGenRequests",
    "generation_kv_tokens": "numGenKvTokens",
    "queued_context_requests": "numQueuedContextRequests",
    "queued_context_tokens": "numQueuedCtxTokens",
    "queued_generation_requests": "numQueuedGenRequests",
    "queued_generation_kv_tokens": "numQueuedGenKvTokens",
    "paused_requests": "numPausedRequests",
    "paused_kv_tokens": "numPausedKvTokens",
}

_DRAFTS = {
    "drafted_tokens": "numDraftTokens",
    "accepted_tokens": "numAcceptedTokens",
    "drafting_requests": "numRequestsWithDraftTokens",
}
"""Counts of speculative decoding, and the figures of `specDecodingStats` that they add up."""

_log = structlog.get_logger("load_reports")


class LoadReports:
    """Polls and announces loads, as the part `work`. `in_flight` returns how many requests of ours the engine has."""

    def __init__(
        self, engine: Engine, log: EventLog, clock: Clock, worker: WorkerRegistered, in_flight: Callable[[], int]
    ) -> None:
        self._engine, self._event_log, self._clock = engine, log, clock
        self._worker, self._in_flight = worker, in_flight
        self.rows = LoadRows(worker.instance, worker.dp_ranks)
        """The parser of the statistics; it counts skipped rows."""
        self.work = SupervisedWork("iteration-stats", self._run)
        """The polls as a part of the process; it counts their unexpected failures."""
        self.poll_failures_total = 0
        self.failure = ""
        """Why the last poll failed; empty if it did not."""
        self.newest: dict[int, LoadReport] = {}
        """The last announced report of each rank."""
        self._seen: dict[int, LoadReport] = {}
        self._rests_at_s = clock.now() + REST_PERIOD_S

    async def _run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._announce(dict(self.rows.read(await self._polled())))
            await self._clock.wait(stop, REPORT_PERIOD_S)

    async def _polled(self) -> list[dict[str, Any]]:
        try:
            rows = await self.work.call(partial(self._engine.iteration_stats, POLL_S))
        except EngineError as error:
            self.poll_failures_total += 1
            if not self.failure:
                _log.warning("engine_stats_not_polled", reason=str(error))
            self.failure = f"cannot be polled: {error}"
            return []
        self.failure = ""
        return rows

    async def _announce(self, reports: dict[int, LoadReport]) -> None:
        """Announce the ranks' new reports; if there are none and the engine is idle, announce that once it is due."""
        now_s = self._clock.now()
        if not reports and not self._in_flight() and not self.failure:
            if now_s < self._rests_at_s:
                return
            reports = {dp_rank: at_rest(last) for dp_rank, last in self._seen.items()}
        else:
            self._seen |= reports
        self._rests_at_s = now_s + REST_PERIOD_S
        self.newest |= reports
        for dp_rank, report in reports.items():
            await announce_load(self._event_log, self._worker.model, self._worker.worker_id, dp_rank, report)


async def announce_load(log: EventLog, model: str, worker_id: str, dp_rank: int, report: LoadReport) -> None:
    """Publish the report on core NATS; without a connection it is lost, and a newer one follows."""
    try:
        await log.announce(subjects.load(model, WorkerRank(worker_id, dp_rank)), encode_load(report))
    except BrokerUnavailable as error:
        _log.debug("load_report_lost", reason=str(error))


# ---------------------------------------------------------------- iteration statistics
class RowSkipped(Exception):
    """A row is incomplete or invalid; the message is one of `PROBLEMS`."""


class LoadRows:
    """Reads the rows of one engine. `dp_ranks` are its ranks."""

    def __init__(self, instance: str, dp_ranks: Iterable[int]) -> None:
        self._instance, self._dp_ranks = instance, frozenset(dp_ranks)
        self.skipped = dict.fromkeys(PROBLEMS, 0)
        """Skipped rows by problem; the counts never decrease."""
        self.drafts: Counter[str] = Counter(dict.fromkeys(_DRAFTS, 0))
        """Sums of rank 0's `specDecodingStats`, by the names of `_DRAFTS`. A drafting request advances by (accepted
        tokens + drafting requests) / drafting requests tokens an iteration on average: the acceptance length.
        """

    def read(self, rows: Iterable[object]) -> list[tuple[int, LoadReport]]:
        """Return the reports of the rows, in their order; raise nothing, whatever a row is."""
        reports = []
        for row in rows:
            try:
                reports.append(self._report(row))
            except RowSkipped as problem:
                self.skipped[str(problem)] += 1
        return reports

    def _report(self, row: object) -> tuple[int, LoadReport]:
        dp_rank, report = load_report(row, self._instance)
        if dp_rank not in self._dp_ranks:
            raise RowSkipped("rank")
        if isinstance(row, dict) and dp_rank == 0 and isinstance(stats := row.get("specDecodingStats"), dict):
            self.drafts.update({ours: _count(stats, name) or 0 for ours, name in _DRAFTS.items()})
        return dp_rank, report


def load_report(row: object, instance: str) -> tuple[int, LoadReport]:
    """Return the rank and the report of a row of statistics; raise `RowSkipped` if it is incomplete."""
    if not isinstance(row, dict):
        raise RowSkipped("not_a_map")
    cache, batching = row.get("kvCacheStats"), row.get("inflightBatchingStats")
    if not isinstance(cache, dict):
        raise RowSkipped("cache")
    if batching is not None and not isinstance(batching, dict):
        raise RowSkipped("batching")
    phases = None if batching is None else PhaseLoad(**{ours: _count(batching, name) for ours, name in _PHASES.items()})
    return _rank(row), LoadReport(
        instance=instance,
        iteration=_required_count(row, "iter", "requests"),
        running_requests=_required_count(row, "numActiveRequests", "requests"),
        waiting_requests=_required_count(row, "numQueuedRequests", "requests"),
        used_blocks=_required_count(cache, "usedNumBlocks", "cache"),
        total_blocks=_required_count(cache, "maxNumBlocks", "cache"),
        context_tokens=(phases.context_tokens or 0) if phases is not None else 0,
        iteration_s=(_real(row, "iterLatencyMS") or 0.0) / 1000,
        phases=phases,
    )


def at_rest(last: LoadReport) -> LoadReport:
    """Return the report of a rank that is idle since its `last` one: no requests, the same blocks."""
    return msgspec.structs.replace(
        last, running_requests=0, waiting_requests=0, context_tokens=0, iteration_s=0.0, phases=None
    )


def _rank(row: dict[str, Any]) -> int:
    return 0 if row.get("attentionDpRank") is None else _required_count(row, "attentionDpRank", "rank")


def _required_count(section: dict[str, Any], name: str, problem: str) -> int:
    count = _count(section, name)
    if count is None:
        raise RowSkipped(problem)
    return count


def _count(section: dict[str, Any], name: str) -> int | None:
    value = _real(section, name)
    return int(value) if value is not None and value == int(value) else None


def _real(section: dict[str, Any], name: str) -> float | None:
    value = section.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value <= COUNT_MAX else None
