"""Splits one request between two workers, or two pools: the prefill request, its answer, the decode request.

    client's body                        prefill request                decode request
    ----------------------------------   ----------------------------   -------------------------------------------
    stream, stream_options               stream false, no options       as they are
    max_tokens, max_completion_tokens    max_tokens 1                   as they are
    min_tokens                           1 at most                      as it is
    n, best_of                           left out, which means 1        as they are
    prompt_token_ids                     as they are                    the prefill answer's, if it has some
    disaggregated_params                 {"request_type":               those of the prefill answer's choice, with
                                          "context_only"}               "request_type": "generation_only" and the
                                                                        answer's usage as "ctx_usage"
    nvext: backend_instance_id,          prefill_worker_id and          as they are
      decode_worker_id, dp_rank          prefill_dp_rank instead
    nvext: prefill_worker_id,            as backend_instance_id and     left out
      prefill_dp_rank                    dp_rank
    all else                             as it came, byte for byte      as it came, byte for byte

A request for one token is not split, as no decode phase would fetch the KV: the decode worker computes all of it
(`CONTEXT_AND_GENERATION`).

The prefill answer is complete if its `finish_reason` is neither `length` nor `not_finished`, or if only one token was
left to generate. Then no decode phase follows, and the client gets the prefill answer, as an event stream if it asked
for one.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/openai_disagg_service.py` (`_get_ctx_request`, `_get_gen_request`,
`_need_gen`) and `tensorrt_llm/serve/openai_protocol.py` (`DisaggregatedParams`).
"""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import msgspec

CONTEXT_ONLY, GENERATION_ONLY = "context_only", "generation_only"
_GOES_ON = frozenset({"length", "not_finished"})
_PARAMS, _PROMPT_IDS = "disaggregated_params", "prompt_token_ids"
_LIMITS = ("max_tokens", "max_completion_tokens")
_PREFILL_PLACE = {"prefill_worker_id": "backend_instance_id", "prefill_dp_rank": "dp_rank"}
_PLACES = ("backend_instance_id", "decode_worker_id", "dp_rank", *_PREFILL_PLACE)

CONTEXT_AND_GENERATION = b'{"request_type":"context_and_generation"}'
"""`disaggregated_params` of a request that one worker both prefills and decodes."""

_Object = dict[str, msgspec.Raw]
_objects = msgspec.json.Decoder(_Object)


class AnswerUnusable(Exception):
    """A prefill answer cannot be continued; the message says why."""


class PrefillAnswer(NamedTuple):
    """A parsed prefill response. `is_final` means that no decode phase follows.

    `prompt_ids` is JSON: the ids of the prompt as it was computed, if the answer states them; else empty.
    """

    body: bytes
    params: bytes
    is_final: bool
    prompt_ids: bytes = b""


def prefill_body(body: bytes | bytearray) -> bytes:
    """Return the prefill request; `body` is a request that was parsed before."""
    request = _read(body, _PLACES, _PREFILL_PLACE)
    for key in ("stream_options", "best_of", "n", *_LIMITS):
        request.pop(key, None)
    overrides: dict[str, Any] = {"stream": False, "max_tokens": 1, _PARAMS: {"request_type": CONTEXT_ONLY}}
    if "min_tokens" in request:
        overrides["min_tokens"] = min(1, msgspec.json.decode(request["min_tokens"]) or 0)
    return msgspec.json.encode(request | overrides)


def decode_body(body: bytes | bytearray, params: bytes, prompt_ids: bytes = b"") -> bytes:
    """Return the decode request; `params` and `prompt_ids` are those of a `PrefillAnswer`."""
    request = _read(body, _PREFILL_PLACE, {}) | {_PARAMS: msgspec.Raw(params)}
    if prompt_ids:
        request[_PROMPT_IDS] = msgspec.Raw(prompt_ids)
    return msgspec.json.encode(request)


def prefill_answer(body: bytes, *, limit_tokens: int | None) -> PrefillAnswer:
    """Parse a complete prefill answer; `limit_tokens` is the largest number of tokens that the client wants.

    Raises:
        AnswerUnusable: it does not have one choice, or has no parameters for the decode phase that must follow.
    """
    try:
        answer = msgspec.json.decode(body)
        (choice,) = answer["choices"]
        params, reason = choice.pop(_PARAMS, None), choice["finish_reason"]
        prompt_ids = answer.pop(_PROMPT_IDS, None)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise AnswerUnusable(f"choices: found {_start(body)}, allowed one choice with its finish_reason") from error
    if reason not in _GOES_ON or limit_tokens == 1:
        return PrefillAnswer(msgspec.json.encode(answer), b"", is_final=True)
    if not isinstance(params, dict):
        raise AnswerUnusable(f"choices[0].{_PARAMS}: found {params!r}, allowed an object: is it a prefill worker?")
    usage = {"ctx_usage": answer["usage"]} if "usage" in answer else {}
    decode_params = msgspec.json.encode(params | usage | {"request_type": GENERATION_ONLY})
    return PrefillAnswer(
        body, decode_params, is_final=False, prompt_ids=msgspec.json.encode(prompt_ids) if prompt_ids else b""
    )


def as_events(body: bytes, *, include_usage: bool) -> bytes:
    """Return a complete answer as the equivalent event stream."""
    answer: dict[str, Any] = msgspec.json.decode(body)
    usage = answer.pop("usage", None)
    if answer.get("object") == "chat.completion":
        answer["object"] = "chat.completion.chunk"
        for choice in answer["choices"]:
            choice["delta"] = choice.pop("message")
    events = [answer] + ([answer | {"choices": [], "usage": usage}] if include_usage else [])
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(each) for each in events) + b"data: [DONE]\n\n"


def _read(body: bytes | bytearray, left_out: Container[str], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return the request's keys; in `nvext` those in `left_out` are missing, and the `renamed` ones have new names."""
    request: dict[str, Any] = {**_objects.decode(body)}
    extension = msgspec.json.decode(request.get("nvext", b"null"), type=_Object | None)
    if extension is not None:
        placed = {there: extension[key] for key, there in renamed.items() if key in extension}
        request["nvext"] = {key: value for key, value in extension.items() if key not in left_out} | placed
    return request


def _start(body: bytes) -> str:
    return repr(body[:80].decode("utf-8", "replace"))
