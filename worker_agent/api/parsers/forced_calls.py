r"""Forced calls (`tool_choice` "required", or a function) as a structural tag, which guides the engine's decoding.

    the answer       is reasoning (see below), up to 3 line ends, and calls; nothing follows the calls
    reasoning        If the answer begins within reasoning, the reasoning continues to its end. Otherwise the answer may
                     begin with up to 3 line ends and reasoning if reasoning is parsed; it may not if the prompt has
                     ended the reasoning and the family does not reason again. Reasoning cannot contain the beginning
                     of a call, except that of gpt-oss
    calls            "required" allows one or more calls of any of the tools. There is exactly one call if
                     `parallel_tool_calls` is false, if `tool_choice` is a function, or if the form has `is_one`
    the arguments    are a JSON object in a family that writes JSON, and fit the function's schema if its `strict` is
                     true. In a family that writes tags, and in Gemma 4, they are any text up to the call's end

The tags of xgrammar for XML (`style` of `json_schema`) are not used: release 0.1.32, which TensorRT-LLM 1.3 and 1.4
pin, allows no line end between parameters, which the models write. Mistral's family has two formats that only its
tokenizer tells apart: its calls are not forced.

Source: mlc-ai/xgrammar 0.1.32, `python/xgrammar/structural_tag.py`, `docs/tutorials/structural_tag.md`;
NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/openai_server.py` (`_build_tool_strict_guided_decoding_params`),
`tensorrt_llm/_torch/pyexecutor/grammar_matcher.py` (xgrammar only), `guided_decoder.py` (a decode worker's first
token). The sources of the calls' formats are named by the parsers of this package.
"""

from typing import Any

from worker_agent.api.parsers.calls import AnswerParser, CallForm
from worker_agent.api.parsers.values import Tool, quoted

Format = dict[str, Any]

_LINE_ENDS_MAX = 3
_LINE_ENDS: Format = {"type": "regex", "pattern": f"\\n{{0,{_LINE_ENDS_MAX}}}"}
_ANY_TEXT: Format = {"type": "any_text"}
_NOTHING: Format = {"type": "const_string", "value": ""}


def forced_calls(parser: AnswerParser, begun: str = "") -> Format | None:
    """Return the structural tag of an answer that calls some of the tools of `parser`, which reads that answer.

    `begun` is the text that a prefill worker has generated already: the engine would fail the request if the tag did
    not allow this text. None: the format has no structural tag, or no answer of calls can begin with `begun`.
    """
    if (form := parser.form) is None:
        return None
    options, openings = parser.options, () if form.thought else parser.openings
    thought, begins_inside = options.thought or form.thought, options.begins_inside
    if thought is not None and begins_inside:
        may_begin = not any(each in begun for each in openings)
    else:
        text = begun.lstrip("\n")
        may_think = thought is not None and (text.startswith(thought.opening) or thought.opening.startswith(text))
        call = form.section[0] or form.begin
        may_begin = len(begun) - len(text) <= _LINE_ENDS_MAX and (may_think or call.startswith(text))
    if not may_begin:
        return None
    calls: Format = {
        "type": "tags_with_separator",
        "tags": [_call(form, each["function"]) for each in options.tools],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": options.only_first_call or form.is_one,
    }
    elements = [_LINE_ENDS, _between(form.section[0], calls, form.section[1]) if any(form.section) else calls]
    if thought is not None:
        excluded = [
            each for each in openings if not any(each != other and each.startswith(other) for other in openings)
        ]
        inside = _between("" if begins_inside else thought.opening, _ANY_TEXT | {"excludes": excluded}, thought.closing)
        reasoning = {"type": "sequence", "elements": [_LINE_ENDS, inside]}
        elements = [inside if begins_inside else {"type": "or", "elements": [reasoning, _NOTHING]}, *elements]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


def _call(form: CallForm, function: Tool) -> Format:
    arguments: Format = _ANY_TEXT
    if form.is_json:
        schema = function.get("parameters") if function.get("strict") else None
        arguments = {"type": "json_schema", "json_schema": schema or {"type": "object"}}
    if form.pattern:
        arguments = {"type": "sequence", "elements": [{"type": "regex", "pattern": form.pattern}, arguments]}
    return _between(form.begin + quoted(function["name"])[1:-1] + form.behind, arguments, form.end)


def _between(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}
