"""Fleet messages: registration, draining, leaving, and heartbeats. JSON on the wire, so that people can read it.

`KV_FLEET` has each worker's newest fleet event. After five missed heartbeats a worker is gone, whatever that event is.
Source: `docs/WIRE.md`.
"""

import re
from collections.abc import Callable
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from kv_protocol.digest import TierDigest
from kv_protocol.errors import LimitExceeded, decoder_of
from kv_protocol.ids import WorkerRank, checked_block_size, checked_dp_rank, checked_u64, checked_worker_id
from kv_protocol.images import ImageRule
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS, check_stated
from kv_protocol.splitmix import U64_MASK

HEARTBEAT_PERIOD_S = 1.0
MISSED_HEARTBEATS_MAX = 5
REMOVED_BY_HAND = "removed by hand"
"""The reason in `left` when an operator removes a worker: its agent does not register that instance again."""

NO_EVENTS = "no events"
"""A heartbeat's `stale` begins with it where the engine publishes no KV events, or its publisher was never reached."""

Role = Literal["aggregated", "prefill", "decode", "encode"]

INSTANCE_CHARACTERS_MAX = 128
NAME_CHARACTERS_MAX = 256
"""For a model, a served name, an adapter and a taint."""
BLOCKS_MAX = 1 << 27
"""Blocks of one rank: as many as an index allocates when ranks join. A block may be a single token."""
TOKENS_MAX = (1 << 32) - 1
_TEXT_CHARACTERS_MAX = 256
_URL_CHARACTERS_MAX = 2048
_REASON_CHARACTERS_MAX = 4096
_NAMES_MAX = {"served_names": 256, "loras": 4096, "taints": 64}
_TEXTS = (
    *("event_source", "hash_scheme", "tokenizer_digest", "template_digest", "transfer_domain", "version", "endpoint"),
    *("kv_cache_dtype", "transfer_backend", "stream_token_ids"),
)
_CHARACTERS = {
    "instance": (1, INSTANCE_CHARACTERS_MAX),
    "model": (1, NAME_CHARACTERS_MAX),
    "base_url": (1, _URL_CHARACTERS_MAX),
    **dict.fromkeys(_TEXTS, (0, _TEXT_CHARACTERS_MAX)),
}
_TOKENS = "max_num_seqs", "max_num_batched_tokens", "max_seq_len", "max_prompt_tokens", "transfer_buffer_tokens"
_COUNTS_MAX = {"canary": U64_MASK, "total_kv_blocks": BLOCKS_MAX, **dict.fromkeys(_TOKENS, TOKENS_MAX)}
_URL_CHARACTERS = re.compile(r"[^\s\x00-\x1f\x7f?#@\\]+")
"""Without characters that begin a user, a query or a fragment, and those that `urlsplit` drops silently."""


def _is_base_url(value: str) -> bool:
    try:
        url = urlsplit(value)
        named = bool(url.hostname) and url.port != 0
    except ValueError:  # brackets around no address, a port beyond 65535
        return False
    return url.scheme in ("http", "https") and named and _URL_CHARACTERS.fullmatch(value) is not None


def checked_instance(value: str) -> str:
    """Return `value`, 1..INSTANCE_CHARACTERS_MAX characters; raise `LimitExceeded` otherwise."""
    _check_characters("instance", value, 1, INSTANCE_CHARACTERS_MAX)
    return value


def _check_characters(field: str, value: str, least: int, most: int) -> None:
    if not least <= len(value) <= most:
        raise LimitExceeded(field, value, f"{least}..{most} characters")


def _check_names(registration: "WorkerRegistered") -> None:
    if not registration.served_names:
        raise LimitExceeded("served_names", registration.served_names, "at least one name")
    for field, most in _NAMES_MAX.items():
        names: tuple[str, ...] = getattr(registration, field)
        if len(names) > most:
            raise LimitExceeded(field, f"{len(names)} names", f"{most} at most")
        for at, name in enumerate(names):
            _check_characters(f"{field}[{at}]", name, 1, NAME_CHARACTERS_MAX)
    for at, taint in enumerate(registration.taints):
        if "," in taint or taint != taint.strip():
            raise LimitExceeded(
                f"taints[{at}]", taint, "no comma, no space at its ends: requests name taints by commas"
            )


