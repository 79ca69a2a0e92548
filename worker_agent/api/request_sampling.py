"""Sampling parameters of a client's request.

    field of the request                               field of `Sampling`
    n                                                  choices
    chat: logprobs true, top_logprobs k                logprobs k, without it 0
    completion: logprobs k                             logprobs k
    guided_json, guided_regex, guided_grammar,         guide of that kind
    structural_tag
    guided_choice, structured_outputs.choice           guide regex, the alternatives escaped
    structured_outputs {json, regex, ...}              guide of the one key that it has
    response_format json_object                        guide json_object
    response_format json_schema, json {schema}         guide json
    response_format regex, ebnf                        guide regex, grammar
    response_format structural_tag                     guide structural_tag, the complete object
    response_format text                               none

At most one of them may be given. Source: `docs/SOURCES.md` D6.5; the OpenAI interface for `response_format`;
vLLM's for `guided_*` and `structured_outputs`.
"""

from typing import Any, Literal

import msgspec

from kv_protocol.openai.errors import Verbatim
from kv_protocol.openai.option_table import (
    LOGPROBS_MAX,
    AnyFormat,
    EbnfFormat,
    JsonFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    StructuralTagFormat,
    plain,
)
from kv_protocol.openai.requests import ChatRequest, Request, RequestInvalid
from worker_agent.port.sampling import ANSWER_LOGPROBS_MAX, Guide, GuideKind, Sampling, choice_pattern

_COPIED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
)  # fmt: skip
_STRUCTURED_UNKNOWN = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""Keys of `structured_outputs` that no engine supports."""
_STRUCTURED: tuple[GuideKind | Literal["choice"], ...] = (
    "json", "regex", "grammar", "structural_tag", "choice", "json_object",
)  # fmt: skip
"""Its others: the kinds of guides."""
_GUIDED: tuple[tuple[str, GuideKind | Literal["choice"]], ...] = (
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_grammar", "grammar"),
    ("structural_tag", "structural_tag"),
    ("guided_choice", "choice"),
)
"""Fields of a request, and the kinds of their guides."""


def sampling_of(request: Request) -> Sampling:
    """Return the request's sampling parameters.

    Raises:
        RequestInvalid: one of them is invalid, or there are several guides.
    """
    copied = {name: getattr(request, name) for name in _COPIED}
    return Sampling(
        **copied,
        ignore_eos=bool(request.ignore_eos),
        choices=request.n or 1,
        logprobs=_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request),
        guide=_guide(request)[1],
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


def guide_field(request: Request) -> str:
    """Return the field with the guide; empty: no guide."""
    return _guide(request)[0]


def forced_sampling(request: Request, sampling: Sampling, calls: Guide) -> Sampling:
    """Return the parameters of an answer that must be calls: a `response_format` is of content, and there is none.

    Raises:
        RequestInvalid: the request guides the whole answer otherwise.
    """
    if (field := guide_field(request)) not in ("", "response_format"):
        raise RequestInvalid("tool_choice", Verbatim(f"it beside {field}"), "one guide a request")
    return msgspec.structs.replace(sampling, guide=calls)


def _logprobs(request: Request) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs


def _prompt_logprobs(request: Request) -> int | None:
    count = request.prompt_logprobs
    if count is not None and not 0 <= count <= LOGPROBS_MAX:
        raise RequestInvalid("prompt_logprobs", count, f"0..{LOGPROBS_MAX}")
    return count


def _guide(request: Request) -> tuple[str, Guide | None]:
    wished = [(field, kind, getattr(request, field)) for field, kind in _GUIDED]
    if (outputs := request.structured_outputs) is not None:
        for option in _STRUCTURED_UNKNOWN:
            if (value := getattr(outputs, option)) not in (None, False):
                raise RequestInvalid(f"structured_outputs.{option}", value, "none on this worker")
        wished += [(f"structured_outputs.{kind}", kind, getattr(outputs, kind)) for kind in _STRUCTURED]
    given = [(field, _guide_of(kind, value)) for field, kind, value in wished if value not in (None, False)]
    if (guide := _of_response_format(request.response_format)) is not None:
        given.append(("response_format", guide))
    if len(given) > 1:
        raise RequestInvalid(given[1][0], Verbatim(f"it beside {given[0][0]}"), "one guide a request")
    return given[0] if given else ("", None)


def _guide_of(kind: GuideKind | Literal["choice"], value: Any) -> Guide:  # noqa: ANN401 - as the kind has it
    if kind == "choice":
        return Guide(kind="regex", value=choice_pattern(value))
    return Guide(kind=kind) if kind == "json_object" else Guide(kind=kind, value=plain(value))


def _of_response_format(response_format: AnyFormat | None) -> Guide | None:
    match response_format:
        case JsonObjectFormat():
            return Guide(kind="json_object")
        case JsonSchemaFormat():
            return Guide(kind="json", value=plain(response_format.json_schema.schema))
        case JsonFormat():
            return Guide(kind="json", value=plain(response_format.schema))
        case RegexFormat():
            return Guide(kind="regex", value=response_format.regex)
        case EbnfFormat():
            return Guide(kind="grammar", value=response_format.ebnf)
        case StructuralTagFormat():
            return Guide(kind="structural_tag", value=plain(response_format))
    return None
