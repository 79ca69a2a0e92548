r"""Calls between special tokens, whose arguments are JSON, passed on as written. Tokens are written [..] here.

    DeepSeek V3, R1    [calls begin] { [call begin] function [sep] NAME \n```json\n ARGUMENTS \n``` [call end] }
                       [calls end]
    DeepSeek V3.1      [calls begin] { [call begin] NAME [sep] ARGUMENTS [call end] } [calls end]
    Kimi K2, K2.5      [section begin] { [call begin] functions.NAME:NUMBER [argument begin] ARGUMENTS [call end] }
                       [section end]

In the names of DeepSeek's tokens U+FF5C stands for the bar, and U+2581 for a space. What Kimi writes before the
arguments is the call's id: its templates repeat it with the result. A call without a number, or with an id that the
answer has already, gets one of ours.
Source: the chat templates of deepseek-ai/DeepSeek-V3.1, moonshotai/Kimi-K2-Instruct (and its
`docs/tool_call_guidance.md`) and Kimi-K2.5; NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/tool_parser/`:
`deepseekv3_parser.py`, `deepseekv31_parser.py`, `kimi_k2_tool_parser.py`; vllm-project/vllm,
`vllm/tool_parsers/`: `deepseekv3_tool_parser.py`, `kimi_k2_tool_parser.py`.
"""

from worker_agent.api.parsers.calls import NAME_CHARACTERS_MAX, CallId, SectionParser
from worker_agent.api.parsers.reader import Steps

_FENCE, _FENCE_END = "```json\n", "\n```"
_FUNCTIONS = "functions."


def _token(name: str) -> str:
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


class TokenParser(SectionParser):
    """Reads a name up to `separator`, and arguments up to `call_end`."""

    separator: str
    call_end: str
    special_tokens: tuple[str, ...]

    def __init__(self, call_id: CallId) -> None:
        self.markers = (self.section, self.call)
        super().__init__(call_id)

    def _one(self) -> Steps[None]:
        name, _ = yield from self._reader.before((self.separator,), NAME_CHARACTERS_MAX)
        self._named(name.strip())
        yield from self._until_end(self.call_end)

    def _named(self, name: str) -> None:
        self._start(name)

    def _until_end(self, *ends: str) -> Steps[None]:
        self.has_open_call = not (yield from self._reader.until(ends, self._arguments))


class DeepSeekV31Parser(TokenParser):
    """Reads the calls of V3.1."""

    section, section_end = _token("tool calls begin"), _token("tool calls end")
    call, separator, call_end = _token("tool call begin"), _token("tool sep"), _token("tool call end")
    special_tokens = (section, section_end, call, separator, call_end)


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Reads the calls of V3: their type is always `function`, their arguments are fenced."""

    def _one(self) -> Steps[None]:
        yield from self._reader.before((self.separator,), NAME_CHARACTERS_MAX)
        name, _ = yield from self._reader.before(("\n",), NAME_CHARACTERS_MAX)
        self._start(name.strip())
        yield from self._reader.literal(_FENCE)
        yield from self._until_end(_FENCE_END + self.call_end, self.call_end)


class KimiK2Parser(TokenParser):
    """Reads the calls of Kimi K2."""

    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, separator, call_end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    special_tokens = (section, section_end, call, separator, call_end)

    def __init__(self, call_id: CallId) -> None:
        self._ids = set[str]()
        super().__init__(call_id)

    def _named(self, name: str) -> None:
        function, _, number = name.rpartition(":")
        is_id = bool(function) and number.isascii() and number.isdigit()
        self._start(
            (function if is_id else name).removeprefix(_FUNCTIONS), name if is_id and name not in self._ids else ""
        )
        self._ids.add(name)
