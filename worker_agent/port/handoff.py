"""`disaggregated_params` as JSON: the handoff from one worker to the next, so that nothing is computed twice.

    encode  -> prefill   handles of the media's embeddings, a hash of eight ints for each, and, if the model has
                         mrope, handles of the prompt's positions
    prefill -> decode    the first token, a state that only engines read (where the prompt's KV is), and those positions

    key                            JSON                       in the engine
    encoded_opaque_state           base64                     opaque_state: bytes
    first_gen_log_probs            [[{token_id, logprob,      for each of the first tokens a map of token id to
                                      rank}, ..]], or [-0.5]; (logprob, rank), or only its own logprob
                                   -9999 in place of -inf
    schedule_style                 its number                 an enumeration
    first_gen_logits,              read, and dropped          tensors, which are not handed over; fields between
    return_prompt_token_ids_b64,                              trtllm-serve and its orchestrator
    resolved_thinking,
    conversation_id
    unknown keys                   unchanged: plain JSON      a field of a newer version: passed through, both ways
    all others                     unchanged

These are the keys of trtllm-serve's OpenAI bodies, in requests and in the choice of an answer: our workers and
trtllm-serve can continue each other's requests. trtllm-serve does not have the media keys yet, and refuses them.

Features of further layers (deepstack, Qwen3-VL) have no key: each embedding's row has them after the first layer's.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/disaggregated_params.py` and `tensorrt_llm/serve/openai_protocol.py` (class
`DisaggregatedParams`, `to_disaggregated_params`, `to_llm_disaggregated_params`); `docs/SOURCES.md` D4.2;
positions: `tensorrt_llm/llmapi/llm.py`, `_preprocess` (both handles or none, read in all three phases).
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import msgspec

from kv_protocol.errors import shortened
from kv_protocol.openai.option_table import LOGPROBS_MAX
from kv_protocol.openai.parts import OptionalPart
from kv_protocol.openai.requests import RequestInvalid
from worker_agent.port.sampling import TokenLogprob, bounded_logprob

STATE_BYTES_MAX = 1 << 20
FIRST_TOKENS_MAX = 128
OTHERS_MAX = 32
"""How many unknown keys a handoff may have."""
OTHER_NAME_MAX = 64
HASH_WORDS = 8

_Tokens = Annotated[tuple[int, ...], msgspec.Meta(max_length=FIRST_TOKENS_MAX)]
_Words = Annotated[tuple[int, ...], msgspec.Meta(min_length=HASH_WORDS, max_length=HASH_WORDS)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Alternatives = Annotated[tuple[TokenLogprob, ...], msgspec.Meta(max_length=LOGPROBS_MAX + 1)]
_FirstLogprobs = Annotated[tuple[_Alternatives | float, ...], msgspec.Meta(max_length=FIRST_TOKENS_MAX)]
_FIELD = "disaggregated_params"


class _KnownKeys(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"opaque_state": "encoded_opaque_state"},
):
    """The known keys. A key that is None is absent."""

    request_type: str | None = None
    first_gen_tokens: _Tokens | None = None
    first_gen_log_probs: _FirstLogprobs | None = None
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


class Handoff(_KnownKeys, frozen=True, kw_only=True):
    """The handoff from a worker to the next: the known keys, and in `others` those of a newer engine, as plain JSON."""

    others: dict[str, Any] = {}

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompt's tokens the prefill worker reused, by the usage of its answer; None: not stated."""
        details = (self.ctx_usage or {}).get("prompt_tokens_details")
        found = details.get("cached_tokens") if isinstance(details, dict) else None
        return found if isinstance(found, int) and found >= 0 else None


class HandoffInvalid(Exception):
    """A handoff is invalid; the message names the field, what was found, what is allowed."""


_KNOWN = _KnownKeys.__struct_fields__
_MEDIA_PREFIX = "multimodal_"
_MEDIA = tuple(name for name in _KNOWN if name.startswith(_MEDIA_PREFIX))
_DROPPED = {"first_gen_logits", "return_prompt_token_ids_b64", "resolved_thinking", "conversation_id"}
_KEYS = _DROPPED.union(_KnownKeys.__struct_encode_fields__)
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])
_part = OptionalPart[_KnownKeys](_KnownKeys)


