r"""Qwen3-Coder, Qwen3.5: calls in tags; they become JSON by the schema that the request's tools give each parameter.

    <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n ... </function>\n</tool_call>

    the schema's type      the value
    string, or none        a string, sent as it comes; `null` in any case of letters is null
    others                 as it is written, if it is JSON of such a type (True, FALSE: a boolean); else a string.
                           It is sent at its end; one of more than `HELD_CHARACTERS_MAX` is sent as a string

One line end before a value and one after it are not part of it. The outer tags may be absent.
Source: sgl-project/sglang, `python/sglang/srt/function_call/qwen3_coder_detector.py`; NVIDIA/TensorRT-LLM,
`tensorrt_llm/serve/tool_parser/qwen3_coder_parser.py`; vllm-project/vllm,
`vllm/tool_parsers/qwen3coder_tool_parser.py`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from worker_agent.api.parsers.calls import NAME_CHARACTERS_MAX, CallId, ToolParser
from worker_agent.api.parsers.reader import HELD_CHARACTERS_MAX, Show, Steps

Tool = Mapping[str, Any]

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = tuple(
    space + tag for tag in (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CALL_END) for space in ("\n", "")
)
_NULL = "null"


class Qwen3CoderParser(ToolParser):
    """Reads such calls. `tools` are those of the request."""

    markers = (_CALL, _FUNCTION)
    openings = (f"{_CALL}\n{_FUNCTION}",)

    def __init__(self, call_id: CallId, tools: Sequence[Tool] = ()) -> None:
        self._tools = tools
        super().__init__(call_id)

    def _call(self, marker: str) -> Steps[None]:
        reader = self._reader
        if marker == _CALL:
            yield from reader.skip_space()
            yield from reader.expect(_FUNCTION)
        name, _ = yield from reader.before((">",), NAME_CHARACTERS_MAX)
        self._start(name.strip())
        schemas = _schemas_of(self._tools, name.strip())
        yield from self._parameters(schemas)
        if self.has_open_call and reader.ended:
            return
        self._end()
        yield from reader.skip_space()
        yield from reader.literal(_CALL_END)

    def _parameters(self, schemas: Mapping[str, Any]) -> Steps[None]:
        """Read parameters up to the function's end; return with the call open where the text ends first."""
        reader, opening, ends = self._reader, "{", (_PARAMETER, _FUNCTION_END, _CALL_END)
        marker = yield from reader.until(ends, self._content)
        while marker == _PARAMETER:
            key, _ = yield from reader.before((">",), NAME_CHARACTERS_MAX)
            self._arguments(f"{opening}{_quoted(key.strip())}: ")
            opening = ", "
            yield from reader.literal("\n")
            value = _Value(_types_of(schemas.get(key.strip())), self._arguments)
            marker = (yield from reader.until(_VALUE_ENDS, value.add)).strip()
            if not marker:
                value.cut()
                return
            value.end()
            if marker == _PARAMETER_END:
                marker = yield from reader.until(ends, self._content)
        if marker:
            self._arguments("{}" if opening == "{" else "}")


class _Value:
    """One parameter's value on its way into JSON."""

    def __init__(self, types: frozenset[str], show: Show) -> None:
        self._types, self._show = types, show
        self._pending, self._is_string = "", False

    def add(self, text: str) -> None:
        """Take more of the value's text; show what is certain."""
        if self._is_string:
            self._show(_quoted(text)[1:-1])
            return
        self._pending += text
        if not self._may_wait():
            self._is_string = True
            self._show(_quoted(self._pending)[:-1])

    def end(self) -> None:
        """Show the rest."""
        self._show('"' if self._is_string else self._json())

    def cut(self) -> None:
        """Show what was held back of a value that never ended, as far as it can be a string."""
        if not self._is_string:
            self._show(_quoted(self._pending)[:-1])

    def _may_wait(self) -> bool:
        if self._types == {"string"}:
            return _NULL.startswith(self._pending.lower())
        return len(self._pending) <= HELD_CHARACTERS_MAX

    def _json(self) -> str:
        text = self._pending.strip()
        lowered = text.lower()
        if lowered == _NULL or (lowered in ("true", "false") and "boolean" in self._types):
            return lowered
        try:
            decoded = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return _quoted(self._pending)
        return text if self._types & _kinds_of(decoded) else _quoted(self._pending)


def _schemas_of(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """Return what the tool of this name says of its parameters."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _types_of(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema names, also as alternatives; `string` where it names none."""
    return frozenset(_named_types(schema)) - {_NULL} or frozenset({"string"})


def _named_types(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    found = [schema.get("type")]
    for alternatives in (schema.get("type"), schema.get("anyOf"), schema.get("oneOf")):
        each_one = alternatives if isinstance(alternatives, list) else ()
        found += [each.get("type") if isinstance(each, Mapping) else each for each in each_one]
    yield from (each for each in found if isinstance(each, str))


def _kinds_of(value: object) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    kinds = {float: "number", dict: "object", list: "array"}
    return frozenset({kinds[type(value)]}) if type(value) in kinds else frozenset()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
