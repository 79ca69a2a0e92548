"""The runs of a sweep: inputs, figures, and files: one JSON object a run, written whole or not at all.

DIR/NAME.json    a run that was measured; NAME is the run's name
DIR/.NAME.part   what a killed process was writing; the next process writes over it

ITL                  of a request: (E2E - TTFT) / (output tokens - 1)
tokens/s/worker      output tokens a second, divided by the number of workers or GPUs that served
tokens/s/user        1 / ITL p50
hit rate             cached prompt tokens / prompt tokens, as the endpoint reports them in `usage`

Seconds are from the first request's sending to the last answer's end. Figures of tokens and times are of answered
requests only. A percentile is the value at place `int(q * n)` of the sorted n.

runs       every combination of mode, layout, ISL, OSL, prefix share and load; at a URL there is no mode and no layout
a run      has a name, which is its file's, and inputs
measured   a run that has a file with the inputs that are wanted now; the others are to be measured
time left  the mean time of the runs that have a file, for each run that is left
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.report import percentile
from bench.streaming_client import Measured

_IN_MINUTES_S = 90


class RunInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is chosen for a run. Equal inputs give equal prompts."""

    url: str = ""
    """The endpoint; empty: a fleet of simulated workers, started for this run."""
    model: str
    mode: str = ""
    layout: str = ""
    """Simulated workers as `4a` or `1p3d`; for an endpoint the name of its fleet."""
    workers: int
    """Workers or GPUs that serve, by which throughput is divided."""
    concurrency: int = 0
    """Users with one request at a time each; 0: requests come at `rate`."""
    rate: float = 0.0
    """Requests a second, whatever the answers; their distances are exponential."""
    isl_tokens: int
    osl_tokens: int
    prefix_share: float
    """The share of a prompt that is one of `prefixes` texts; the rest is the request's own."""
    prefixes: int
    requests: int
    warmup: int
    """Requests of the same kind that are sent before the measured ones."""
    seed: int
    router_settings: tuple[str, ...] = ()
    worker_settings: tuple[str, ...] = ()

    @property
    def load(self) -> str:
        """The load in words: `c8` for 8 users, `r2.5` for 2.5 requests a second."""
        return f"c{self.concurrency}" if self.concurrency else f"r{self.rate:g}"

    @property
    def fleet(self) -> str:
        """The mode and the layout, or the endpoint's name."""
        return self.layout if self.url else f"{self.mode}-{self.layout}"

    @property
    def workload(self) -> str:
        """Lengths and shares in words; runs of one workload are comparable."""
        return f"isl{self.isl_tokens}-osl{self.osl_tokens}-share{self.prefix_share:g}"

    @property
    def name(self) -> str:
        """The name of the run, and of its file; no two runs of a sweep share it."""
        return f"{self.fleet}-{self.workload}-{self.load}"


def left(runs: Sequence[RunInputs], measured: Mapping[str, RunInputs]) -> list[RunInputs]:
    """Return the runs that are still to be measured; `measured` has the inputs of those that were, by their names."""
    return [each for each in runs if measured.get(each.name) != each]


def difference(wanted: RunInputs, found: RunInputs) -> str:
    """Return which inputs differ, with what was found and what is wanted."""
    return ", ".join(
        f"{field} (found {getattr(found, field)!r}, wanted {getattr(wanted, field)!r})"
        for field in RunInputs.__struct_fields__
        if getattr(found, field) != getattr(wanted, field)
    )


def time_left(took_s: Mapping[RunInputs, float], runs: Sequence[RunInputs]) -> str:
    """Return in words how long these runs will take, by those that were measured."""
    if not runs or not took_s:
        return f"{len(runs)} left"
    seconds = len(runs) * sum(took_s.values()) / len(took_s)
    about = f"{seconds / 60:.0f} min" if seconds >= _IN_MINUTES_S else f"{seconds:.0f} s"
    return f"{len(runs)} left, about {about}"


