r"""Calls between special tokens. Those of DeepSeek and Kimi have JSON, passed on as written.

In their table [x] is a special token, and { } repeats; in the grammar of harmony [ ] is optional.

    DeepSeek V3, R1    [calls begin] { [call begin] function [sep] NAME \n```json\n ARGUMENTS \n``` [call end] }
                       [calls end]
    DeepSeek V3.1      [calls begin] { [call begin] NAME [sep] ARGUMENTS [call end] } [calls end]
    Kimi K2, K2.5      [section begin] { [call begin] functions.NAME:NUMBER [argument begin] ARGUMENTS [call end] }
                       [section end]

In the names of DeepSeek's tokens U+FF5C stands for the bar, and U+2581 for a space. What Kimi writes before the
arguments is the call's id: its templates repeat it with the result. A call without a number, or with an id that the
answer has already, gets an id of ours.
Source: the chat templates of deepseek-ai/DeepSeek-V3.1, moonshotai/Kimi-K2-Instruct (and its
`docs/tool_call_guidance.md`) and Kimi-K2.5; NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/tool_parser/`:
`deepseekv3_parser.py`, `deepseekv31_parser.py`, `kimi_k2_tool_parser.py`; vllm-project/vllm,
`vllm/tool_parsers/`: `deepseekv3_tool_parser.py`, `kimi_k2_tool_parser.py`.

Gemma 4: calls in a notation of its own, which become JSON as they come.

    <|tool_call>call:NAME{KEY:VALUE, ...}<tool_call|>

    a value     <|"|>text<|"|>, exactly; a number, true, false, null (also none, nil); {KEY:VALUE, ...}; [VALUE, ...]
    a key       bare, or between <|"|>
    other text  is a string if it is a value; a key without a value has "". The call's end closes open brackets

The model ends its turn with <|tool_response> after calls, which is a stop token.
Source: the chat template of google/gemma-4-31B-it; NVIDIA/TensorRT-LLM, main of 2026,
`tensorrt_llm/serve/tool_parser/gemma4_parser.py`; vllm-project/vllm, `vllm/tool_parsers/gemma4_tool_parser.py`.

gpt-oss: the harmony format. Its messages have a channel and may have a recipient.

    [<|start|>assistant [to=RECIPIENT]] [<|channel|>CHANNEL [to=RECIPIENT]] [<|constrain|>TYPE] <|message|> TEXT
    <|end|>, <|call|> or <|return|>

    a message                                    is
    with a recipient                             a call, if calls are parsed; "functions." is not part of its name
    on the channel analysis                      reasoning
    on any other, as final and commentary        content

A second message of a kind begins on a new line. Text outside of messages is content, without the special tokens.
Source: openai/harmony, `docs/format.md`; NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/harmony_adapter.py`;
sgl-project/sglang, `python/sglang/srt/function_call/gpt_oss_detector.py`.
"""

import re

from worker_agent.api.parsers.calls import AnswerOptions, AnswerParser, CallForm, Thought
from worker_agent.api.parsers.reader import Rejected, Steps
from worker_agent.api.parsers.values import ANY, json_of, quoted

_FENCE, _FENCE_END = "```json\n", "\n```"
_FUNCTIONS = "functions."


def _token(name: str) -> str:
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


class TokenParser(AnswerParser):
    """Reads a name up to `separator`, and arguments up to `call_end`."""

    separator: str
    call_end: str

    def _one(self) -> Steps[None]:
        name, _ = yield from self._reader.before((self.separator,))
        self._start(name.strip())
        yield from self._until_end(self.call_end)

    def _until_end(self, *ends: str) -> Steps[None]:
        self._is_open = not (yield from self._reader.until(ends, self._arguments))


