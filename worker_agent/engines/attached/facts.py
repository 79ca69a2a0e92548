"""Parses an engine's facts from its HTTP answers; missing facts are empty or 0.

    path                     engine          facts
    ----------------------   -------------   ------------------------------------------------------------------------
    /v1/models               all             kind: `owned_by`; names: cards without a `parent`; adapters: those with
                                             one; `max_model_len` (vLLM, SGLang); the model's directory: `root` (vLLM)
    /openapi.json            all             endpoints, by their paths; a server may be configured to hide it
    /version                 vLLM, TRT-LLM   version
    /metrics                 vLLM            `cache_config_info`: block size, KV blocks (`load/engine_metrics.py`); a
                                             data-parallel rank for each `engine`
    /server_info, before     SGLang          page size, KV tokens, requests decoded together, tokens of a prefill chunk,
    that /get_server_info                    context length, data-parallel ranks, version, directory, event sockets
    /metrics                 trtllm-serve    iteration statistics: block size, KV blocks, batch size, tokens

A number beyond a registration's range counts as missing. Sizes are per rank.

Source: vLLM `vllm/entrypoints/openai/protocol.py`, SGLang `python/sglang/srt/entrypoints/http_server.py`, TensorRT-LLM
`tensorrt_llm/serve/openai_server.py`; revisions in `docs/ATTACH.md`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kv_protocol.errors import UNDECODABLE, MalformedMessage
from kv_protocol.ids import BLOCK_SIZE_MAX, DP_RANK_MAX
from kv_protocol.openai.endpoints import PATHS, stated_paths
from worker_agent.load.engine_metrics import CacheConfig, EngineKind

T = TypeVar("T")

NO_EVENTS_ENDPOINT = "none"
"""Stands for the address of the event sockets of an engine that has none."""

_BLOCKS_MAX = 100_000_000
_SEQS_MAX = 65_536
_TOKENS_MAX = 1 << 22

_PATH_CHARACTERS_MAX = 4096
_KINDS: Mapping[str, EngineKind] = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm-serve"}
"""By `owned_by` of a model's card."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts. `dp_ranks` is the number of ranks; `directory` is as the engine was given it: a path, or a hub's name.

    `publish_endpoint` is the event socket of rank 0 as the engine binds it, `NO_EVENTS_ENDPOINT` where it has none.
    """

    kind: EngineKind | Literal[""] = ""
    directory: str = ""
    publish_endpoint: str = ""
    replay_endpoint: str = ""
    served_names: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    block_size: int = 0
    total_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_seq_len: int = 0
    dp_ranks: int = 0
    version: str = ""
    api_endpoints: tuple[str, ...] = ()

    def with_more(self, other: "EngineFacts") -> "EngineFacts":
        """Return both combined; if both have a fact, this one's counts."""
        mine = {name: value for name, value in msgspec.structs.asdict(self).items() if value}
        return msgspec.structs.replace(other, **mine)


class _Card(msgspec.Struct):
    id: _Name
    owned_by: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    root: Annotated[str, msgspec.Meta(max_length=_PATH_CHARACTERS_MAX)] | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: Annotated[list[_Card], msgspec.Meta(max_length=1024)]


class _Version(msgspec.Struct):
    version: Annotated[str, msgspec.Meta(max_length=256)]


