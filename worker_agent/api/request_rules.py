"""Turns a client's request into an engine request, or refuses it.

    option                                               here
    a phase that the role does not serve                 refused (`phase_of`)
    an option with the mark `PASSED`                     the engine gets it (`Sampling.passed`)
    an option with the mark `Unsupported`                refused, unless it has its neutral value
    guides, logits_processors, prompt_logprobs           refused by an engine that lacks them
    prompt_logprobs in a stream                          refused: only unstreamed answers have them
    best_of other than n                                 refused: streamed choices cannot be ranked afterwards
    add_special_tokens in a chat                         refused: the template sets them
    tool_choice required, or a function                  guided, if engine and format can (`parsers/forced_calls.py`)
    priority 0..1                                        passed to the engine: of waiting requests the highest is first
    any other priority                                   used by the router's queue only
    model                                                a served name, or a LoRA's
    max_tokens                                           1 on a prefill worker, whatever the request has
    stop_token_ids                                       these and the model's end tokens; with `ignore_eos` only these
    bad_words ["a", ..]                                  the token of each word, at a text's start and after a space. A
                                                         word of several tokens is refused: its tokens may not be
                                                         banned one by one

At most one guide may be given.

Source: `docs/SOURCES.md` D6.5; NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/openai_protocol.py` (`priority`); the OpenAI
interface (`logit_bias`, `response_format`); vLLM's for `bad_words`, `stop_token_ids`, `guided_*` and
`structured_outputs`.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from kv_protocol.fleet import Role
from kv_protocol.openai.errors import ALLOWED, Verbatim
from kv_protocol.openai.option_table import (
    PASSED,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Unsupported,
    marks_of,
)
from kv_protocol.openai.parts import ABSENT
from kv_protocol.openai.requests import MARKS, ChatRequest, Request, RequestInvalid
from kv_runtime.text.model import Text
from worker_agent.port.handoff import read_handoff
from worker_agent.port.sampling import ANSWER_LOGPROBS_MAX, Guide, Sampling, choice_pattern
from worker_agent.port.types import EngineDescription, EngineRequest

_NONE = "none on this worker"
_PASSED = tuple(name for name, marks in MARKS.items() if PASSED in marks)
_STRUCTURED = marks_of(StructuredOutputs)
_NEUTRAL, _NEUTRAL_STRUCTURED, _NEUTRAL_STREAM = (
    {name: mark.neutral for name, marks in of.items() for mark in marks if isinstance(mark, Unsupported)}
    for of in (MARKS, _STRUCTURED, marks_of(StreamOptions))
)


def logit_bias_of(request: Request, text: Text) -> tuple[tuple[int, float], ...]:
    """Return tokens and their biases; raise `RequestInvalid`, which names the token."""
    biases = {int(key): bias for key, bias in (request.logit_bias or {}).items()}
    for token in biases:
        if token >= text.vocab_size:
            raise RequestInvalid("logit_bias", str(token), f"tokens 0..{text.vocab_size - 1}")
    return tuple(biases.items())


def bad_token_ids_of(request: Request, text: Text) -> tuple[int, ...]:
    """Return the banned tokens; raise `RequestInvalid`, which names the word."""
    banned = dict[int, None]()
    for at, word in enumerate(request.bad_words or ()):
        encoded = [text.encode(each, add_special_tokens=False) for each in (word, f" {word.lstrip()}")]
        single = [ids[0] for ids in encoded if len(ids) == 1]
        if not single:
            raise RequestInvalid(f"bad_words[{at}]", word[:16], f"a word of one token: it has {len(encoded[0])}")
        banned |= dict.fromkeys(single)
    return tuple(banned)


class RequestRules:
    """Checks and translates one worker's requests. `loras` are valid names of a request's `model`."""

    def __init__(
        self,
        description: EngineDescription,
        text: Text,
        *,
        default_max_tokens: int,
        role: Role = "aggregated",
        loras: tuple[str, ...] = (),
        stop_tokens: Collection[int] = (),
    ) -> None:
        """`stop_tokens` end answers, in addition to the model's end tokens."""
        self._description, self._text = description, text
        self._end_ids = sorted(text.eos_ids.union(stop_tokens))
        self._default_max_tokens, self._role, self._loras = default_max_tokens, role, loras
        computed = description.max_prompt_tokens if role != "decode" else 0
        self._prompt_tokens_max = min(description.max_seq_len - 1, computed or description.max_seq_len)

    def wishes(self, request: Request) -> EngineRequest:
        """Return an engine request of the options that do not depend on the prompt, without id, prompt and length.

        Raises:
            RequestInvalid: this worker does not support one of them.
        """
        phase, sampling = phase_of(request, self._role), sampling_of(request)
        stop_ids = (*(request.stop_token_ids or ()), *(() if request.ignore_eos else self._end_ids))
        check_supported(request)
        return msgspec.structs.replace(
            phase,
            lora_name=request.model if request.model in self._loras else None,
            cache_salt=request.salt or None,
            sampling=sampling,
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            queue_priority=request.priority if 0 <= (request.priority or 0) <= 1 else None,
            logits_processors=tuple(request.logits_processors or ()),
            logit_bias=logit_bias_of(request, self._text),
            bad_token_ids=bad_token_ids_of(request, self._text),
        )

    def engine_request(
        self,
        request: Request,
        wished: EngineRequest,
        *,
        before: tuple[int, ...] = (),
        forced: Guide | None = None,
        **others: Any,  # noqa: ANN401 - more fields of `EngineRequest`
    ) -> EngineRequest:
        """Return the engine request, given its wishes and prompt. `forced` guides the calls that the request demands.

        `before` are the answer's first tokens, generated by another worker: then nothing is forced, because a guide
        would begin anew. With `max_tokens` 0 they are the whole answer.

        Raises:
            RequestInvalid: the request cannot fit, or asks for an unstreamed answer with too many log probabilities.
        """
        prompt, sampling = wished.prompt, wished.sampling
        max_tokens = self._max_tokens(request, len(prompt))
        if forced is not None and not before and self._description.takes_structural_tags:
            if sampling.guide is not None and sampling.guide.field != "response_format":  # that guides text, not calls
                found = Verbatim(f"it beside {sampling.guide.field}")
                raise RequestInvalid("tool_choice", found, "one guide a request")
            others["sampling"] = sampling = msgspec.structs.replace(sampling, guide=forced)
        check_size(request, sampling, prompt_tokens=len(prompt), max_tokens=max_tokens)
        if before:
            max_tokens = max_tokens if self._role == "prefill" else max(0, max_tokens - len(before))
            if request.min_tokens is not None:
                passed = {**sampling.passed, "min_tokens": max(0, request.min_tokens - len(before))}
                others["sampling"] = msgspec.structs.replace(sampling, passed=passed)
        return msgspec.structs.replace(wished, prompt=prompt + before, max_tokens=max_tokens, **others)

    @staticmethod
    def before(request: Request) -> tuple[int, ...]:
        """Return the answer's tokens that another worker generated; raise `RequestInvalid`."""
        if request.kv_continue is None:
            return ()
        if request.n not in (None, 1):
            raise RequestInvalid("n", request.n, "1 of an answer that goes on")
        try:
            return tuple(request.kv_continue.token_ids())
        except ValueError as error:
            raise RequestInvalid("kv_continue.tokens", "other bytes", str(error)) from error

    def _max_tokens(self, request: Request, isl: int) -> int:
        field, tokens_left = prompt_field(request), self._description.max_seq_len - isl
        if not isl:
            raise RequestInvalid(field, "0 tokens", "at least one token")
        if isl > self._prompt_tokens_max:
            raise RequestInvalid(field, f"{isl} tokens", f"at most {self._prompt_tokens_max} tokens")
        if self._role == "prefill":
            return 1
        if request.limit_tokens is not None and request.limit_tokens > tokens_left:
            raise RequestInvalid("max_tokens", request.limit_tokens, f"1..{tokens_left} after a prompt of {isl} tokens")
        return request.limit_tokens or min(self._default_max_tokens, tokens_left)


