"""What one worker hands to the next so that it need not compute again: `disaggregated_params` as JSON.

    encode  -> prefill   handles of the media's embeddings, and a hash of eight ints for each
    prefill -> decode    the first token, and where its KV lies, in words that only the engine understands

    key                            JSON                       the engine has
    encoded_opaque_state           base64                     opaque_state: bytes
    first_gen_log_probs            [[{token_id, logprob,      for each of the first tokens a map of token id to
                                      rank}, ..]], or [-0.5]; (logprob, rank), or the token's own alone
                                   -9999 in place of -inf
    schedule_style                 its number                 an enumeration
    first_gen_logits,              read, and dropped          tensors, which are not handed over; what a server of the
    return_prompt_token_ids_b64,                              engine's own tells its orchestrator
    resolved_thinking,
    conversation_id
    all others                     as they are

These are the keys of trtllm-serve's OpenAI bodies, in requests and in the choice of an answer: a worker of either kind
can go on where the other stopped. Those of media it does not have yet, and refuses.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/disaggregated_params.py` and `tensorrt_llm/serve/openai_protocol.py` (class
`DisaggregatedParams`, `to_disaggregated_params`, `to_llm_disaggregated_params`); `dynamo_reference.md` section 4.2;
ids: `tensorrt_llm/llmapi/disagg_utils.py`, `get_global_disagg_request_id`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai_errors import explained
from kv_protocol.openai_parts import ABSENT, OptionalPart
from worker_agent.core.sampling import LOGPROBS_MAX, TokenLogprob, bounded_logprob

STATE_BYTES_MAX = 1 << 20
FIRST_TOKENS_MAX = 128
HASH_WORDS = 8
_TIME_BITS, _NODE_BITS, _PROCESS_BITS, _COUNTER_BITS = 39, 8, 6, 10
NODES_MAX, PROCESSES_MAX = 1 << _NODE_BITS, 1 << _PROCESS_BITS

_Tokens = Annotated[tuple[int, ...], msgspec.Meta(max_length=FIRST_TOKENS_MAX)]
_Words = Annotated[tuple[int, ...], msgspec.Meta(min_length=HASH_WORDS, max_length=HASH_WORDS)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Place = Annotated[tuple[TokenLogprob, ...], msgspec.Meta(max_length=LOGPROBS_MAX + 1)]
_Places = Annotated[tuple[_Place | float, ...], msgspec.Meta(max_length=FIRST_TOKENS_MAX)]
_FIELD = "disaggregated_params"


class Handoff(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    rename={"opaque_state": "encoded_opaque_state"},
):
    """What a worker says for the next one. What is None was not said."""

    request_type: str | None = None
    first_gen_tokens: _Tokens | None = None
    first_gen_log_probs: _Places | None = None
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


class _Wire(Handoff, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same with what is read and dropped."""

    first_gen_logits: msgspec.Raw = ABSENT
    return_prompt_token_ids_b64: bool | None = None
    resolved_thinking: bool | None = None
    conversation_id: str | None = None


class HandoffInvalid(Exception):
    """What stands in a request as handed over is not; the message names the field, what was found, what is allowed."""


_COPIED = tuple(name for name in Handoff.__struct_fields__ if name != "first_gen_log_probs")
_MEDIA = tuple(name for name in _COPIED if name.startswith(("multimodal_", "mrope_")))
_decoder = msgspec.json.Decoder(_Wire)
_part = OptionalPart[_Wire](_Wire)


def handoff_json(handoff: Handoff) -> bytes:
    """Return the JSON object; bytes in it as base64."""
    return msgspec.json.encode(handoff)


def handoff_of_json(data: bytes | msgspec.Raw) -> Handoff:
    """Return what the JSON object says.

    Raises:
        HandoffInvalid: it says something else, or names a key that is not known.
    """
    try:
        return _without_dropped(_decoder.decode(data))
    except UNDECODABLE as error:
        raise HandoffInvalid(str(explained(error, msgspec.Raw(data), _FIELD))) from error


def handoff_of_request(part: msgspec.Raw) -> Handoff | None:
    """Return what a request's `disaggregated_params` say, None where it has none; raise `RequestInvalid`."""
    wire = _part.read(part, _FIELD)
    return None if wire is None else _without_dropped(wire)


def without_media(handoff: Handoff) -> Handoff:
    """Return what is left to say once the prompt has been computed."""
    return msgspec.structs.replace(handoff, **dict.fromkeys(_MEDIA))


def handoff_of(params: object) -> Handoff:
    """Return what the engine's own `DisaggregatedParams` says.

    Raises:
        HandoffInvalid: it says what cannot be handed over.
    """
    said: dict[str, Any] = {name: getattr(params, name, None) for name in _COPIED}
    style = said.pop("schedule_style")
    logprobs = getattr(params, "first_gen_log_probs", None)
    if logprobs is not None:
        logprobs = [_listed(place) for place in logprobs]
    said |= {"first_gen_log_probs": logprobs, "schedule_style": None if style is None else int(style)}
    said["encoded_opaque_state"] = said.pop("opaque_state")
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
        places = handoff.first_gen_log_probs
        told["first_gen_log_probs"] = [
            place if isinstance(place, float) else {each.token_id: each for each in place} for place in places
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


def _without_dropped(wire: _Wire) -> Handoff:
    return Handoff(**{name: getattr(wire, name) for name in Handoff.__struct_fields__})


def _listed(place: Mapping[int, Any] | float) -> list[dict[str, Any]] | float:
    if isinstance(place, Mapping):
        return [
            {"token_id": token, "logprob": bounded_logprob(each.logprob), "rank": each.rank}
            for token, each in place.items()
        ]
    return bounded_logprob(float(place))


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever the field holds
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