class WorkerRegistered(msgspec.Struct, frozen=True, tag="registered", kw_only=True, forbid_unknown_fields=False):
    """A worker registers. A new `instance` replaces the worker's former instance and all state of it.

    `endpoint` is its name as `namespace.component.endpoint`, which separates pools; empty: none. `images` is the rule
    for images in its prompts; None: it takes none, or they cannot be computed elsewhere.

    Prefill and decode workers have to agree in these, and prefix routing needs them: `kv_cache_dtype` (fp8, bfloat16;
    empty: not reported), `block_reuse`, whether the engine reuses blocks (None: not reported),
    `transfer_buffer_tokens`, the capacity of its buffer for KV transfers (0: none, or not reported), and
    `transfer_backend` (NIXL, UCX; empty: not reported).

    `api_endpoints` names the OpenAI endpoints that it serves (`openai/endpoints.py`). Unknown names are ignored.

    `max_prompt_tokens` bounds the prompts that the worker computes itself, where that is less than `max_seq_len` - 1:
    an engine without chunked prefill takes a prompt in one iteration, or not at all. 0: no such bound.

    `stream_token_ids` names the engine in whose words an attached engine tells the token ids of a stream, and continues
    behind such ids (`kv_protocol/continuation.py`): `vllm`. Empty: it does neither, or an agent answers.

    `event_source` is whose KV events the worker's are: `trtllm`, `simulated`, another engine's name, or `none`.
    `event_flag` is the flag with which its engine publishes events, for people; unset: none is known.
    """

    worker_id: str
    instance: str
    model: str
    served_names: tuple[str, ...]
    base_url: str
    block_size: int
    hash_scheme: str
    tokenizer_digest: str
    template_digest: str
    canary: int
    dp_ranks: tuple[int, ...] = (0,)
    role: Role = "aggregated"
    total_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_seq_len: int = 0
    max_prompt_tokens: int = 0
    loras: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()
    transfer_domain: str = ""
    event_source: str = "trtllm"
    accepts_token_ids: bool = False
    version: str = ""
    endpoint: str = ""
    images: ImageRule | None = None
    kv_cache_dtype: str = ""
    block_reuse: bool | None = None
    transfer_buffer_tokens: int = 0
    transfer_backend: str = ""
    api_endpoints: tuple[str, ...] = DEFAULT_ENDPOINTS
    stream_token_ids: str = ""
    event_flag: Annotated[str, msgspec.Meta(max_length=_TEXT_CHARACTERS_MAX)] | msgspec.UnsetType = msgspec.UNSET
    ends_drain: bool = False
    """Set by a router that publishes the registration again: a worker that was drained by hand takes new work. Without
    it the registration of a known instance leaves the drain as it is."""
    drained: bool = False
    """Set by an agent that registers again while an operator drains this instance: the log then has no `draining`
    event any more, and later readers take the worker for drained by hand."""

    def __post_init__(self) -> None:
        checked_worker_id(self.worker_id)
        checked_block_size(self.block_size)
        check_stated(self.api_endpoints)
        for dp_rank in self.dp_ranks:
            checked_dp_rank(dp_rank)
        if not self.dp_ranks or len(set(self.dp_ranks)) != len(self.dp_ranks):
            raise LimitExceeded("dp_ranks", self.dp_ranks, "at least one rank, each once")
        for field, (least, most) in _CHARACTERS.items():
            _check_characters(field, getattr(self, field), least, most)
        _check_names(self)
        for field, most in _COUNTS_MAX.items():
            if not 0 <= getattr(self, field) <= most:
                raise LimitExceeded(field, getattr(self, field), f"0..{most}")
        if not _is_base_url(self.base_url):
            raise LimitExceeded("base_url", self.base_url, "http(s)://host:port without user, query or fragment")

    @property
    def ranks(self) -> tuple[WorkerRank, ...]:
        """The worker ranks of this registration."""
        return tuple(WorkerRank(self.worker_id, dp_rank) for dp_rank in self.dp_ranks)


class WorkerDraining(msgspec.Struct, frozen=True, tag="draining", kw_only=True, omit_defaults=True):
    """The worker finishes its running requests and takes no new ones.

    `by_hand`: an operator drains it and may end the drain; else its agent stops.
    """

    worker_id: str
    instance: str
    by_hand: bool = False

    def __post_init__(self) -> None:
        checked_worker_id(self.worker_id)
        checked_instance(self.instance)


class WorkerLeft(msgspec.Struct, frozen=True, tag="left", kw_only=True):
    """The worker is gone, and its blocks with it."""

    worker_id: str
    instance: str
    reason: str = ""

    def __post_init__(self) -> None:
        checked_worker_id(self.worker_id)
        checked_instance(self.instance)
        _check_characters("reason", self.reason, 0, _REASON_CHARACTERS_MAX)


FleetEvent = WorkerRegistered | WorkerDraining | WorkerLeft


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's heartbeat: the consolidator's stream position, and the digests of the rank's blocks there.

    `stale` is empty, or the reason why the consolidator does not trust its own set.
    """

    instance: str
    epoch: int
    last_seq: int
    tiers: tuple[TierDigest, ...] = ()
    stale: str = ""

    def __post_init__(self) -> None:
        checked_instance(self.instance)
        _check_characters("stale", self.stale, 0, _REASON_CHARACTERS_MAX)
        checked_u64("epoch", self.epoch)
        checked_u64("last_seq", self.last_seq)


encode: Callable[[FleetEvent | Heartbeat], bytes] = msgspec.json.Encoder().encode
_fleet_decoder: msgspec.json.Decoder[FleetEvent] = msgspec.json.Decoder(FleetEvent)
decode_fleet_event = decoder_of("fleet event", _fleet_decoder.decode)
decode_heartbeat = decoder_of("heartbeat", msgspec.json.Decoder(Heartbeat).decode)
