"""Inputs, measurements and records of runs, as tests need them."""

from typing import Any

from bench.streaming_client import Measured
from bench.sweep.results import RunFigures, RunInputs, RunRecord, figures

BASE: dict[str, Any] = {
    "model": "m",
    "mode": "kv",
    "layout": "4a",
    "workers": 4,
    "concurrency": 8,
    "isl_tokens": 100,
    "osl_tokens": 5,
    "prefix_share": 0.5,
    "prefixes": 3,
    "requests": 10,
    "warmup": 2,
    "seed": 1,
}


def inputs(**changed: Any) -> RunInputs:
    return RunInputs(**BASE | changed)


def answered(**changed: Any) -> Measured:
    """Return an answer of 5 tokens to 100, of which 40 were cached: 0.1 s a token with the defaults."""
    told: dict[str, Any] = {"sent_s": 0.0, "ttft_s": 0.1, "duration_s": 0.5, "prompt_tokens": 100, "cached_tokens": 40}
    told |= {"output_tokens": 5, "worker": "w0", "decision_id": "d", "predicted_blocks": 0}
    return Measured(**told | changed)


def measured_figures(*, lag_p99_s: float | None = 0.005, **changed: Any) -> RunFigures:
    return figures([answered(**changed)], workers=4, lag_p99_s=lag_p99_s)


def record(run: RunInputs, found: RunFigures | None = None, machine: str = "a machine") -> RunRecord:
    return RunRecord(
        inputs=run,
        figures=found or measured_figures(),
        versions={"kv-router": "1"},
        machine=machine,
        began="2026-01-01T00:00:00+00:00",
        took_s=10.0,
    )