class DeepSeekV31Parser(TokenParser):
    """Reads the calls of V3.1."""

    section, section_end = _token("tool calls begin"), _token("tool calls end")
    call, separator, call_end = _token("tool call begin"), _token("tool sep"), _token("tool call end")
    special_tokens = (section, section_end, call, separator, call_end)
    form = CallForm(call, separator, call_end, section=(section, section_end))


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Reads the calls of V3: their type is always `function`, their arguments are fenced."""

    form = CallForm(
        f"{DeepSeekV31Parser.call}function{DeepSeekV31Parser.separator}",
        f"\n{_FENCE}",
        f"{_FENCE_END}{DeepSeekV31Parser.call_end}",
        section=(DeepSeekV31Parser.section, DeepSeekV31Parser.section_end),
        separator="\n",
    )

    def _one(self) -> Steps[None]:
        yield from self._reader.before((self.separator,))
        name, _ = yield from self._reader.before(("\n",))
        self._start(name.strip())
        yield from self._reader.literal(_FENCE)
        yield from self._until_end(_FENCE_END + self.call_end, self.call_end)


class KimiK2Parser(TokenParser):
    """Reads the calls of Kimi K2."""

    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, separator, call_end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    special_tokens = (section, section_end, call, separator, call_end)
    form = CallForm(
        f"{call}{_FUNCTIONS}",
        ":",
        call_end,
        pattern=f"[0-9]{{1,4}}{separator.replace('|', chr(92) + '|')}",
        section=(section, section_end),
    )

    def __init__(self, answer: str, options: AnswerOptions) -> None:
        self._ids = set[str]()
        super().__init__(answer, options)

    def _start(self, name: str, call_id: str = "") -> None:
        function, _, number = name.rpartition(":")
        if function and number.isascii() and number.isdigit():
            name, call_id = function, "" if name in self._ids else name
            self._ids.add(call_id)
        super()._start(name.removeprefix(_FUNCTIONS), call_id)


# ---------------------------------------------------------------- Gemma 4
_GEMMA_CALL, _GEMMA_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_KEY_MARKS = (":", ",", "}", _QUOTE, _GEMMA_END)
_VALUE_MARKS = (",", "{", "}", "[", "]", _QUOTE, _GEMMA_END)
_CLOSING = {"{": "}", "[": "]"}
_NULLS = ("none", "nil")


class Gemma4Parser(AnswerParser):
    """Reads the calls of Gemma 4."""

    call = _GEMMA_CALL
    special_tokens = (_GEMMA_CALL, _GEMMA_END, _QUOTE)
    stop_tokens = ("<|tool_response>",)
    form = CallForm(f"{_GEMMA_CALL}call:", "{", _GEMMA_END, is_json=False)

    def _one(self) -> Steps[None]:
        yield from self._reader.expect("call:")
        name, _ = yield from self._reader.before(("{",))
        self._start(name.strip())
        self._arguments("{")
        yield from self._members()
        self._is_open = False
        yield from self._reader.skip_space()
        yield from self._reader.literal(_GEMMA_END)

    def _members(self) -> Steps[None]:
        """Read up to the bracket that closes the arguments, or to the call's end."""
        open_brackets, comma, needs_value = ["}"], "", False
        while open_brackets:
            is_key = open_brackets[-1] == "}" and not needs_value
            text, mark = yield from self._reader.before(_KEY_MARKS if is_key else _VALUE_MARKS, None)
            text = text.strip()
            if is_key and mark == _QUOTE:
                text, _ = yield from self._reader.before((_QUOTE,), None)
                _, mark = yield from self._reader.before(_KEY_MARKS, None)
            if mark == ":":
                self._arguments(f"{comma}{quoted(text)}: ")
                comma, needs_value = "", True
                continue
            is_whole = mark in (_QUOTE, *_CLOSING)
            if not is_key and not is_whole and (text or needs_value):
                self._arguments(comma + json_of("null" if text.lower() in _NULLS else text, ANY))
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
            elif mark == _GEMMA_END:
                self._arguments("".join(reversed(open_brackets)))
                return
            elif mark != ",":
                self._arguments(open_brackets.pop())
                comma = ", "


# ---------------------------------------------------------------- gpt-oss
_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MESSAGE_ENDS = (_END, _CALL, _RETURN)
_ENDS = (*_MESSAGE_ENDS, _START)
_HEADER_CHARACTERS_MAX = 1024
_NO_MARKER = ("assistant", "to=")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")


class HarmonyParser(AnswerParser):
    """Reads the messages of gpt-oss. Without tools, messages with a recipient are content."""

    markers = (_START, _CHANNEL, _MESSAGE, *_MESSAGE_ENDS)
    special_tokens = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)
    stop_tokens = (_CALL, _RETURN)
    form = CallForm(
        f"{_CHANNEL}commentary to={_FUNCTIONS}",
        f" {_CONSTRAIN}json{_MESSAGE}",
        _CALL,
        is_one=True,
        thought=Thought(opening=f"{_CHANNEL}analysis{_MESSAGE}", closing=f"{_END}{_START}assistant"),
    )
    """`is_one`, because a call ends the answer."""

    def __init__(self, answer: str, options: AnswerOptions) -> None:
        self._shown = set[bool]()  # True once reasoning was shown, False once content was
        super().__init__(answer, options)

    def _begin(self) -> Steps[None]:
        while (yield from self._reader.peek()).isspace():
            self._content(self._reader.take())
        if begun := (yield from self._reader.literal(*_NO_MARKER)):  # the prompt has `<|start|>`, or more
            yield from self._tried(begun)

    def _call(self, marker: str) -> Steps[None]:
        while marker and marker not in _MESSAGE_ENDS:
            header = yield from self._header(marker)
            if header is None:
                return
            recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
            if recipient and self.options.tools:
                self._start(recipient[1].removeprefix("functions."))
                marker = yield from self._reader.until(_ENDS, self._arguments)
                self._is_open = not marker
            else:
                is_reasoning = not recipient and channel is not None and channel[1] == "analysis"
                show = self._reasoning if is_reasoning else self._content
                if is_reasoning in self._shown:
                    show("\n")
                self._shown.add(is_reasoning)
                marker = yield from self._reader.until(_ENDS, show)

    def _header(self, marker: str) -> Steps[str | None]:
        """Return the text before <|message|>; None if the answer ends within it."""
        self._reader.record(marker)
        if marker != _MESSAGE:
            try:
                yield from self._reader.before((_MESSAGE,), _HEADER_CHARACTERS_MAX)
            except Rejected:
                if marker in _NO_MARKER or not self._reader.ended:
                    raise
                self._is_open = bool(_RECIPIENT.search(self._reader.recorded()))
                return None
        return self._reader.recorded()
