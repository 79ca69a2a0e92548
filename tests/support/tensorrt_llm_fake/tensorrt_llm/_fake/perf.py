"""A finished request's own measurements, for requests with `return_perf_metrics`.

Times are durations since the engine's start, by its own clock: iterations. A request arrives when the iteration before
its first one ends, is scheduled in the first one's middle, and has its first token at its end. Transfers, with a size
in bytes, are those of generation-only requests; others have a size of 0.
Source: `tensorrt_llm.bindings.executor.RequestPerfMetrics`, by its use in `serve/openai_server.py`.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .control import control


@dataclass(frozen=True)
class TimingMetrics:
    """When what happened."""

    arrival_time: timedelta
    first_scheduled_time: timedelta
    first_token_time: timedelta
    last_token_time: timedelta
    kv_cache_transfer_start: timedelta
    kv_cache_transfer_end: timedelta
    kv_cache_size: int


@dataclass(frozen=True)
class RequestPerfMetrics:
    """All of it, and the iterations from the first to the last."""

    timing_metrics: TimingMetrics
    first_iter: int
    last_iter: int
    iter: int


def measured(request: Any, block_size: int, last: int) -> RequestPerfMetrics:
    """Return the measurements of a request that ends in iteration `last`."""
    first, blocks = request.first_iteration, -(-len(request.prompt) // block_size)
    moved = blocks * control.model.bytes_per_block if request.kind == "generation_only" else 0
    timing = TimingMetrics(
        _at(first - 1), _at(first - 0.5), _at(first), _at(last), _at(first - 0.4), _at(first - 0.2), moved
    )
    return RequestPerfMetrics(timing, first, last, last)


def _at(iterations: float) -> timedelta:
    return timedelta(milliseconds=iterations * control.model.iteration_ms)
