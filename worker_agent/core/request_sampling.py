"""What a client's request says of sampling, in the agent's own words.

    the request                                        `Sampling`
    n, best_of                                         choices, best_of
    chat: logprobs true, top_logprobs k                logprobs k, without it 0
    completion: logprobs k                             logprobs k
    guided_json, guided_regex, guided_grammar,         guide of that kind
    structural_tag
    guided_choice, structured_outputs.choice           guide regex, the alternatives escaped
    structured_outputs {json, regex, ...}              guide of the one key that it has
    response_format json_object                        guide json_object
    response_format json_schema {schema}               guide json
    response_format structural_tag                     guide structural_tag, the whole of it
    response_format text                               none

At most one of them may be given. Source: `dynamo_reference.md` section 6.5; the OpenAI interface for `response_format`;
vLLM's for `guided_*` and `structured_outputs`.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from kv_protocol.openai import ChatRequest, Request, RequestInvalid
from kv_protocol.openai_errors import Verbatim
from kv_protocol.openai_parts import OptionalPart
from worker_agent.core.sampling import ANSWER_LOGPROBS_MAX, LOGPROBS_MAX, Guide, GuideKind, Sampling, choice_pattern

_Choices = Annotated[list[str], msgspec.Meta(min_length=1, max_length=1024)]
_COPIED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "best_of",
)  # fmt: skip

_count = OptionalPart[int](Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)])
_anything = OptionalPart[Any](Any)
_text = OptionalPart[str](str)
_choices = OptionalPart[list[str]](_Choices)


class _Structured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of `structured_outputs`."""

    json: Any = None
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


_structured = OptionalPart[_Structured](_Structured)


def sampling_of(request: Request) -> Sampling:
    """Return the request's wishes.

    Raises:
        RequestInvalid: one of them cannot be understood, or there are several guides.
    """
    copied = {name: getattr(request, name) for name in _COPIED}
    return Sampling(
        **copied,
        ignore_eos=bool(request.ignore_eos),
        choices=request.n or 1,
        logprobs=_logprobs(request),
        prompt_logprobs=_count.read(request.prompt_logprobs, "prompt_logprobs"),
        guide=_guide(request)[1],
    )


def check_size(request: Request, sampling: Sampling, *, prompt_tokens: int, max_tokens: int) -> None:
    """Return when the answer has at most `ANSWER_LOGPROBS_MAX` log probabilities; raise `RequestInvalid` otherwise.

    A stream has no such bound: its events leave as they come.
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


def guide_field(request: Request) -> str:
    """Return the field that asks for guided decoding; empty: none does."""
    return _guide(request)[0]


def _logprobs(request: Request) -> int | None:
    if isinstance(request, ChatRequest):
        if not request.logprobs:
            if request.top_logprobs:
                raise RequestInvalid("top_logprobs", request.top_logprobs, "none without logprobs: true")
            return None
        field, count = "top_logprobs", request.top_logprobs or 0
    elif request.logprobs is None:
        return None
    else:
        field, count = "logprobs", request.logprobs
    if not 0 <= count <= LOGPROBS_MAX:
        raise RequestInvalid(field, count, f"0..{LOGPROBS_MAX}")
    return count


def _guide(request: Request) -> tuple[str, Guide | None]:
    given = [*_guided(request), *_of_structured(request), *_of_response_format(request)]
    if len(given) > 1:
        raise RequestInvalid(given[1][0], f"beside {given[0][0]}", "one guide a request")
    return given[0] if given else ("", None)


def _guided(request: Request) -> Iterator[tuple[str, Guide]]:
    named: list[tuple[str, GuideKind, OptionalPart[Any]]] = [
        ("guided_json", "json", _anything),
        ("guided_regex", "regex", _text),
        ("guided_grammar", "grammar", _text),
        ("structural_tag", "structural_tag", _anything),
    ]
    for field, kind, part in named:
        value = part.read(getattr(request, field), field)
        if value is not None:
            yield field, Guide(kind=kind, value=value)
    choices = _choices.read(request.guided_choice, "guided_choice")
    if choices is not None:
        yield "guided_choice", Guide(kind="regex", value=choice_pattern(choices))


def _of_structured(request: Request) -> Iterator[tuple[str, Guide]]:
    told = _structured.read(request.structured_outputs, "structured_outputs")
    if told is None:
        return
    kinds: tuple[GuideKind, ...] = ("json", "regex", "grammar", "structural_tag")
    for kind in kinds:
        value = getattr(told, kind)
        if value is not None:
            yield f"structured_outputs.{kind}", Guide(kind=kind, value=value)
    if told.choice is not None:
        yield "structured_outputs.choice", Guide(kind="regex", value=choice_pattern(told.choice))
    if told.json_object:
        yield "structured_outputs.json_object", Guide(kind="json_object")


def _of_response_format(request: Request) -> Iterator[tuple[str, Guide]]:
    told = request.response_format or {}
    kind, field = told.get("type", "text"), "response_format"
    if kind == "json_object":
        yield field, Guide(kind="json_object")
    elif kind == "json_schema":
        named = told.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if schema is None:
            raise RequestInvalid("response_format.json_schema.schema", "none", "a JSON schema")
        yield field, Guide(kind="json", value=schema)
    elif kind == "structural_tag":
        yield field, Guide(kind="structural_tag", value=told)
    elif kind != "text":
        raise RequestInvalid("response_format.type", kind, "text, json_object, json_schema or structural_tag")
