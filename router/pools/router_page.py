"""Parses a pool's router's own answers, as text and JSON.

| asked | plane | read |
|---|---|---|
| `GET /ready` | data | `ready`, `reasons` |
| `GET /v1/models` | data | whether it serves one of our models |
| `GET /metrics` | control | `kvrouter_queued_requests`; `kvrouter_ledger_reported_waiting`, of all ranks; and of |
| | | `kvrouter_time_to_first_token_seconds`, `kvrouter_inter_token_latency_seconds` the buckets, of all modes |

Source: `docs/reference/metrics.md`.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from router.doctor.pages import PageUnreadable, decoded, samples
from router.pools.probes import Attained, LiveLimits, Queue, Target, attained

_QUEUED, _WAITING = "kvrouter_queued_requests", "kvrouter_ledger_reported_waiting"
_LATENCIES: dict[str, Target] = {
    "kvrouter_time_to_first_token_seconds_bucket": "ttft",
    "kvrouter_inter_token_latency_seconds_bucket": "itl",
}
_MS_PER_S = 1000


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Busyness(NamedTuple):
    """A router's load, by its metrics; None: not stated, or not checked."""

    queue: Queue | None = None
    ttft: Attained | None = None
    itl: Attained | None = None


def not_serving(body: bytes, models: Collection[str]) -> str:
    """Return why a router serves none of `models`, empty if it serves one; raise `PageUnreadable`."""
    found = [each.id for each in decoded(body, _Models, "/v1/models").data]
    if not set(models).isdisjoint(found):
        return ""
    return f"serves {', '.join(found[:8]) or 'no model'}, wanted {', '.join(models)}"


def busyness(page: bytes, limits: LiveLimits) -> Busyness:
    """Return the load by the metrics; latencies against the bounds of `limits`. Raise `PageUnreadable`."""
    waiting: defaultdict[str, float] = defaultdict(float)
    buckets: dict[Target, defaultdict[float, float]] = {"ttft": defaultdict(float), "itl": defaultdict(float)}
    try:
        for sample in samples(page, (_QUEUED, _WAITING, *_LATENCIES)):
            if (target := _LATENCIES.get(sample.name)) is None:
                waiting[sample.name] += sample.value
            else:
                buckets[target][float(sample.labels["le"])] += sample.value
        return Busyness(
            Queue(int(waiting[_QUEUED]), int(waiting[_WAITING])) if _QUEUED in waiting else None,
            _attained(buckets["ttft"], limits.ttft_bound_ms),
            _attained(buckets["itl"], limits.itl_bound_ms),
        )
    except (ValueError, LookupError, OverflowError) as error:
        raise PageUnreadable(f"/metrics: {error}") from error


def _attained(buckets: dict[float, float], bound_ms: float | None) -> Attained | None:
    return None if bound_ms is None or not buckets else attained(buckets, bound_ms / _MS_PER_S)
