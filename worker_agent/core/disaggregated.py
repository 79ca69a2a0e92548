"""What one worker hands to the next so that it need not compute again: `disaggregated_params` as JSON.

    encode  -> prefill   handles of the media's embeddings, and a hash of eight ints for each
    prefill -> decode    the first token, and where its KV lies, in words that only the engine understands

    key                            JSON                       the engine has
    opaque_state                   base64                     bytes
    first_gen_log_probs            [[[{token_id, logprob,     for each sequence, for each of its first tokens, a map
                                      rank}, ..]]]            of token id to (logprob, rank)
    schedule_style                 its number                 an enumeration
    all others                     as they are

First-token logits are tensors, and are not handed over. Names are the engine's own. Source: NVIDIA/TensorRT-LLM,
`tensorrt_llm/disaggregated_params.py`; `dynamo_reference.md` section 4.2; ids: `tensorrt_llm/llmapi/disagg_utils.py`,
`get_global_disagg_request_id`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from kv_protocol.errors import UNDECODABLE
from worker_agent.core.sampling import TokenLogprob

STATE_BYTES_MAX = 1 << 20
FIRST_TOKENS_MAX = 128
HASH_WORDS = 8
_TIME_BITS, _NODE_BITS, _PROCESS_BITS, _COUNTER_BITS = 39, 8, 6, 10
NODES_MAX, PROCESSES_MAX = 1 << _NODE_BITS, 1 << _PROCESS_BITS

_Tokens = Annotated[tuple[int, ...], msgspec.Meta(max_length=FIRST_TOKENS_MAX)]
_Words = Annotated[tuple[int, ...], msgspec.Meta(min_length=HASH_WORDS, max_length=HASH_WORDS)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Handoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a worker says for the next one. What is None was not said."""

    request_type: str | None = None
    first_gen_tokens: _Tokens | None = None
    first_gen_log_probs: tuple[tuple[tuple[TokenLogprob, ...], ...], ...] | None = None
    ctx_request_id: _Id | None = None
    opaque_state: Annotated[bytes, msgspec.Meta(max_length=STATE_BYTES_MAX)] | None = None
    draft_tokens: _Tokens | None = None
    disagg_request_id: _Id | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: dict[str, Any] | None = None
    multimodal_embedding_handles: tuple[dict[str, Any], ...] | None = None
    multimodal_hashes: tuple[_Words, ...] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None


class HandoffInvalid(Exception):
    """What stands in a request as handed over is not; the message names the field, what was found, what is allowed."""


_COPIED = tuple(name for name in Handoff.__struct_fields__ if name != "first_gen_log_probs")
_MEDIA = tuple(name for name in _COPIED if name.startswith(("multimodal_", "mrope_")))
_decoder = msgspec.json.Decoder(Handoff)


def handoff_json(handoff: Handoff) -> bytes:
    """Return the JSON object; bytes in it as base64."""
    return msgspec.json.encode(handoff)


def handoff_of_json(data: bytes | msgspec.Raw) -> Handoff:
    """Return what the JSON object says.

    Raises:
        HandoffInvalid: it says something else, or names a key that is not known.
    """
    try:
        return _decoder.decode(data)
    except UNDECODABLE as error:
        raise HandoffInvalid(f"disaggregated_params: {error}") from error


def handoff_of(params: object) -> Handoff:
    """Return what the engine's own `DisaggregatedParams` says.

    Raises:
        HandoffInvalid: it says what cannot be handed over.
    """
    said: dict[str, Any] = {name: getattr(params, name, None) for name in _COPIED}
    style = said.pop("schedule_style")
    logprobs = getattr(params, "first_gen_log_probs", None)
    if logprobs is not None:
        logprobs = [[_listed(place) for place in sequence] for sequence in logprobs]
    said |= {"first_gen_log_probs": logprobs, "schedule_style": None if style is None else int(style)}
    try:
        return msgspec.convert(said, Handoff, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise HandoffInvalid(f"disaggregated_params of the engine: {error}") from error


def params_of(handoff: Handoff, request_type: str, *, with_media: bool) -> dict[str, Any]:
    """Return the keywords of the engine's `DisaggregatedParams` that say the same to a request of `request_type`.

    Without media handles where the worker computes no prompt: there the engine refuses them. `first_gen_log_probs` and
    `schedule_style` stay data: the shell knows the engine's classes.
    """
    left_out = () if with_media else _MEDIA
    said = {name: getattr(handoff, name) for name in _COPIED if name not in left_out}
    told = {name: _plain(value) for name, value in said.items() if value is not None}
    if handoff.first_gen_log_probs is not None:
        told["first_gen_log_probs"] = [
            [{each.token_id: each for each in place} for place in sequence] for sequence in handoff.first_gen_log_probs
        ]
    return {**told, "request_type": request_type}


class TransferIds:
    """Ids of transfers that no two workers of a fleet give: 39 bits of milliseconds, 8 node, 6 process, 10 counter.

    The engine's own layout. `now_ms` may stand still or go back; the counter keeps 1024 ids in a millisecond apart.
    """

    def __init__(self, node: int, process: int = 0) -> None:
        if not (0 <= node < NODES_MAX and 0 <= process < PROCESSES_MAX):
            allowed = f"0..{NODES_MAX - 1} and 0..{PROCESSES_MAX - 1}"
            raise ValueError(f"transfer ids: found node {node}, process {process}, allowed {allowed}")
        self._place = (node << _PROCESS_BITS | process) << _COUNTER_BITS
        self._count = 0

    def next(self, now_ms: int) -> int:
        """Return an id; positive, 63 bits."""
        self._count = (self._count + 1) % (1 << _COUNTER_BITS)
        time = now_ms % (1 << _TIME_BITS)
        return time << (_NODE_BITS + _PROCESS_BITS + _COUNTER_BITS) | self._place | self._count


def _listed(place: Mapping[int, Any] | Sequence[Any]) -> list[dict[str, Any]]:
    if isinstance(place, Mapping):
        return [{"token_id": token, "logprob": each.logprob, "rank": each.rank} for token, each in place.items()]
    return [{"token_id": each.token_id, "logprob": each.logprob, "rank": each.rank} for each in place]


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever the field holds
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
