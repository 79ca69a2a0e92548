"""Reasoning between <think> and </think>.

    deepseek_r1      the answer begins with reasoning, with or without <think>
    qwen3            reasoning begins with <think> at the beginning of the answer or at the end of the prompt
    the prompt ends  with <think>: the answer begins with reasoning; with </think>: it has none
    a call           ends reasoning without </think>, if calls are parsed; the next </think> is dropped

Text between the tags is reasoning, with its white space; text after them is content.
Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/reasoning_parser.py`; vllm-project/vllm,
`vllm/reasoning/deepseek_r1_reasoning_parser.py`, `qwen3_reasoning_parser.py`; sgl-project/sglang,
`python/sglang/srt/parser/reasoning_parser.py`.
"""

from worker_agent.api.parsers.calls import Parser
from worker_agent.api.parsers.events import ContentDelta, ReasoningDelta
from worker_agent.api.parsers.reader import Steps

THINK, THINK_END = "<think>", "</think>"
_SPACE_CHARACTERS_MAX = 64


class ThinkParser(Parser):
    """Separates reasoning from content. `begins_inside`: reasoning began before the answer's first character.

    `calls`: the beginnings of calls; each ends reasoning.
    """

    def __init__(self, *, begins_inside: bool, calls: tuple[str, ...] = ()) -> None:
        self._begins_inside = begins_inside
        self._ends = (THINK_END, *calls)
        super().__init__()

    def _steps(self) -> Steps[None]:
        reader, space = self._reader, ""
        while (yield from reader.peek()).isspace() and len(space) < _SPACE_CHARACTERS_MAX:
            space += reader.take()
        if (yield from reader.literal(THINK)):
            yield from self._inside()
        elif self._begins_inside:
            self._reasoning(space)
            yield from self._inside()
        else:
            self._content(space)
        yield from reader.until((), self._content)

    def _inside(self) -> Steps[None]:
        end = yield from self._reader.until(self._ends, self._reasoning)
        if end and end != THINK_END:
            self._content(end)
            yield from self._reader.until((THINK_END,), self._content)

    def _reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def _content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))


def begins_inside(prompt_end: str, *, otherwise: bool) -> bool | None:
    """Return whether an answer behind this prompt begins with reasoning; None: it has no reasoning."""
    end = prompt_end.rstrip()
    if end.endswith(THINK_END):
        return None
    return True if end.endswith(THINK) else otherwise
