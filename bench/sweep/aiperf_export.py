"""aiperf's JSON export as the figures of a run.

Source: aiperf 0.13.0, schema 1.4: `profile_export_aiperf.json`, as it was written against this router. A metric is an
object with `unit` and `avg`, and percentiles `p50`, `p90`, `p99` where it has one value for each request. Times are in
ms. `error_summary` lists errors with their counts.
"""

from pathlib import Path
from typing import Any

import msgspec

from bench.sweep.results import ResultInvalid, RunFigures

NAME = "profile_export_aiperf.json"
_LATENCIES = ("time_to_first_token", "inter_token_latency", "request_latency")
_NUMBERS = ("request_throughput", "output_token_throughput", "request_count", "benchmark_duration")


class _Metric(msgspec.Struct, frozen=True):
    avg: float
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class AiperfRun(msgspec.Struct, frozen=True, kw_only=True):
    """An export: its load in words, its version, and its figures."""

    load: str
    version: str
    figures: RunFigures


def read_export(file: Path, *, workers: int) -> AiperfRun:
    """Return the run; `workers` served it.

    Raises:
        ResultInvalid: the file is no export, or one without `--streaming`.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        first, itl, e2e = (_times_s(file, found, name) for name in _LATENCIES)
        requests_s, tokens_s, answered, span_s = (_metric(file, found, name).avg for name in _NUMBERS)
        errors = msgspec.convert(found.get("error_summary", []), list[dict[str, Any]])
        phases = found["input_config"]["phases"]
        failed = sum(int(each["count"]) for each in errors)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ResultInvalid(
            f"{file}: found no export ({type(error).__name__}: {error}), allowed aiperf's {NAME}"
        ) from None
    return AiperfRun(
        load=_load(phases),
        version=str(found.get("aiperf_version", "unknown")),
        figures=RunFigures(
            requests=int(answered) + failed,
            failed=failed,
            reasons=tuple(f"{each['count']} x {_reason(each)}" for each in errors[:3]),
            span_s=span_s,
            requests_s=requests_s,
            output_tokens_s=tokens_s,
            tokens_s_worker=tokens_s / workers,
            tokens_s_user=1 / itl[0] if itl[0] else 0.0,
            ttft_s=first,
            itl_s=itl,
            e2e_s=e2e,
            hit_rate=_average(found, "overall_usage_prompt_cache_read_pct") / 100,
            isl_tokens=_average(found, "usage_prompt_tokens") or _average(found, "input_sequence_length"),
            osl_tokens=_average(found, "usage_completion_tokens") or _average(found, "output_sequence_length"),
        ),
    )


def _metric(file: Path, found: dict[str, Any], name: str) -> _Metric:
    if name not in found:
        raise ResultInvalid(f"{file}: {name}: found none, allowed the export of a profile with --streaming")
    return msgspec.convert(found[name], _Metric)


def _times_s(file: Path, found: dict[str, Any], name: str) -> tuple[float, ...]:
    metric = _metric(file, found, name)
    quantiles = (metric.p50, metric.p90, metric.p99)
    if any(each is None for each in quantiles):
        raise ResultInvalid(f"{file}: {name}: found {quantiles}, allowed numbers for p50, p90 and p99")
    return tuple(each / 1000 for each in quantiles if each is not None)


def _average(found: dict[str, Any], name: str) -> float:
    return msgspec.convert(found[name], _Metric).avg if name in found else 0.0


def _load(phases: list[dict[str, Any]]) -> str:
    """Return the load of the last phase, which is the one that is measured."""
    last = phases[-1]
    for key, letter in (("rate", "r"), ("concurrency", "c")):
        if isinstance(last.get(key), int | float):
            return f"{letter}{last[key]:g}"
    return str(last["type"]).replace("_", "-")


def _reason(each: dict[str, Any]) -> str:
    details = each.get("error_details") or {}
    return f"{details.get('type', '')}: {str(details.get('message', ''))[:200]}"