def handoff_json(handoff: Handoff) -> bytes:
    """Return the JSON object; bytes in it as base64."""
    return msgspec.json.encode(handoff_keys(handoff))


def handoff_keys(handoff: Handoff) -> dict[str, Any]:
    """Return the JSON object as a mapping of keys to JSON values."""
    keys: dict[str, Any] = msgspec.to_builtins(handoff)
    others: dict[str, Any] = keys.pop("others", {})
    return keys | others


def read_handoff(part: msgspec.Raw) -> Handoff | None:
    """Return the handoff in a request's or an answer's `disaggregated_params`, None without one.

    Raises:
        RequestInvalid: it is not a handoff.
    """
    wire = _part.read(part, _FIELD)
    if wire is None:
        return None
    unknown = {name: raw for name, raw in _keys.decode(part).items() if name not in _KEYS}
    if len(unknown) > OTHERS_MAX:
        raise RequestInvalid(_FIELD, f"{len(unknown)} unknown keys", f"{OTHERS_MAX} at most")
    for name in unknown:
        if len(name) > OTHER_NAME_MAX or not name.isidentifier() or name in _KNOWN:
            allowed = f"identifiers of at most {OTHER_NAME_MAX} characters, not opaque_state"
            raise RequestInvalid(_FIELD, shortened(name), allowed)
    others = {name: msgspec.json.decode(raw) for name, raw in unknown.items()}
    return Handoff(
        **msgspec.structs.asdict(wire), others={name: value for name, value in others.items() if value is not None}
    )


def without_media(handoff: Handoff) -> Handoff:
    """Return the handoff without media, for the phases after the prompt's computation."""
    others = {name: value for name, value in handoff.others.items() if not name.startswith(_MEDIA_PREFIX)}
    return msgspec.structs.replace(handoff, **dict.fromkeys(_MEDIA), others=others)


def handoff_of(params: object) -> Handoff:
    """Return the handoff in the engine's `DisaggregatedParams`; also fields of a newer version, if they are plain JSON.

    Raises:
        HandoffInvalid: a field cannot be handed over.
    """
    values: dict[str, Any] = {name: getattr(params, name, None) for name in _KNOWN}
    if (logprobs := values["first_gen_log_probs"]) is not None:
        values["first_gen_log_probs"] = list(map(_listed, logprobs))
    if (style := values["schedule_style"]) is not None:
        values["schedule_style"] = int(style)
    values["encoded_opaque_state"] = values.pop("opaque_state")
    values["others"] = dict(_newer_fields(params))
    try:
        return msgspec.convert(values, Handoff, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise HandoffInvalid(f"disaggregated_params of the engine: {error}") from error


def params_of(handoff: Handoff, request_type: str, *, with_media: bool) -> dict[str, Any]:
    """Return the keywords of the engine's `DisaggregatedParams` for the handoff and a request of `request_type`.

    Media handles are left out unless `with_media`: an engine that computes no prompt refuses them.
    `first_gen_log_probs` and `schedule_style` stay plain data: the caller knows the engine's classes.
    """
    if not with_media:
        handoff = without_media(handoff)
    keys = {name: _plain(value) for name in _KNOWN if (value := getattr(handoff, name)) is not None}
    return {**handoff.others, **keys, "request_type": request_type}


def _newer_fields(params: object) -> Iterator[tuple[str, Any]]:
    """Yield the unknown fields of the engine's class that hold plain JSON; tensors are dropped."""
    if not is_dataclass(params):
        return
    for field in fields(params):
        value = getattr(params, field.name, None)
        if field.name not in _DROPPED.union(_KNOWN) and value is not None and _is_json(value):
            yield field.name, value


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(inner) for name, inner in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _listed(alternatives: Mapping[int, Any] | float) -> list[dict[str, Any]] | float:
    if isinstance(alternatives, Mapping):
        return [
            {"token_id": token, "logprob": bounded_logprob(each.logprob), "rank": each.rank}
            for token, each in alternatives.items()
        ]
    return bounded_logprob(float(alternatives))


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever the field holds
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
