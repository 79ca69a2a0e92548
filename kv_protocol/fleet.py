"""Fleet messages: registration, draining, leaving, and heartbeats. JSON on the wire, so that people can read it.

`KV_FLEET` has each worker's newest fleet event. After five missed heartbeats a worker is gone, whatever its event says.
Source: `docs/WIRE.md`.
"""

import re
from collections.abc import Callable
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from kv_protocol.digest import TierDigest
from kv_protocol.errors import LimitExceeded, decoder_of
from kv_protocol.ids import U64, BlockSize, DpRank, WorkerId, WorkerRank, checked_u64
from kv_protocol.images import ImageRule
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS, check_stated

HEARTBEAT_PERIOD_S = 1.0
MISSED_HEARTBEATS_MAX = 5
REMOVED_BY_HAND = "removed by hand"
"""The reason in `left` when an operator removes a worker: its agent does not register that instance again."""

NO_EVENTS = "no events"
"""A heartbeat's `stale` begins so if the engine publishes no KV events, or its publisher was never reached."""

Role = Literal["aggregated", "prefill", "decode", "encode"]

BLOCKS_MAX = 1 << 27
"""Bound on a rank's blocks: when ranks join, an index reserves memory for no more. A block may be a single token."""
TOKENS_MAX = (1 << 32) - 1

