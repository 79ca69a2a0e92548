"""Gemma 4: calls in a notation of its own, which become JSON as they come.

    <|tool_call>call:NAME{KEY:VALUE, ...}<tool_call|>

    a value     <|"|>text<|"|>, exactly; a number, true, false, null (also none, nil); {KEY:VALUE, ...}; [VALUE, ...]
    a key       bare, or between <|"|>
    other text  as a value is a string; a key without a value has "". The call's end closes open brackets

The model ends its turn with <|tool_response> after calls, which is a stop token.
Source: the chat template of google/gemma-4-31B-it; NVIDIA/TensorRT-LLM, main of 2026,
`tensorrt_llm/serve/tool_parser/gemma4_parser.py`; vllm-project/vllm, `vllm/tool_parsers/gemma4_tool_parser.py`.
"""

import msgspec

from worker_agent.api.parsers.calls import NAME_CHARACTERS_MAX, ToolParser
from worker_agent.api.parsers.reader import HELD_CHARACTERS_MAX, Rejected, Steps
from worker_agent.api.parsers.values import quoted

_CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_KEY_MARKS = (":", ",", "}", _QUOTE, _CALL_END)
_VALUE_MARKS = (",", "{", "}", "[", "]", _QUOTE, _CALL_END)
_CLOSING = {"{": "}", "[": "]"}
_NULLS = ("null", "none", "nil")


class Gemma4Parser(ToolParser):
    """Reads such calls."""

    markers = (_CALL,)
    special_tokens = (_CALL, _CALL_END, _QUOTE)
    stop_tokens = ("<|tool_response>",)

    def _call(self, marker: str) -> Steps[None]:
        del marker
        yield from self._reader.expect("call:")
        name, _ = yield from self._reader.before(("{",), NAME_CHARACTERS_MAX)
        self._start(name.strip())
        self._arguments("{")
        yield from self._members()
        self._end()
        yield from self._reader.skip_space()
        yield from self._reader.literal(_CALL_END)

    def _members(self) -> Steps[None]:
        """Read up to the bracket that closes the arguments, or to the call's end."""
        open_brackets, comma, needs_value = ["}"], "", False
        while open_brackets:
            is_key = open_brackets[-1] == "}" and not needs_value
            text, mark = yield from self._reader.before(_KEY_MARKS if is_key else _VALUE_MARKS, HELD_CHARACTERS_MAX)
            text = text.strip()
            if is_key and mark == _QUOTE:
                text, _ = yield from self._reader.before((_QUOTE,), HELD_CHARACTERS_MAX)
                _, mark = yield from self._reader.before(_KEY_MARKS, HELD_CHARACTERS_MAX)
            if mark == ":":
                self._arguments(f"{comma}{quoted(text)}: ")
                comma, needs_value = "", True
                continue
            is_whole = mark in (_QUOTE, *_CLOSING)
            if not is_key and not is_whole and (text or needs_value):
                self._arguments(comma + _bare(text))
                comma, needs_value = ", ", False
            if mark == _QUOTE:
                self._arguments(f'{comma}"')
                if not (yield from self._reader.until((_QUOTE,), lambda part: self._arguments(quoted(part)[1:-1]))):
                    raise Rejected
                self._arguments('"')
                comma, needs_value = ", ", False
            elif mark in _CLOSING:
                self._arguments(comma + mark)
                open_brackets.append(_CLOSING[mark])
                comma, needs_value = "", False
            elif mark == _CALL_END:
                self._arguments("".join(reversed(open_brackets)))
                return
            elif mark != ",":
                self._arguments(open_brackets.pop())
                comma = ", "


def _bare(text: str) -> str:
    if text.lower() in _NULLS:
        return "null"
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return quoted(text)
    return text
