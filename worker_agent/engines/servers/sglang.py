"""SGLang's HTTP server.

Source: sgl-project/sglang, in `python/sglang/srt/`: `entrypoints/http_server.py` at 9c0549b727fe, newer text as quoted
in public repositories; `metrics/collector.py` at 00ae9c1590d2, and metrics that public repositories of users recorded;
`entrypoints/openai/serving_base.py` (`extract_routed_dp_rank_from_header`); `disaggregation/kv_events.py`
(`KVEventsConfig`); in the wheel 0.5.23 `runtime_context.py` (`describe_kv_events_publisher`), `load_publisher.py`.
"""

from typing import Annotated, ClassVar

import msgspec

from kv_protocol.ids import BLOCK_SIZE_MAX, DP_RANK_MAX
from worker_agent.engines.servers.base import (
    KV_BLOCKS_MAX,
    NO_EVENTS_ENDPOINT,
    PATH_CHARACTERS_MAX,
    SEQS_MAX,
    TOKENS_MAX,
    EngineFacts,
    EngineServer,
    Info,
    MetricNames,
    decoded,
    within,
)


class _Described(msgspec.Struct):
    """`kv_events` of 0.5.23: how many ranks both kinds of data parallelism have, and the tokens of an event's block."""

    block_size: int | None = None
    dp_size: int | None = None


class _ServerInfo(msgspec.Struct):
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    context_length: int | None = None
    dp_size: int | None = None
    version: Annotated[str, msgspec.Meta(max_length=256)] = ""
    tokenizer_path: Annotated[str, msgspec.Meta(max_length=PATH_CHARACTERS_MAX)] | None = None
    kv_events_config: str | msgspec.UnsetType | None = msgspec.UNSET
    kv_events: _Described | None = None


class _KvEvents(msgspec.Struct):
    publisher: str = "null"
    endpoint: str = EngineServer.events
    replay_endpoint: str | None = None


def facts_of_server_info(body: bytes) -> EngineFacts:
    """Return the facts of `GET /server_info`, a page being a block; raise `MalformedMessage`."""
    info = decoded(_ServerInfo, body, "/server_info")
    described = info.kv_events or _Described()
    page = within(described.block_size or info.page_size, BLOCK_SIZE_MAX)
    publish_endpoint, replay_endpoint = _event_sockets(info.kv_events_config)
    return EngineFacts(
        directory=info.tokenizer_path or "",
        publish_endpoint=publish_endpoint,
        replay_endpoint=replay_endpoint,
        block_size=page,
        total_kv_blocks=within((info.max_total_num_tokens or 0) // page, KV_BLOCKS_MAX) if page else 0,
        max_num_seqs=within(info.max_running_requests, SEQS_MAX),
        max_num_batched_tokens=within(info.chunked_prefill_size, TOKENS_MAX)
        or within(info.max_prefill_tokens, TOKENS_MAX),
        max_seq_len=within(info.context_length, TOKENS_MAX),
        dp_ranks=within(described.dp_size or info.dp_size, DP_RANK_MAX),
        version=info.version,
    )


def _event_sockets(config: str | msgspec.UnsetType | None) -> tuple[str, str]:
    """Return the addresses in `kv_events_config`; empty if the server does not state it."""
    if config is msgspec.UNSET:
        return "", ""
    stated = decoded(_KvEvents, config.encode(), "/server_info: kv_events_config") if config else _KvEvents()
    return (stated.endpoint, stated.replay_endpoint or "") if stated.publisher == "zmq" else (NO_EVENTS_ENDPOINT, "")


class Sglang(EngineServer):
    """Start it with `--enable-metrics`. `"replay_endpoint": "tcp://*:5558"` in the event flag fills gaps.

    A `--page-size` above 1 keeps events few. `/server_info` states its event addresses, and `tokenizer_path` there the
    model's directory. Without `--enable-metrics`, `/metrics` answers 404. It answers 400 to a streamed chat that asks
    for token ids.
    """

    name: ClassVar = "sglang"
    owned_by: ClassVar = "sglang"
    event_source: ClassVar = "sglang"
    event_flag: ClassVar = """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'"""
    block_size: ClassVar = 1
    metrics: ClassVar = MetricNames(
        prefix="sglang:",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        usage=("sglang:token_usage",),
        rank_label="dp_rank",
        used_tokens="sglang:num_used_tokens",
        total_tokens="sglang:max_total_num_tokens",
    )
    rank_header: ClassVar = "X-data-parallel-rank"
    info: ClassVar = (Info(facts_of_server_info, ("/server_info", "/get_server_info")),)  # the latter when older