# Decoding refuses values outside of these types. A struct made in this process is checked by `__post_init__` only.
Instance = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""A model's own name, a served name, or an adapter's."""
_Taint = Annotated[str, msgspec.Meta(max_length=256, pattern=r"^[^,\s]([^,]*[^,\s])?\Z")]
"""It has no commas, by which requests separate taints, and no space at its ends."""
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Reason = Annotated[str, msgspec.Meta(max_length=4096)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
_URL_CHARACTERS = re.compile(r"[^\s\x00-\x1f\x7f?#@\\]+")
"""All but characters that begin a user, a query or a fragment, and those that `urlsplit` drops silently."""


def is_base_url(value: str) -> bool:
    """Return whether paths can be added to `value`: the http(s) URL of a server, without user, query and fragment."""
    try:
        url = urlsplit(value)
        named = bool(url.hostname) and url.port != 0
    except ValueError:  # brackets around no address, a port beyond 65535
        return False
    is_plain = value.isascii() and value.isprintable()
    return url.scheme in ("http", "https") and named and is_plain and _URL_CHARACTERS.fullmatch(value) is not None


class WorkerRegistered(msgspec.Struct, frozen=True, tag="registered", kw_only=True, forbid_unknown_fields=False):
    """A worker registers. A new `instance` replaces the worker's former instance and all its state.

    `endpoint` is its name as `namespace.component.endpoint`, which separates pools; empty: none. `images` is the rule
    for images in its prompts; None: it takes none, or only its engine can compute their tokens.

    By these readers judge whether prefill and decode workers fit, and prefix routing works: `kv_cache_dtype` (fp8,
    bfloat16; empty: not reported), `block_reuse`, whether the engine reuses blocks (None: not reported),
    `transfer_buffer_tokens`, the capacity of its buffer for KV transfers (0: none, or not reported), and
    `transfer_backend` (NIXL, UCX; empty: not reported).

    `api_endpoints` names the OpenAI endpoints that it serves (`openai/endpoints.py`). Unknown names are ignored.

    `max_prompt_tokens` bounds the prompts that the worker computes itself, if that is less than `max_seq_len` - 1:
    an engine without chunked prefill takes a prompt in one iteration, or not at all. 0: no such bound.

    `stream_token_ids` is set if an attached engine streams token ids and continues after given ones: it names the
    engine with that API (`kv_protocol/continuation.py`), `vllm`. Empty: the engine does neither, or an agent answers.

    `event_source` names the engine that publishes the worker's KV events: `trtllm`, `simulated`, another engine's name;
    `none`: it publishes none. `event_flag` is the flag that makes the engine publish events, for people; unset: none is
    known.
    """

    worker_id: WorkerId
    instance: Instance
    model: _Name
    served_names: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1, max_length=256)]
    base_url: Annotated[str, msgspec.Meta(max_length=2048)]
    block_size: BlockSize
    hash_scheme: _Text
    tokenizer_digest: _Text
    template_digest: _Text
    canary: int
    dp_ranks: Annotated[tuple[DpRank, ...], msgspec.Meta(min_length=1)] = (0,)
    role: Role = "aggregated"
    total_kv_blocks: Annotated[int, msgspec.Meta(ge=0, le=BLOCKS_MAX)] = 0
    max_num_seqs: _Tokens = 0
    max_num_batched_tokens: _Tokens = 0
    max_seq_len: _Tokens = 0
    max_prompt_tokens: _Tokens = 0
    loras: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=4096)] = ()
    taints: Annotated[tuple[_Taint, ...], msgspec.Meta(max_length=64)] = ()
    transfer_domain: _Text = ""
    event_source: _Text = "trtllm"
    accepts_token_ids: bool = False
    version: _Text = ""
    endpoint: _Text = ""
    images: ImageRule | None = None
    kv_cache_dtype: _Text = ""
    block_reuse: bool | None = None
    transfer_buffer_tokens: _Tokens = 0
    transfer_backend: _Text = ""
    api_endpoints: tuple[str, ...] = DEFAULT_ENDPOINTS
    stream_token_ids: _Text = ""
    event_flag: _Text | msgspec.UnsetType = msgspec.UNSET
    ends_drain: bool = False
    """Set by a router that publishes the registration again: a drain by hand ends, the worker takes new work. Without
    it the registration of a known instance does not change a drain."""
    drained: bool = False
    """Set by an agent that registers again while an operator drains this instance: the log then has no `draining`
    event any more, and later readers take the worker for drained by hand."""

    def __post_init__(self) -> None:
        checked_u64("canary", self.canary)
        check_stated(self.api_endpoints)
        if len(set(self.dp_ranks)) != len(self.dp_ranks):
            raise LimitExceeded("dp_ranks", self.dp_ranks, "each rank once")
        if not is_base_url(self.base_url):
            raise LimitExceeded("base_url", self.base_url, "http(s)://host:port without user, query or fragment")

    @property
    def ranks(self) -> tuple[WorkerRank, ...]:
        """The worker ranks of this registration."""
        return tuple(WorkerRank(self.worker_id, dp_rank) for dp_rank in self.dp_ranks)


class WorkerDraining(msgspec.Struct, frozen=True, tag="draining", kw_only=True, omit_defaults=True):
    """The worker finishes its running requests and takes no new ones.

    `by_hand`: an operator drains it and may end the drain. False: it drains because its agent stops.
    """

    worker_id: WorkerId
    instance: Instance
    by_hand: bool = False


class WorkerLeft(msgspec.Struct, frozen=True, tag="left", kw_only=True):
    """The worker is gone, and its blocks with it."""

    worker_id: WorkerId
    instance: Instance
    reason: _Reason = ""


FleetEvent = WorkerRegistered | WorkerDraining | WorkerLeft


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's heartbeat: the consolidator's stream position, and the digests of the rank's blocks there.

    `stale` is empty, or the reason why the consolidator does not trust its own set.
    """

    instance: Instance
    epoch: U64
    last_seq: U64
    tiers: tuple[TierDigest, ...] = ()
    stale: _Reason = ""

    def __post_init__(self) -> None:
        of_tiers = [max(each.block_count, each.digest) for each in self.tiers]
        checked_u64("epoch, last_seq, tiers", max(self.epoch, self.last_seq, *of_tiers))


encode: Callable[[FleetEvent | Heartbeat], bytes] = msgspec.json.Encoder().encode
_fleet_decoder: msgspec.json.Decoder[FleetEvent] = msgspec.json.Decoder(FleetEvent)
decode_fleet_event = decoder_of("fleet event", _fleet_decoder.decode)
decode_heartbeat = decoder_of("heartbeat", msgspec.json.Decoder(Heartbeat).decode)