def check_supported(request: Request) -> None:
    """Raise `RequestInvalid` if the request has an option that no engine supports."""
    _check_neutral(request, _NEUTRAL)
    if request.stream_options is not None:
        _check_neutral(request.stream_options, _NEUTRAL_STREAM, "stream_options.")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestInvalid("prompt_logprobs", request.prompt_logprobs, "none in a stream")
    if isinstance(request, ChatRequest) and request.add_special_tokens:
        raise RequestInvalid("add_special_tokens", request.add_special_tokens, "false in a chat")
    if request.best_of not in (None, request.n or 1):
        raise RequestInvalid("best_of", request.best_of, f"n, {request.n or 1}, or none")


def _check_neutral(given: msgspec.Struct, neutral: Mapping[str, object], above: str = "") -> None:
    """Raise `RequestInvalid` if an unsupported option has another value than its neutral one."""
    for field, value in ((field, getattr(given, field, None)) for field in neutral):
        if value is not None and value != neutral[field]:
            raise RequestInvalid(f"{above}{field}", value, _NONE)


def check_several(request: Request, prompts: int) -> None:
    """Raise `RequestInvalid` if the request has several prompts, and an option of a single prompt."""
    for field in ("disaggregated_params", "kv_continue", "prompt_logprobs"):
        value = getattr(request, field)
        if prompts > 1 and value is not None and value != ABSENT:
            raise RequestInvalid(field, Verbatim(f"{prompts} prompts"), "one prompt with this option")


