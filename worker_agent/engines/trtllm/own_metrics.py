"""TensorRT-LLM's own metrics of its requests and iterations, `trtllm_*`, as its server has them.

Its class counts; here the class gets the same as in its server: what a finished request measured, and the rows of
iterations. It registers what it counts for the whole process, from where that is taken: the agent shows it beside its
own. Metrics are there with `return_perf_metrics`, which `--publish-metrics` sets.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/metrics/collector.py` @ 050f80de; `tensorrt_llm/serve/openai_server.py`,
`_extract_metrics`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

_log = structlog.get_logger("trtllm")


class OwnMetrics:
    """The metrics of one engine. Any thread may call."""

    def __init__(self, collector: Any) -> None:  # noqa: ANN401 - the library has no types here
        """`collector` is a new `MetricsCollector`."""
        self._collector = collector
        self._metrics = [each for each in vars(collector).values() if isinstance(each, MetricWrapperBase)]
        for each in self._metrics:
            REGISTRY.unregister(each)
        self._has_failed = False

    def finished(self, result: Any) -> None:  # noqa: ANN401 - as above
        """A request is over."""
        of_choices = getattr(result, "candidate_metrics", None) or [result.metrics_dict]  # one of each choice, from 1.4
        for each in of_choices:
            self._count(self._collector.log_request_metrics_dict, each)

    def iterated(self, row: Mapping[str, Any]) -> None:
        """An iteration is over."""
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