QUANTILES = (0.50, 0.90, 0.99)
_REASONS_MAX = 3


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies are in seconds, at `QUANTILES`; the hit rate is a share."""

    requests: int
    failed: int
    reasons: tuple[str, ...] = ()
    """The most frequent errors, with how often they came."""
    span_s: float
    requests_s: float
    output_tokens_s: float
    tokens_s_worker: float
    tokens_s_user: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    hit_rate: float
    isl_tokens: float
    """Mean, as the endpoint counted."""
    osl_tokens: float
    lag_p99_s: float | None = None
    """Event-loop lag of the router or worker that had the most; above 10 ms, latencies are those of a busy machine."""


def figures(measured: Sequence[Measured], *, workers: int, lag_p99_s: float | None = None) -> RunFigures:
    """Return the figures of a run, which must have requests."""
    answered = [each for each in measured if not each.error]
    span_s = max(each.sent_s + each.duration_s for each in measured) - min(each.sent_s for each in measured)
    prompt_tokens = sum(each.prompt_tokens for each in answered)
    output_tokens_s = sum(each.output_tokens for each in answered) / span_s
    itl_s = _quantiles(
        [(each.duration_s - each.ttft_s) / (each.output_tokens - 1) for each in answered if each.output_tokens > 1]
    )
    reasons = Counter(each.error for each in measured if each.error).most_common(_REASONS_MAX)
    return RunFigures(
        requests=len(measured),
        failed=len(measured) - len(answered),
        reasons=tuple(f"{count} x {reason}" for reason, count in reasons),
        span_s=span_s,
        requests_s=len(answered) / span_s,
        output_tokens_s=output_tokens_s,
        tokens_s_worker=output_tokens_s / workers,
        tokens_s_user=1 / itl_s[0] if itl_s[0] else 0.0,
        ttft_s=_quantiles([each.ttft_s for each in answered]),
        itl_s=itl_s,
        e2e_s=_quantiles([each.duration_s for each in answered]),
        hit_rate=sum(each.cached_tokens for each in answered) / prompt_tokens if prompt_tokens else 0.0,
        isl_tokens=prompt_tokens / max(1, len(answered)),
        osl_tokens=sum(each.output_tokens for each in answered) / max(1, len(answered)),
        lag_p99_s=lag_p99_s,
    )


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(percentile(values, quantile) for quantile in QUANTILES)


FORMAT = 1


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file's content. `versions` and `machine` are those of the measurement; `began` is in UTC."""

    format: int = FORMAT
    inputs: RunInputs
    figures: RunFigures
    versions: dict[str, str]
    machine: str
    began: str
    took_s: float
    """Includes the start of the fleet and the warm-up."""


class ResultInvalid(Exception):
    """A file cannot be read as a run; the message has the file, the found and the allowed."""


_decoder = msgspec.json.Decoder(RunRecord)


def write(directory: Path, record: RunRecord) -> Path:
    """Write the record to its file, whole and safe from a power failure, or not at all; return the file."""
    file, part = directory / f"{record.inputs.name}.json", directory / f".{record.inputs.name}.part"
    with part.open("wb") as to:
        to.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        to.flush()
        os.fsync(to.fileno())
    part.replace(file)
    return file


def read(directory: Path, *, but: str = "") -> dict[str, RunRecord]:
    """Return the runs of a directory by their names, in the order of their files; the file named `but` is left out.

    Raises:
        ResultInvalid: a file is not one of a sweep.
    """
    found = {}
    for file in sorted(file for file in directory.glob("*.json") if file.name != but):
        try:
            record = _decoder.decode(file.read_bytes())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ResultInvalid(f"{file}: found no run of a sweep ({error}), allowed what the sweep writes") from None
        if record.format != FORMAT:
            raise ResultInvalid(f"{file}: format: found {record.format}, allowed {FORMAT}")
        found[record.inputs.name] = record
    return found