class _OpenApi(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


class _ServerInfo(msgspec.Struct):
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    context_length: int | None = None
    dp_size: int | None = None
    version: Annotated[str, msgspec.Meta(max_length=256)] = ""
    tokenizer_path: Annotated[str, msgspec.Meta(max_length=_PATH_CHARACTERS_MAX)] | None = None
    kv_events_config: str | msgspec.UnsetType | None = msgspec.UNSET


class _KvEvents(msgspec.Struct):
    """SGLang's `KVEventsConfig`. Source: `python/sglang/srt/disaggregation/kv_events.py`."""

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None


_models = msgspec.json.Decoder(_Models)
_version = msgspec.json.Decoder(_Version)
_openapi = msgspec.json.Decoder(_OpenApi)
_server_info = msgspec.json.Decoder(_ServerInfo)
_kv_events = msgspec.json.Decoder(_KvEvents)
_rows = msgspec.json.Decoder(list[dict[str, Any]])


def facts_of_models(body: bytes) -> EngineFacts:
    """Return the facts of `GET /v1/models`; raise `MalformedMessage`, which names the field, for an invalid body."""
    cards = _decoded(_models, body, "/v1/models").data
    models = [card for card in cards if card.parent is None]
    lengths = [_within(card.max_model_len, _TOKENS_MAX) for card in models]
    kinds = [_KINDS[card.owned_by] for card in models if card.owned_by and card.owned_by in _KINDS]
    return EngineFacts(
        kind=kinds[0] if kinds else "",
        directory=next((card.root for card in models if card.root and card.owned_by == "vllm"), ""),
        served_names=tuple(card.id for card in models),
        loras=tuple(card.id for card in cards if card.parent is not None),
        max_seq_len=max(lengths, default=0),
    )


def facts_of_version(body: bytes) -> EngineFacts:
    """Return the facts of `GET /version`, likewise."""
    return EngineFacts(version=_decoded(_version, body, "/version").version)


def facts_of_openapi(body: bytes) -> EngineFacts:
    """Return the facts of `GET /openapi.json`; the engine may still refuse an endpoint that its model lacks."""
    paths = _decoded(_openapi, body, "/openapi.json").paths
    return EngineFacts(api_endpoints=(*(name for name, path in PATHS.items() if path in paths), *stated_paths(paths)))


def facts_of_server_info(body: bytes) -> EngineFacts:
    """Return the facts of SGLang's `GET /server_info`, likewise."""
    info = _decoded(_server_info, body, "/server_info")
    page = _within(info.page_size, BLOCK_SIZE_MAX)
    publish_endpoint, replay_endpoint = _event_sockets(info.kv_events_config)
    return EngineFacts(
        directory=info.tokenizer_path or "",
        publish_endpoint=publish_endpoint,
        replay_endpoint=replay_endpoint,
        block_size=page,
        total_kv_blocks=_within((info.max_total_num_tokens or 0) // page, _BLOCKS_MAX) if page else 0,
        max_num_seqs=_within(info.max_running_requests, _SEQS_MAX),
        max_num_batched_tokens=_within(info.chunked_prefill_size, _TOKENS_MAX)
        or _within(info.max_prefill_tokens, _TOKENS_MAX),
        max_seq_len=_within(info.context_length, _TOKENS_MAX),
        dp_ranks=_within(info.dp_size, DP_RANK_MAX),
        version=info.version,
    )


def _event_sockets(config: str | msgspec.UnsetType | None) -> tuple[str, str]:
    """Return the addresses in SGLang's `kv_events_config`; empty where the engine does not say."""
    if config is msgspec.UNSET:
        return "", ""
    stated = _decoded(_kv_events, config.encode(), "/server_info: kv_events_config") if config else _KvEvents()
    return (stated.endpoint, stated.replay_endpoint or "") if stated.publisher == "zmq" else (NO_EVENTS_ENDPOINT, "")


def facts_of_cache_config(config: CacheConfig) -> EngineFacts:
    """Return the facts of vLLM's `cache_config_info`."""
    return EngineFacts(
        block_size=_within(config.block_size, BLOCK_SIZE_MAX),
        total_kv_blocks=_within(config.num_gpu_blocks, _BLOCKS_MAX),
        dp_ranks=_within(config.engines, DP_RANK_MAX),
    )


def iteration_rows(body: bytes) -> list[dict[str, Any]]:
    """Return the rows of iteration statistics in `body`, a JSON list of objects; raise `MalformedMessage`."""
    return _decoded(_rows, body, "/metrics")


def facts_of_iteration_stats(row: Mapping[str, Any]) -> EngineFacts:
    """Return the facts in one row of TensorRT-LLM's iteration statistics. Source: `docs/SOURCES.md` E1.7."""
    cache = row.get("kvCacheStats")
    fields = cache if isinstance(cache, dict) else {}
    return EngineFacts(
        block_size=_within(fields.get("tokensPerBlock"), BLOCK_SIZE_MAX),
        total_kv_blocks=_within(fields.get("maxNumBlocks"), _BLOCKS_MAX),
        max_num_seqs=_within(row.get("maxBatchSizeStatic"), _SEQS_MAX),
        max_num_batched_tokens=_within(row.get("maxNumTokensStatic"), _TOKENS_MAX),
    )


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes, path: str) -> T:
    try:
        return decoder.decode(body)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"{path}: {error}") from error


def _within(value: object, greatest: int) -> int:
    """Return a count; 0 if it is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= greatest else 0
