"""vLLM's OpenAI server, `vllm serve`.

Source: vllm-project/vllm, in `vllm/`: `entrypoints/openai/protocol.py` at ec3b890c14b0, `v1/metrics/loggers.py` at
005a810bc40f, `entrypoints/openai/engine/serving.py` (`_get_data_parallel_rank`), `config/kv_events.py`
(`KVEventsConfig`); in the wheel 0.33.0 `entrypoints/serve/instrumentator/basic.py` (`/kv_event_sources`),
`distributed/kv_events.py`.
"""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from kv_protocol.ids import BLOCK_SIZE_MAX, DP_RANK_MAX
from worker_agent.engines.servers.base import (
    KV_BLOCKS_MAX,
    NO_EVENTS_ENDPOINT,
    EngineFacts,
    EngineServer,
    Info,
    MetricNames,
    Sample,
    decoded,
    facts_of_version,
    label_count,
    samples_in,
    within,
)

_CACHE_CONFIG = "vllm:cache_config_info"
_SLEEP_STATE = "vllm:engine_sleep_state"


class _Source(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


def facts_of_event_sources(body: bytes) -> EngineFacts:
    """Return the event addresses that vLLM 0.33 states, in the order of ranks, with real ports if 0 was configured.

    Raises:
        MalformedMessage: the body has another form.
    """
    sources = [source for _, source in sorted(decoded(dict[int, _Source], body, "/kv_event_sources").items())]
    return EngineFacts(
        publish_endpoint=",".join(each.endpoint for each in sources) or NO_EVENTS_ENDPOINT,
        replay_endpoint=",".join(each.replay_endpoint or "" for each in sources).strip(","),
    )


def facts_of_metrics(body: bytes) -> EngineFacts:
    """Return the facts in `cache_config_info`, which has a sample for each rank; sizes are the first rank's."""
    labels_of = {each.labels.get("engine", ""): each.labels for each in samples_in(body, [_CACHE_CONFIG])}
    first = min(labels_of.items(), key=lambda each: (len(each[0]), each[0]), default=("", {}))[1]
    return EngineFacts(
        block_size=within(label_count(first, "block_size"), BLOCK_SIZE_MAX),
        total_kv_blocks=within(label_count(first, "num_gpu_blocks"), KV_BLOCKS_MAX),
        dp_ranks=within(len(labels_of), DP_RANK_MAX),
    )


class Vllm(EngineServer):
    """vLLM. Start it with `--enable-prefix-caching`. `"replay_endpoint": "tcp://*:5558"` in the event flag fills gaps.

    Its streams carry token ids, so that another worker can continue them; before 0.10.2 it ignores the request for ids.
    Since 0.33 it states its event addresses (`/kv_event_sources`), whatever ports they have. Before, they are assumed.
    `root` of its models is the directory. While it sleeps (`vllm:engine_sleep_state`) it is not in the fleet.
    """

    name: ClassVar = "vllm"
    owned_by: ClassVar = "vllm"
    states_directory: ClassVar = True
    event_source: ClassVar = "vllm"
    event_flag: ClassVar = (
        """--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'"""
    )
    block_size: ClassVar = 16
    metrics: ClassVar = MetricNames(
        prefix="vllm:",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # the latter before 0.9
        rank_label="engine",
        total_blocks=_CACHE_CONFIG,
        total_blocks_label="num_gpu_blocks",
        others=(_SLEEP_STATE,),
    )
    rank_header: ClassVar = "X-data-parallel-rank"
    stream_format: ClassVar = "vllm"
    info: ClassVar = (
        Info(facts_of_metrics),
        Info(facts_of_version, ("/version",)),
        Info(facts_of_event_sources, ("/kv_event_sources",)),
    )

    def is_asleep(self, samples: Iterable[Sample]) -> bool:
        """Return whether its metrics say of each rank that it is not awake."""
        states = [each for each in samples if each.name == _SLEEP_STATE]
        awake = [each.value for each in states if each.labels.get("sleep_state") == "awake"]
        return bool(awake) and not any(awake)
