"""Reads an engine's load from its metrics, by metric name.

Several series of one name and rank (tensor-parallel ranks, priorities, processes) show the same figure, so the largest
counts, never their sum. Without counts of running and waiting requests there is no report; other missing figures are 0.
The only rank of an engine with one rank is rank 0, whatever its label: behind an external balancer each vLLM process
has its own `engine` number.
"""

from collections.abc import Iterable, Mapping

from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import DP_RANK_MAX
from kv_protocol.load import COUNT_MAX, LoadReport
from worker_agent.engines.servers.base import MetricNames, Sample, label_count

_COUNT_MAX = float(COUNT_MAX)
"""A greater number counts as missing, as infinity, NaN and negative numbers do."""


def read_loads(
    names: MetricNames,
    samples: Iterable[Sample],
    *,
    dp_ranks: tuple[int, ...],
    block_size: int,
    total_blocks: int,
    instance: str,
    iteration: int,
) -> dict[int, LoadReport]:
    """Return the report of each of `dp_ranks` in the samples; `total_blocks` is used if they have no total.

    Raises:
        MalformedMessage: the samples have no request count of these ranks: another engine, or one without metrics.
    """
    reports = {}
    for dp_rank, values in _by_rank(names, samples, dp_ranks).items():
        if names.running not in values or names.waiting not in values:
            continue
        total = _total_blocks(names, values, block_size) or total_blocks
        reports[dp_rank] = LoadReport(
            instance=instance,
            iteration=iteration,
            running_requests=int(values[names.running]),
            waiting_requests=int(values[names.waiting]),
            used_blocks=_used_blocks(names, values, block_size, total),
            total_blocks=total,
        )
    if not reports:
        raise MalformedMessage(0, f"metrics: found no {names.running} and {names.waiting} of ranks {dp_ranks}")
    return reports


def _by_rank(names: MetricNames, samples: Iterable[Sample], dp_ranks: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Return the largest value of each name, by rank."""
    found: dict[int, dict[str, float]] = {}
    for sample in samples:
        if sample.name not in names.all:
            continue
        label = names.total_blocks_label if sample.name == names.total_blocks else ""
        value = float(label_count(sample.labels, label)) if label else sample.value
        if 0 <= value <= _COUNT_MAX:
            values = found.setdefault(_rank(sample.labels.get(names.rank_label, "")), {})
            values[sample.name] = max(value, values.get(sample.name, 0.0))
    if len(dp_ranks) == 1 and len(found) == 1:
        return dict(zip(dp_ranks, found.values(), strict=True))
    return {dp_rank: values for dp_rank, values in found.items() if dp_rank in dp_ranks}


def _rank(label: str) -> int:
    """Return the rank in a label: 0 without a label, -1 if it is not a rank."""
    if not label:
        return 0
    return int(label) if label.isascii() and label.isdecimal() and len(label) <= len(str(DP_RANK_MAX)) else -1


def _total_blocks(names: MetricNames, values: Mapping[str, float], block_size: int) -> int:
    if names.total_blocks in values:
        return int(values[names.total_blocks])
    return int(values.get(names.total_tokens, 0.0)) // block_size


def _used_blocks(names: MetricNames, values: Mapping[str, float], block_size: int, total: int) -> int:
    if names.used_blocks in values:
        return int(values[names.used_blocks])
    if names.used_tokens in values:
        return -(-int(values[names.used_tokens]) // block_size)
    ratio = next((values[name] for name in names.usage if name in values), 0.0)
    return round(min(ratio, 1.0) * total)
