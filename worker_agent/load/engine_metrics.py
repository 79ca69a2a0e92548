"""Reads an engine's load from its metrics, by metric name.

    figure of a rank vLLM                                 SGLang                           TensorRT-LLM
    --------------   ----------------------------------   ------------------------------   ---------------------------
    rank number      label `engine`                       label `dp_rank`                  (one rank only)
    running          vllm:num_requests_running            sglang:num_running_reqs          trtllm_num_requests_running
    waiting          vllm:num_requests_waiting            sglang:num_queue_reqs            trtllm_num_requests_waiting
    used blocks      usage ratio x total                  sglang:num_used_tokens / page    trtllm_kv_cache_used_blocks
                                                          else usage ratio x total
    usage ratio      vllm:kv_cache_usage_perc, until      sglang:token_usage               trtllm_kv_cache_utilization
                     0.9 vllm:gpu_cache_usage_perc
    total blocks     vllm:cache_config_info,              sglang:max_total_num_tokens      trtllm_kv_cache_max_blocks
                     label `num_gpu_blocks`               / page

A page is a block. Several series of one name and rank (tensor-parallel ranks, priorities, processes) show the same
figure, so the largest counts, never their sum. Without running and waiting requests there is no load to report; other
missing figures are 0. The only rank of an engine with one rank is rank 0, whatever its label: behind an external
balancer each vLLM process has its own `engine` number.

Source: vLLM `vllm/v1/metrics/loggers.py`; SGLang `python/sglang/srt/metrics/collector.py`; TensorRT-LLM
`tensorrt_llm/metrics/collector.py`; revisions in `docs/ATTACH.md`.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import DP_RANK_MAX
from kv_protocol.load import COUNT_MAX, LoadReport

EngineKind = Literal["vllm", "sglang", "trtllm-serve"]

_COUNT_MAX = float(COUNT_MAX)
"""Beyond any count; infinity, NaN and negative numbers count as missing, too."""


class Sample(NamedTuple):
    """One line of an engine's metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricNames(NamedTuple):
    """The metric names of one engine. The first existing name of `usage` counts; empty: it has no such metric."""

    running: str
    waiting: str
    usage: tuple[str, ...]
    rank_label: str = ""
    used_tokens: str = ""
    total_tokens: str = ""
    used_blocks: str = ""
    total_blocks: str = ""
    cache_config: str = ""
    sleep_state: str = ""

    @property
    def all(self) -> frozenset[str]:
        """Every name that is read."""
        named = (self.running, self.waiting, *self.usage, self.used_tokens, self.total_tokens, self.used_blocks)
        return frozenset(filter(None, (*named, self.total_blocks, self.cache_config, self.sleep_state)))


NAMES: Mapping[EngineKind, MetricNames] = {
    "vllm": MetricNames(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        rank_label="engine",
        cache_config="vllm:cache_config_info",
        sleep_state="vllm:engine_sleep_state",
    ),
    "sglang": MetricNames(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        usage=("sglang:token_usage",),
        rank_label="dp_rank",
        used_tokens="sglang:num_used_tokens",
        total_tokens="sglang:max_total_num_tokens",
    ),
    "trtllm-serve": MetricNames(
        running="trtllm_num_requests_running",
        waiting="trtllm_num_requests_waiting",
        usage=("trtllm_kv_cache_utilization",),
        used_blocks="trtllm_kv_cache_used_blocks",
        total_blocks="trtllm_kv_cache_max_blocks",
    ),
}


class CacheConfig(msgspec.Struct, frozen=True):
    """vLLM's `cache_config_info`; 0 for missing labels. `engines` is the number of data-parallel ranks."""

    block_size: int = 0
    num_gpu_blocks: int = 0
    engines: int = 0


def read_loads(
    kind: EngineKind,
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
    names = NAMES[kind]
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


def reads_asleep(kind: EngineKind, samples: Iterable[Sample]) -> bool:
    """Return whether the samples say that the engine sleeps: it computes nothing until it is woken.

    Source: vllm-project/vllm, `vllm/v1/metrics/loggers.py` (`vllm:engine_sleep_state`, 1 while `awake`).
    """
    states = [sample for sample in samples if sample.name == NAMES[kind].sleep_state]
    awake = [sample.value for sample in states if sample.labels.get("sleep_state") == "awake"]
    return bool(awake) and not any(awake)


def read_cache_config(samples: Iterable[Sample]) -> CacheConfig:
    """Return the cache configuration of the first of vLLM's engines."""
    name = NAMES["vllm"].cache_config
    by_engine = {sample.labels.get("engine", ""): sample.labels for sample in samples if sample.name == name}
    first = min(by_engine.items(), key=lambda each: (len(each[0]), each[0]), default=("", {}))[1]
    return CacheConfig(_label_count(first, "block_size"), _label_count(first, "num_gpu_blocks"), len(by_engine))


def _by_rank(names: MetricNames, samples: Iterable[Sample], dp_ranks: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Return the largest value of each name, by rank."""
    found: dict[int, dict[str, float]] = {}
    for name, labels, reported in samples:
        if name not in names.all:
            continue
        value = float(_label_count(labels, "num_gpu_blocks")) if name == names.cache_config else reported
        if 0 <= value <= _COUNT_MAX:
            values = found.setdefault(_rank(labels.get(names.rank_label, "")), {})
            values[name] = max(value, values.get(name, 0.0))
    if len(dp_ranks) == 1 and len(found) == 1:
        return dict(zip(dp_ranks, found.values(), strict=True))
    return {dp_rank: values for dp_rank, values in found.items() if dp_rank in dp_ranks}


def _rank(label: str) -> int:
    """Return the rank in a label: 0 without a label, -1 if it is not a rank."""
    if not label:
        return 0
    return int(label) if label.isascii() and label.isdecimal() and len(label) <= len(str(DP_RANK_MAX)) else -1


def _total_blocks(names: MetricNames, values: Mapping[str, float], block_size: int) -> int:
    for name in (names.total_blocks, names.cache_config):
        if name in values:
            return int(values[name])
    return int(values.get(names.total_tokens, 0.0)) // block_size


def _used_blocks(names: MetricNames, values: Mapping[str, float], block_size: int, total: int) -> int:
    if names.used_blocks in values:
        return int(values[names.used_blocks])
    if names.used_tokens in values:
        return -(-int(values[names.used_tokens]) // block_size)
    ratio = next((values[name] for name in names.usage if name in values), 0.0)
    return round(min(ratio, 1.0) * total)


def _label_count(labels: Mapping[str, str], name: str) -> int:
    """Return the number in a label; 0 if it is `None` or not a number."""
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < len(str(1 << 53)) else 0
