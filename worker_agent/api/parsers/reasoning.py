"""Reasoning between <think> and </think>, or between the tokens of a channel.

    deepseek_r1, minimax_m2    the answer begins with reasoning, with or without <think>
    qwen3, glm46, kimi_k2,     reasoning begins with <think> at the beginning of the answer or at the end of the prompt
    deepseek_v32
    gemma4                     reasoning is what stands between <|channel>thought and <channel|>, any number of times
    the prompt ends            with <think>: the answer begins with reasoning; with </think>: it has none
    a call                     ends reasoning without </think>, if calls are parsed; the next </think> is dropped

Text between the tags is reasoning, with its white space; text after them is content.
Source: the chat templates of these models; NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/reasoning_parser.py`;
vllm-project/vllm, `vllm/reasoning/`: `deepseek_r1_reasoning_parser.py`, `qwen3_reasoning_parser.py`,
`kimi_k2_reasoning_parser.py`, `gemma4_reasoning_parser.py`; sgl-project/sglang,
`python/sglang/srt/parser/reasoning_parser.py`.
"""

from worker_agent.api.parsers.calls import Parser, Thought
from worker_agent.api.parsers.reader import Steps

THOUGHTS = {
    "deepseek_r1": Thought(begins_inside=True),
    "qwen3": Thought(),
    "glm46": Thought(),
    "kimi_k2": Thought(),
    "deepseek_v32": Thought(),
    "minimax_m2": Thought(begins_inside=True),
    "gemma4": Thought(opening="<|channel>", closing="<channel|>", label="thought\n", repeats=True),
}


class ThinkParser(Parser):
    """Separates reasoning from content. `begins_inside`: reasoning began before the answer's first character.

    `calls`: the beginnings of calls; each ends reasoning.
    """

    def __init__(self, thought: Thought, *, begins_inside: bool, calls: tuple[str, ...] = ()) -> None:
        self._thought, self._begins_inside = thought, begins_inside
        self._ends = (thought.closing, *calls)
        super().__init__()

    def _steps(self) -> Steps[None]:
        reader, thought, space = self._reader, self._thought, ""
        while (yield from reader.peek()).isspace():
            space += reader.take()
        if (yield from reader.literal(thought.opening)):
            yield from self._inside()
        elif self._begins_inside:
            self._reasoning(space)
            yield from self._inside()
        else:
            self._content(space)
        while (yield from reader.until((thought.opening,) if thought.repeats else (), self._content)):
            yield from self._inside()

    def _inside(self) -> Steps[None]:
        if self._thought.label:
            yield from self._reader.literal(self._thought.label)
        end = yield from self._reader.until(self._ends, self._reasoning)
        if end and end != self._thought.closing:
            self._content(end)
            yield from self._reader.until((self._thought.closing,), self._content)
