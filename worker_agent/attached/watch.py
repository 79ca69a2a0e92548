"""Watches an attached engine: registers it while its HTTP `/health` answers, and reports its load.

The engine, in the fleet or out of it, is probed every `PROBE_PERIOD_S`:

out, answers                             register
in,  answers                             register again if it has changed
in,  `FAILURES_MAX` failures in a row    leave
in,  sleeps                              leave at once: it answers /health and computes nothing
out, does not answer                     nothing

Before it is registered the engine is queried again: it may have restarted with another cache. At each probe its models
are read: it may have loaded an adapter.

Its metrics become load reports: they are read every `POLL_S`, the newest of each rank is sent.

    text    Prometheus text, by the engine's names (`EngineServer.metrics`)
    JSON    rows of iteration statistics (`EngineServer.iterations`), which the engine gives to one reader only. Without
            rows it is idle, or another client took those of its requests

A failed read is counted by the client and logged once, until a read works again. Meanwhile nothing is announced, and
routers use their own ledger, as for any engine that does not report. The text of the newest read is kept, too: the
agent's /metrics shows the engine's own families from it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Literal

import structlog
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.load import LoadReport
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, by_name, gauge
from worker_agent.attached.client import EngineClient, EngineUnanswered
from worker_agent.attached.engine_metrics import read_loads
from worker_agent.engines.servers import SERVERS
from worker_agent.engines.servers.base import samples_in
from worker_agent.events.consolidator import WorkerStreams
from worker_agent.fleet.membership import Membership
from worker_agent.load.reports import LoadRows, announce_load
from worker_agent.metrics import load_families, row_families

_health_log = structlog.get_logger("attached")
_log = structlog.get_logger("engine_loads")
POLL_S = 0.5
"""Pause between two reads. A router adds what it sent since: fresher figures would only cost the engine."""
STALE_READS = 10
TEXT_BYTES_MAX = 1 << 20
"""Some 10,000 samples, which take about 100 ms to read; an engine has about 1,000."""
ExportProblem = Literal["oversize", "unreadable", "stale"]
EXPORT_PROBLEMS: tuple[ExportProblem, ...] = ("oversize", "unreadable", "stale")
PROBE_PERIOD_S = 1.0
FAILURES_MAX = 5
_UNANSWERED = "its /health does not answer"


class HealthWatch:
    """A part of a process, `run`: probes the engine, and lets `membership` register and withdraw it.

    `describe` returns the current registration; None: the engine cannot join as it is.
    """

    def __init__(
        self,
        client: EngineClient,
        membership: Membership,
        clock: Clock,
        *,
        describe: Callable[[], Awaitable[WorkerRegistered | None]],
        is_asleep: Callable[[], bool],
    ) -> None:
        self._client, self._membership, self._clock = client, membership, clock
        self._describe, self._is_asleep = describe, is_asleep
        self._failures, self._is_logged = 0, False
        membership.withdraw(_UNANSWERED)  # until the first probe

    async def run(self, stop: asyncio.Event) -> None:
        """Probe the engine until `stop` is set."""
        while not stop.is_set():
            await self._probe()
            await self._clock.wait(stop, PROBE_PERIOD_S)

    async def _probe(self) -> None:
        problem, is_asleep = "", self._is_asleep()
        try:
            await self._client.get("health", "/health", bytes)
        except EngineUnanswered as error:
            problem, is_asleep = str(error), False
        if is_asleep:
            problem = "it sleeps"
        self._failures = self._failures + 1 if problem else 0
        self._log_problem(problem)
        if not problem:
            if (registration := await self._describe()) is not None:
                self._membership.restore(registration)
        elif is_asleep or self._failures >= FAILURES_MAX:
            self._membership.withdraw(problem if is_asleep else _UNANSWERED)

    def _log_problem(self, problem: str) -> None:
        """Log once why the engine is not registered, or is about to leave, until it answers again."""
        is_out = bool(problem) and (not self._membership.is_registered or self._failures >= FAILURES_MAX)
        if is_out and not self._is_logged:
            _health_log.warning("engine_unreachable", url=f"{self._client.base_url}/health", reason=problem)
        self._is_logged = is_out


class EngineLoads:
    """The part `run` reads and announces the load. `total_blocks` of a rank is used if the metrics lack it."""

    def __init__(
        self, client: EngineClient, log: EventLog, clock: Clock, worker: WorkerStreams, *, total_blocks: int
    ) -> None:
        self._client, self._event_log, self._clock, self._worker = client, log, clock, worker
        self._server, self._total_blocks = SERVERS[client.kind], total_blocks
        self._text, self._text_at_s = b"", 0.0
        self.rows = LoadRows(worker.instance, worker.dp_ranks)
        """The parser of iteration statistics; it counts skipped rows."""
        self._newest: dict[int, LoadReport] = {}
        self._reads = 0
        self.is_asleep = False
        """Whether the engine slept when its metrics were read last."""
        self._problem = ""

    @property
    def newest(self) -> dict[int, LoadReport]:
        """The newest report of each rank; none while the engine's metrics cannot be read."""
        return {} if self._problem else dict(self._newest)

    @property
    def text_age_s(self) -> float | None:
        """Seconds since the engine's metrics were read as text; None: they never were."""
        return self._clock.now() - self._text_at_s if self._text else None

    def own_families(self) -> list[Metric] | ExportProblem:
        """Return the engine's own families as they were read last, or why there are none; [] before the first read.

        They are stale after `STALE_READS` pauses plus the longest time of an answer.
        """
        if (age_s := self.text_age_s) is None:
            return []
        if age_s > STALE_READS * POLL_S + self._server.metrics_answer_s:
            return "stale"
        ours = {"worker": self._worker.id, "model": self._worker.model}
        return engine_families(self._server.metrics.prefix, self._text, ours)

    def families(self) -> Iterator[Family]:
        """Yield load, rows, and the engine's own families under their names, with their age, or why there are none."""
        worker = self._worker.id
        yield from load_families(worker, self.newest)
        yield from row_families(worker, self.rows)
        found, at, age_s = self.own_families(), (worker,), self.text_age_s
        if not isinstance(found, str):
            yield from found
        meaning = "Age of the engine's own metrics as they were read last"
        yield gauge("engine_metrics_age_seconds", meaning, ("worker",), [] if age_s is None else [(at, age_s)])
        problems = {} if age_s is None else {reason: reason == found for reason in EXPORT_PROBLEMS}
        meaning = "1 while the engine's own metrics are not shown here, by reason"
        yield gauge("engine_metrics_not_shown", meaning, ("worker", "reason"), by_name(at, problems))

    async def run(self, stop: asyncio.Event) -> None:
        """Read and announce until `stop` is set."""
        while not stop.is_set():
            await until(stop, self._read_and_announce())
            await self._clock.wait(stop, POLL_S)

    async def _read_and_announce(self) -> None:
        try:
            reports = await self._client.metrics(self._read)
        except EngineUnanswered as error:
            self._log_problem(str(error))
            return
        self._log_problem("")
        self._newest |= reports
        for dp_rank, report in reports.items():
            await announce_load(self._event_log, self._worker.model, self._worker.id, dp_rank, report)

    def _read(self, body: bytes) -> dict[int, LoadReport]:
        self._reads += 1
        rows = self._server.iterations(body)
        if rows is not None:
            return dict(self.rows.read(rows))
        self._text, self._text_at_s = body, self._clock.now()
        samples = samples_in(body, self._server.metrics.all)
        self.is_asleep = self._server.is_asleep(samples)
        return read_loads(
            self._server.metrics,
            samples,
            dp_ranks=self._worker.dp_ranks,
            block_size=self._worker.block_size,
            total_blocks=self._total_blocks,
            instance=self._worker.instance,
            iteration=self._reads,
        )

    def _log_problem(self, problem: str) -> None:
        if problem and not self._problem:
            _log.warning("engine_load_unknown", path=self._client.metrics_path, reason=problem)
        elif self._problem and not problem:
            _log.info("engine_load_known_again", path=self._client.metrics_path)
        self._problem = problem


