"""TensorRT-LLM's iteration statistics become a load report; tolerant of versions, absent names, nulls and nonsense.

Source: `event_plane.md` section 1.7.
"""

from typing import Any

from kv_protocol.load import LoadReport

_REAL_MAX = 1 << 63
"""Beyond any count; infinity, NaN and what is below 0 are not said either."""


def load_report(stats: dict[str, Any], instance: str) -> tuple[int, LoadReport]:
    """Return the rank that an iteration's statistics speak of, and its report; what is not said is 0."""
    cache = _section(stats, "kvCacheStats")
    batching = _section(stats, "inflightBatchingStats")
    return _number(stats, "attentionDpRank"), LoadReport(
        instance=instance,
        iteration=_number(stats, "iter"),
        running_requests=_number(stats, "numActiveRequests"),
        waiting_requests=_number(stats, "numQueuedRequests"),
        used_blocks=_number(cache, "usedNumBlocks"),
        total_blocks=_number(cache, "maxNumBlocks"),
        context_tokens=_number(batching, "numCtxTokens"),
        iteration_s=_real(stats, "iterLatencyMS") / 1000,
    )


def _section(stats: dict[str, Any], name: str) -> dict[str, Any]:
    section = stats.get(name)
    return section if isinstance(section, dict) else {}


def _real(stats: dict[str, Any], name: str) -> float:
    value = stats.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value <= _REAL_MAX else 0.0


def _number(stats: dict[str, Any], name: str) -> int:
    return int(_real(stats, name))
