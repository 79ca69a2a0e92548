r"""DeepSeek V3 and R1, and V3.1: calls between special tokens, which are written [..] here.

    V3      [calls begin] { [call begin] function [sep] NAME \n```json\n ARGUMENTS \n``` [call end] } [calls end]
    V3.1    [calls begin] { [call begin] NAME [sep] ARGUMENTS [call end] } [calls end]

In the tokens' names U+FF5C stands for the bar, and U+2581 for a space.
Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/serve/tool_parser/deepseekv3_parser.py`, `deepseekv31_parser.py`;
vllm-project/vllm, `vllm/tool_parsers/deepseekv3_tool_parser.py`.
"""

from worker_agent.api.parsers.calls import NAME_CHARACTERS_MAX, ToolParser
from worker_agent.api.parsers.reader import Steps


def _token(name: str) -> str:
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


_CALLS, _CALLS_END = _token("tool calls begin"), _token("tool calls end")
_CALL, _SEPARATOR, _CALL_END = _token("tool call begin"), _token("tool sep"), _token("tool call end")
_FENCE, _FENCE_END = "```json\n", "\n```"


class DeepSeekV31Parser(ToolParser):
    """Reads the calls of V3.1."""

    markers = (_CALLS, _CALL, _CALLS_END)
    special_tokens = (_CALLS, _CALLS_END, _CALL, _SEPARATOR, _CALL_END)

    def _call(self, marker: str) -> Steps[None]:
        if marker == _CALL:
            yield from self._one()

    def _one(self) -> Steps[None]:
        name, _ = yield from self._reader.before((_SEPARATOR,), NAME_CHARACTERS_MAX)
        self._start(name.strip())
        yield from self._until_end((_CALL_END,))

    def _until_end(self, ends: tuple[str, ...]) -> Steps[None]:
        if (yield from self._reader.until(ends, self._arguments)):
            self._end()


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Reads the calls of V3: their type is always `function`, their arguments are fenced."""

    def _one(self) -> Steps[None]:
        yield from self._reader.before((_SEPARATOR,), NAME_CHARACTERS_MAX)
        name, _ = yield from self._reader.before(("\n",), NAME_CHARACTERS_MAX)
        self._start(name.strip())
        yield from self._reader.literal(_FENCE)
        yield from self._until_end((_FENCE_END + _CALL_END, _CALL_END))