def prompt_field(request: Request) -> str:
    """Return the field that has the prompt."""
    return "messages" if isinstance(request, ChatRequest) else "prompt"


# ---------------------------------------------------------------- sampling
_GUIDES = ("guided_json", "guided_regex", "guided_grammar", "structural_tag", "guided_choice")
"""The options that are guides, each named by its kind."""
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": ("",),
    "json_object": ("json_object",),
    "json_schema": ("json", "json_schema"),
    "json": ("json", "schema"),
    "regex": ("regex", "regex"),
    "ebnf": ("grammar", "ebnf"),
    "structural_tag": ("structural_tag", "format", "structures", "triggers"),
}
"""The kind of guide of each type of `response_format`, and the type's own keys."""


def sampling_of(request: Request) -> Sampling:
    """Return the request's sampling parameters.

    Raises:
        RequestInvalid: a guide is invalid, or there are several.
    """
    logprobs = request.logprobs
    if isinstance(request, ChatRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return Sampling(
        passed={name: value for name in _PASSED if (value := getattr(request, name)) is not None},
        ignore_eos=bool(request.ignore_eos),
        choices=request.n or 1,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        guide=_guide(request),
    )


def check_size(request: Request, sampling: Sampling, *, prompt_tokens: int, max_tokens: int) -> None:
    """Raise `RequestInvalid` if the answer has more than `ANSWER_LOGPROBS_MAX` log probabilities.

    A stream has no such bound: its events are sent as they come.
    """
    if request.stream:
        return
    field = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    for name, length, tokens, top in (
        (field, "max_tokens", max_tokens, sampling.logprobs),
        ("prompt_logprobs", "prompt tokens", prompt_tokens, sampling.prompt_logprobs),
    ):
        count = 0 if top is None else sampling.choices * tokens * (1 + top)
        if count > ANSWER_LOGPROBS_MAX:
            found = Verbatim(f"n {sampling.choices} x {length} {tokens} x (1 + {name} {top}) = {count}")
            raise RequestInvalid(
                name, found, f"at most {ANSWER_LOGPROBS_MAX} log probabilities in an answer that is not streamed"
            )


def _guide(request: Request) -> Guide | None:
    wished: list[tuple[str, Any, Any]] = [
        (field, field.removeprefix("guided_"), getattr(request, field)) for field in _GUIDES
    ]
    if (outputs := request.structured_outputs) is not None:
        _check_neutral(outputs, _NEUTRAL_STRUCTURED, "structured_outputs.")
        kinds = _STRUCTURED.keys() - _NEUTRAL_STRUCTURED
        wished += ((f"structured_outputs.{kind}", kind, getattr(outputs, kind)) for kind in sorted(kinds))
    if request.response_format is not None:
        wished.append(("response_format", *_of_format(request.response_format)))
    given = [each for each in wished if each[-1] not in (None, False)]
    if len(given) > 1:
        raise RequestInvalid(given[1][0], Verbatim(f"it beside {given[0][0]}"), "one guide a request")
    for field, kind, value in given:
        if kind == "choice":
            return Guide(kind="regex", value=choice_pattern(value), field=field)
        is_mapping = kind == "structural_tag" and not isinstance(value, str)
        return Guide(kind=kind, value=msgspec.json.encode(value).decode() if is_mapping else value, field=field)
    return None


def _of_format(form: ResponseFormat) -> tuple[str, Any]:
    """Return the kind and the value of the guide, False for text; raise `RequestInvalid`, which names the key."""
    kind, *own = _FORMATS[form.type]
    for key in form.__struct_fields__:
        if key not in ("type", *own) and getattr(form, key) is not None:
            raise RequestInvalid(f"response_format.{key}", key, ALLOWED)
    if kind == "structural_tag":
        if form.format is None and None in (form.structures, form.triggers):
            raise RequestInvalid("response_format", form.type, "format, or structures and triggers")
        return kind, msgspec.to_builtins(form)
    if not own:
        return kind, bool(kind)
    value = getattr(form, own[0])
    if value is None:
        raise RequestInvalid(f"response_format.{own[0]}", None, "a value: it is required")
    return kind, value.schema if isinstance(value, JsonSchema) else value


# ---------------------------------------------------------------- phases
NOTHING_ASKED = EngineRequest(request_id="", prompt=(), max_tokens=0)
_FIELD = "disaggregated_params"
_REQUEST_TYPES: dict[Role, tuple[str, ...]] = {
    "aggregated": ("context_and_generation",),
    "prefill": ("context_only",),
    "decode": ("generation_only", "context_only", "context_and_generation"),
}


def phase_of(request: Request, role: Role) -> EngineRequest:
    """Return an engine request of the phase that a request asks for; raise `RequestInvalid` if the role lacks it.

    role          without              `disaggregated_params.request_type`
                  the key              context_only          generation_only   context_and_generation
    aggregated    both phases          refused               refused           both phases
    prefill       prompt, first token  prompt, first token   refused           refused
    decode        refused, by engine   rest of the answer    rest of answer    both phases, on this worker
    encode        nothing is generated: refused

    A prefill worker's own answer has `context_only`: it may be passed on unchanged. `disagg_request_id` in a request to
    a prefill worker is the id of the transfer; without one the engine assigns its own.
    Source: as in `port/handoff.py`; NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/openai_disagg_service.py`.
    """
    if role == "encode":
        raise RequestInvalid("role", role, "aggregated, prefill or decode: an encoder generates nothing")
    handoff = read_handoff(request.disaggregated_params)
    if handoff is None:
        return NOTHING_ASKED
    kind, allowed = handoff.request_type, _REQUEST_TYPES[role]
    if kind is not None and kind not in allowed:
        raise RequestInvalid(f"{_FIELD}.request_type", kind, f"{' or '.join(allowed)} on a worker whose role is {role}")
    if kind == "context_and_generation":
        return msgspec.structs.replace(NOTHING_ASKED, is_context_and_generation=role == "decode")
    if role != "prefill":
        return msgspec.structs.replace(NOTHING_ASKED, handoff=handoff)
    has_media = handoff.multimodal_embedding_handles is not None
    return msgspec.structs.replace(
        NOTHING_ASKED, handoff=handoff if has_media else None, transfer_id=handoff.disagg_request_id
    )
