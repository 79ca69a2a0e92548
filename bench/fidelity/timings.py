"""Timings of simulated engines: a fit to measured latencies (`router what-if --calibration`), and the recorded fleets'.

The fit minimises the sum of squared relative errors by coordinate descent; multiplying steps keep constants positive.
Rows of kind `ttft` have `isl`, `cached` and `ms`; those of kind `itl` have `batch`, `isl` and `ms`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from worker_agent.engines.simulated.timing import H200_8B, EngineTiming, IterationWork

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
        """Return the latency by `timing`: an iteration, and for a first token also the request's time outside of it."""
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


def fit(rows: Sequence[LatencyRow]) -> EngineTiming:
    """Return the constants of least loss, found from `START` by steps that halve when none of them helps."""
    best, least, step = START, loss(START, rows), 0.5
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


H200_8B_MIXED = msgspec.structs.replace(H200_8B, mixed_sequence_s=300e-6)
"""`H200_8B`, but decoding beside a context costs what it does in a served engine.

Source: `mixed_sequence_s` is fitted to two of the three placements of `captures/h200_fleet_light.json`, round robin and
sticky; the calibration has both, but never in one iteration. `H200_8B` stays as it is: the figures of
`docs/BENCHMARKS.md` were made with it.
"""

H200_4B = msgspec.structs.replace(H200_8B_MIXED, base_s=2.8e-3, token_s=11.1e-6, neighbour_ratio=1.4)
"""The same GPU with a 4B model (bf16, 144 KiB of K/V per token), alone or beside other engines on it.

Reading the weights and multiplying by them is scaled by the number of weights, 3.69 to 7.57 billion; attention and
floor are the 8B model's, with as many layers and heads. Only `neighbour_ratio` was fitted to live engines: to the runs
kv and round robin with large caches of four vLLM engines on one H200. The errors on the other runs: `docs/FIDELITY.md`.
"""

H100_4B_SGLANG = msgspec.structs.replace(
    H200_4B,
    request_base_s=4.3e-3,
    base_s=4.0e-3,
    token_s=16.2e-6,
    attention_pair_s=1.71e-9,
    kv_token_s=44.7e-9,
    context_floor_s=29.8e-3,
    mixed_sequence_s=0.0,
    neighbour_ratio=1.49,
)
"""One H100 with the 4B model on SGLang 0.5.14 (attention by Triton, prompts without CUDA graphs), beside others on it.

Fitted to the runs kv and round robin with large caches of `captures/h100_sglang_live.json`, by a random search over
logarithms of the figures. The errors on the other runs: `docs/FIDELITY.md`.
"""