def engine_families(prefix: str, body: bytes, ours: Mapping[str, str]) -> list[Metric] | ExportProblem:
    """Return the engine's own families, those with `prefix`, with `ours` as further labels; or why there are none.

    The names are the engine's. A label of the engine with the name of one of ours becomes `exported_<name>`, as
    Prometheus does without `honor_labels`. Families without the prefix (`python_*`, `process_*`) are left out: they
    are of the engine's process, and the agent has its own. So are the times at which series began (`*_created`): rates
    do not need them. Timestamps of samples are not kept. A text is shown whole or not at all.
    """
    if len(body) > TEXT_BYTES_MAX:
        return "oversize"
    openings = (prefix, f"# TYPE {prefix}", f"# HELP {prefix}")
    lines = [line for line in body.decode("utf-8", errors="replace").split("\n") if line.startswith(openings)]
    try:
        return list(labelled(text_string_to_metric_families("\n".join([*lines, ""])), ours))
    except (ValueError, LookupError):
        return "unreadable"


def labelled(families: Iterable[Metric], ours: Mapping[str, str]) -> Iterator[Metric]:
    """Yield families with `ours` as further labels, as `engine_families` says."""
    for family in families:
        shown = Metric(family.name, family.documentation, family.type)
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                renamed = {f"exported_{name}" if name in ours else name: value for name, value in sample.labels.items()}
                shown.add_sample(sample.name, renamed | dict(ours), sample.value)
        if shown.samples:
            yield shown
