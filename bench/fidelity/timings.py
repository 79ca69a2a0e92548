"""Fit the simulated engine's timing to measured latencies, for `router what-if --calibration`.

Minimises the sum of squared relative errors by coordinate descent; constants stay positive because steps multiply.
Rows of kind `ttft` have `isl`, `cached` and `ms`; of kind `itl`, `batch`, `isl` and `ms`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from worker_agent.engines.simulated.timing import EngineTiming, IterationWork

START = EngineTiming(
    request_base_s=2e-3,
    prompt_token_s=1e-6,
    base_s=5e-3,
    context_floor_s=20e-3,
    token_s=20e-6,
    attention_pair_s=1e-9,
    kv_token_s=30e-9,
    sequence_s=20e-6,
    sequences_knee=64,
)
FITTED = tuple(
    name
    for name in EngineTiming.__struct_fields__
    if name not in {"host_token_s", "mixed_sequence_s", "neighbour_ratio"}
)
"""The constants that captures determine: no row moves blocks between GPU and host, decodes beside a context, or has
other engines on the GPU."""
SMALLEST_STEP = 1e-6


class LatencyRow(msgspec.Struct, frozen=True):
    """One measured latency in ms: of a first token, or between tokens at a batch size."""

    kind: Literal["ttft", "itl"]
    isl: int
    ms: float
    cached: int = 0
    batch: int = 0

    @property
    def work(self) -> IterationWork:
        """What the engine computed in that time: one prompt, or one token of each of `batch` sequences."""
        if self.kind == "itl":
            return IterationWork(decode_sequences=self.batch, kv_tokens=self.batch * self.isl)
        new = self.isl - self.cached
        pairs = new * (self.cached + new / 2)
        return IterationWork(context_tokens=new, attention_pairs=pairs)

    def modelled_ms(self, timing: EngineTiming) -> float:
        """Return the latency that `timing` gives: of an iteration, before a first token also of the request's way."""
        request_s = timing.request_s(self.isl) if self.kind == "ttft" else 0.0
        return (request_s + timing.iteration_s(self.work)) * 1e3

    def relative_error(self, timing: EngineTiming) -> float:
        """Return modelled over measured latency, less 1."""
        return self.modelled_ms(timing) / self.ms - 1


class CalibrationCapture(msgspec.Struct, frozen=True):
    """A calibration capture, as far as the fit reads it."""

    engine: str
    gpu: str
    model: str
    rows: tuple[LatencyRow, ...]


def load_capture(path: Path) -> CalibrationCapture:
    """Return the capture in the JSON file at `path`."""
    return msgspec.json.decode(path.read_bytes(), type=CalibrationCapture)


def loss(timing: EngineTiming, rows: Sequence[LatencyRow]) -> float:
    """Return the sum of squared relative errors."""
    return sum(row.relative_error(timing) ** 2 for row in rows)


def fit(rows: Sequence[LatencyRow], start: EngineTiming = START) -> EngineTiming:
    """Return the constants of least loss, found from `start` by steps that halve when none of them helps."""
    best, least, step = start, loss(start, rows), 0.5
    while step > SMALLEST_STEP:
        before = least
        for name in FITTED:
            for factor in (1 + step, 1 / (1 + step)):
                tried = msgspec.structs.replace(best, **{name: getattr(best, name) * factor})
                if (found := loss(tried, rows)) < least:
                    best, least = tried, found
        if least > before * (1 - 1e-6):
            step /= 2
    return best
