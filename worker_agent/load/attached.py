"""Turns an attached engine's metrics into load reports: read every `poll_s`, the newest of each rank is sent.

    text    the engine's names (`engine_metrics.py`)
    JSON    TensorRT-LLM's iteration statistics (`reports.py`): the answer to `GET /metrics` of `trtllm-serve`, every
            row once. Another client takes rows away; an idle engine has none, and older versions wait 2 s before an
            empty answer. An engine without rows may still be busy with other clients' requests

A failed read is counted by the client and logged once, until a read works again. Meanwhile nothing is announced, and
routers use their own ledger, as for any engine that does not report. The text of the newest read is kept, too: the
agent's /metrics shows the engine's own families from it (`engine_families.py`).
"""

import asyncio

import structlog
from prometheus_client.core import Metric

from kv_protocol.errors import MalformedMessage
from kv_protocol.load import LoadReport
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import until
from worker_agent.engines.attached.client import ANSWER_S, EngineClient, EngineUnanswered
from worker_agent.engines.attached.facts import iteration_rows
from worker_agent.engines.attached.survey import metrics_answer_s
from worker_agent.load.engine_families import ExportProblem, engine_families
from worker_agent.load.engine_metrics import NAMES, EngineKind, read_loads, reads_asleep
from worker_agent.load.metrics_text import samples_in
from worker_agent.load.publisher import announce_load
from worker_agent.load.reports import LoadRows

_log = structlog.get_logger("engine_loads")
STALE_READS = 10


class EngineLoads:
    """A part of a process, `run`. `total_blocks` of a rank is used if the engine's metrics lack it."""

    def __init__(
        self,
        kind: EngineKind,
        client: EngineClient,
        log: EventLog,
        clock: Clock,
        *,
        model: str,
        worker_id: str,
        instance: str,
        dp_ranks: tuple[int, ...],
        block_size: int,
        total_blocks: int,
        metrics_path: str,
        poll_s: float,
        is_exported: bool = True,
    ) -> None:
        self._kind, self._client, self._event_log, self._clock = kind, client, log, clock
        self._model, self._worker_id, self._instance = model, worker_id, instance
        self._dp_ranks, self._block_size, self._total_blocks = dp_ranks, block_size, total_blocks
        self._metrics_path, self._poll_s = metrics_path, poll_s
        self._is_exported, self._text, self._text_at_s = is_exported, b"", 0.0
        self.rows = LoadRows(instance, dp_ranks)
        """The parser of iteration statistics, for its skipped rows."""
        self._newest: dict[int, LoadReport] = {}
        self._reads = 0
        self.is_asleep = False
        """Whether the engine said so when its metrics were read last."""
        self._problem = ""

    @property
    def newest(self) -> dict[int, LoadReport]:
        """The newest report of each rank; none while the engine's metrics cannot be read."""
        return {} if self._problem else dict(self._newest)

    @property
    def text_age_s(self) -> float | None:
        """Seconds since the engine's metrics were read as text; None before, and if they are not exported."""
        return self._clock.now() - self._text_at_s if self._text else None

    def own_families(self) -> list[Metric] | ExportProblem:
        """Return the engine's own families as they were read last, or why there are none; none before the first read.

        They are stale after `STALE_READS` pauses and the longest that an answer may take.
        """
        if (age_s := self.text_age_s) is None:
            return []
        if age_s > STALE_READS * self._poll_s + (metrics_answer_s(self._kind) or ANSWER_S):
            return "stale"
        return engine_families(self._kind, self._text, {"worker": self._worker_id, "model": self._model})

    async def run(self, stop: asyncio.Event) -> None:
        """Read and announce until `stop` is set."""
        while not stop.is_set():
            await until(stop, self._read_and_announce())
            await until(stop, self._clock.sleep(self._poll_s))

    async def _read_and_announce(self) -> None:
        try:
            body = await self._client.get("metrics", self._metrics_path, answer_s=metrics_answer_s(self._kind))
            reports = self._read(body)
        except EngineUnanswered as error:
            self._log_problem(str(error))
            return
        except MalformedMessage as error:
            self._client.unreadable("metrics")
            self._log_problem(str(error))
            return
        self._log_problem("")
        self._newest |= reports
        for dp_rank, report in reports.items():
            await announce_load(self._event_log, self._model, self._worker_id, dp_rank, report)

    def _read(self, body: bytes) -> dict[int, LoadReport]:
        self._reads += 1
        if self._kind == "trtllm-serve" and body.lstrip()[:1] == b"[":
            return dict(self.rows.read(iteration_rows(body)))
        if self._is_exported:
            self._text, self._text_at_s = body, self._clock.now()
        samples = list(samples_in(body, NAMES[self._kind].all))
        self.is_asleep = reads_asleep(self._kind, samples)
        return read_loads(
            self._kind,
            samples,
            dp_ranks=self._dp_ranks,
            block_size=self._block_size,
            total_blocks=self._total_blocks,
            instance=self._instance,
            iteration=self._reads,
        )

    def _log_problem(self, problem: str) -> None:
        if problem and not self._problem:
            _log.warning("engine_load_unknown", path=self._metrics_path, reason=problem)
        elif self._problem and not problem:
            _log.info("engine_load_known_again", path=self._metrics_path)
        self._problem = problem
