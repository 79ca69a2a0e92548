"""Calls of the loaded library: a request's stream, polls, the metrics that the library counts itself.

A poll fetches with timeout 0 and pauses after an empty fetch: with a timeout the RPC worker would sleep 100 ms after
each empty fetch, however soon rows come. The pause also prevents busy polling of an engine that answers at once.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/executor/rpc_worker_mixin.py` (`fetch_kv_cache_events_wait_async`,
`fetch_stats_wait_async`: 100 ms) and `tensorrt_llm/executor/executor.py` (`get_stats` answers at once before the first
request); metrics: `tensorrt_llm/metrics/collector.py` @ 050f80de, `tensorrt_llm/serve/openai_server.py`,
`_extract_metrics`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from worker_agent.engines.trtllm.outputs import Outputs
from worker_agent.port.types import EngineOutput

_log = structlog.get_logger("trtllm")

Row = dict[str, Any]


class Stream:
    """One request in TensorRT-LLM: its result and outputs; at most one task waits for its next response."""

    def __init__(self, request_id: str, result: Any, outputs: Outputs, *, takes_transfer: bool) -> None:  # noqa: ANN401
        self.request_id, self.result, self.outputs = request_id, result, outputs
        self.takes_transfer = takes_transfer
        self._wait: asyncio.Timeout | None = None

    async def step(self) -> list[EngineOutput]:
        """Return the new outputs of the engine's next response; raise its error, or TimeoutError after `cut`."""
        try:
            async with asyncio.timeout(None) as self._wait:
                await anext(self.result)
        finally:
            self._wait = None
        return self.outputs.new(self.result)

    def cut(self) -> None:
        """End the wait for the next response."""
        if self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())

    def abort(self) -> None:
        """Cancel the request in the engine, if that still computes it."""
        try:
            self.result.abort()
        except (AssertionError, RuntimeError) as error:  # the engine has ended already
            _log.debug("abort_not_heard", request_id=self.request_id, reason=str(error))


def polled(fetch: Callable[[], list[Row]], timeout_s: float, pause_s: float) -> list[Row]:
    """Return the first rows of `fetch`, or none after `timeout_s`; raise what it raises."""
    end_s = time.monotonic() + timeout_s
    while not (rows := fetch()) and (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
    return rows


class OwnMetrics:
    """The engine's own metrics of its requests and iterations, `trtllm_*`, as its server has them. Any thread may call.

    The library's `MetricsCollector` counts. It gets what the library's server gives it: the measurements of finished
    requests, and the rows of iterations. It registers its metrics in the registry of the process; they are taken out of
    there, and the agent shows them beside its own. The engine measures only with `return_perf_metrics`, which
    `--publish-metrics` sets.
    """

    def __init__(self, collector: Any) -> None:  # noqa: ANN401 - the library has no types here
        """`collector` is a new `MetricsCollector`."""
        self._collector = collector
        self._metrics = [each for each in vars(collector).values() if isinstance(each, MetricWrapperBase)]
        for each in self._metrics:
            REGISTRY.unregister(each)
        self._has_failed = False

    def finished(self, result: Any) -> None:  # noqa: ANN401 - as above
        """Count a finished request."""
        of_choices = getattr(result, "candidate_metrics", None) or [result.metrics_dict]  # one per choice, since 1.4
        for each in of_choices:
            self._count(self._collector.log_request_metrics_dict, each)

    def iterated(self, row: Mapping[str, Any]) -> None:
        """Count an iteration."""
        self._count(self._collector.log_iteration_stats, row)

    def families(self) -> Iterator[Metric]:
        """Yield what was counted, under the engine's names."""
        for each in self._metrics:
            yield from each.collect()

    def _count(self, count: Callable[[Any], None], counted: Any) -> None:  # noqa: ANN401 - as above
        try:
            count(counted)
        except Exception as error:  # noqa: BLE001 - no request fails because it cannot be counted
            if not self._has_failed:
                self._has_failed = True
                _log.warning("engine_metrics_lost", reason=f"{type(error).__name__}: {error}")
