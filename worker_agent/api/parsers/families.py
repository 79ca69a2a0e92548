"""Parsers of answers, by the names that TensorRT-LLM, SGLang and vLLM have for them.

    the request                              here
    tools absent, empty, tool_choice none    calls are not parsed: their text is content
    tool_choice required, or a function      as auto: the engine may be guided (`forced_calls.py`)
    parallel_tool_calls false                the first call is kept, others are dropped
    include_reasoning false                  reasoning is dropped

    the reasoning of
    deepseek_r1, minimax_m2    is at the beginning of the answer, with or without <think>
    qwen3, glm46, kimi_k2,     begins with <think>, at the beginning of the answer or at the end of the prompt
    deepseek_v32
    gemma4                     is the text between <|channel>thought and <channel|>, any number of times

If the prompt ends with <think>, the answer begins with reasoning; if it ends with </think>, the answer has none. If
calls are parsed, the beginning of a call also ends reasoning, and the next </think> is dropped. Text between the tags
is reasoning, with its white space; text after them is content.

An answer that stops and has calls has the finish reason `tool_calls`, unless a call was never closed.

gpt_oss reads calls and reasoning in one format: either of the two settings chooses it; the other must be empty or name
it, too.
Source: the OpenAI interface; `include_reasoning`: vLLM's interface; names: vllm-project/vllm,
`vllm/tool_parsers/__init__.py`, `vllm/reasoning/__init__.py`; sgl-project/sglang,
`python/sglang/srt/function_call/function_call_parser.py`; NVIDIA/TensorRT-LLM,
`tensorrt_llm/serve/tool_parser/tool_parser_factory.py`. Reasoning: the chat templates of these models;
NVIDIA/TensorRT-LLM, `tensorrt_llm/llmapi/reasoning_parser.py`; vllm-project/vllm, `vllm/reasoning/`:
`deepseek_r1_reasoning_parser.py`, `qwen3_reasoning_parser.py`, `kimi_k2_reasoning_parser.py`,
`gemma4_reasoning_parser.py`; sgl-project/sglang, `python/sglang/srt/parser/reasoning_parser.py`.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from worker_agent.api.parsers.calls import AnswerOptions, AnswerParser, Thought
from worker_agent.api.parsers.json_calls import HermesParser, Llama3JsonParser, MistralParser
from worker_agent.api.parsers.tag_calls import DeepSeekV32Parser, Glm46Parser, MiniMaxM2Parser, Qwen3CoderParser
from worker_agent.api.parsers.token_calls import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    Gemma4Parser,
    HarmonyParser,
    KimiK2Parser,
)

_GPT_OSS = "gpt_oss"
_FAMILIES: Mapping[str, type[AnswerParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
    "glm46": Glm46Parser,
    "minimax_m2": MiniMaxM2Parser,
    "kimi_k2": KimiK2Parser,
    "gemma4": Gemma4Parser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
    _GPT_OSS: HarmonyParser,
}
_THOUGHTS = {
    "deepseek_r1": Thought(begins_inside=True),
    "qwen3": Thought(),
    "glm46": Thought(),
    "kimi_k2": Thought(),
    "deepseek_v32": Thought(),
    "minimax_m2": Thought(begins_inside=True),
    "gemma4": Thought(opening="<|channel>", closing="<channel|>", label="thought\n", repeats=True),
}

TOOL_CALL_PARSERS = (*_FAMILIES, "harmony")
REASONING_PARSERS = (*_THOUGHTS, _GPT_OSS, "harmony")
_ALIASES = {
    "harmony": _GPT_OSS,
    "openai": _GPT_OSS,
    "openai_gptoss": _GPT_OSS,
    "gpt-oss": _GPT_OSS,
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseek-r1": "deepseek_r1",
    "glm45": "glm46",
    "glm47": "glm46",
    "minimax-m2": "minimax_m2",
}
_CALL_ALIASES = _ALIASES | {"qwen3": "hermes"}
_REASONING_ALIASES = _ALIASES | {"deepseek_v3": "deepseek_v32", "deepseek-v3": "deepseek_v32", "minimax": "minimax_m2"}
"""The engines use the name `deepseek_v3` for the reasoning of all DeepSeek models since V3.1."""


class AnswerFormat:
    """The parsers of one worker. They must see the text of `special_tokens`; `stop_tokens` end an answer."""

    def __init__(self, tool_call_parser: str = "", reasoning_parser: str = "") -> None:
        """Take the parsers by name; empty: none. Raise ValueError, which lists the allowed names, for another name."""
        tools = _own_name(tool_call_parser, _CALL_ALIASES, TOOL_CALL_PARSERS)
        reasoning = _own_name(reasoning_parser, _REASONING_ALIASES, REASONING_PARSERS)
        if _GPT_OSS in (tools, reasoning):
            if {tools, reasoning} - {"", _GPT_OSS}:
                raise ValueError(
                    f"found tool_call_parser {tools} beside reasoning_parser {reasoning}, allowed {_GPT_OSS} for both:"
                    " one format has calls and reasoning"
                )
            tools = reasoning = _GPT_OSS
        self._reads_both = tools == _GPT_OSS
        self._family = _FAMILIES[tools] if tools else AnswerParser
        self._thought = _THOUGHTS.get(reasoning)
        tags = () if self._thought is None else (self._thought.opening, self._thought.closing)
        self.special_tokens, self.stop_tokens = (*self._family.special_tokens, *tags), self._family.stop_tokens

    def parser(self, options: AnswerOptions, answer: str = "", *, prompt_end: str = "") -> AnswerParser:
        """Return a parser for one choice, named `answer`: the ids of its calls are hashes of that name.

        `prompt_end` are the last characters of the prompt, special tokens too.
        """
        inside = None if self._thought is None else self._thought.begins(prompt_end)
        if inside is not None:
            options = replace(options, thought=self._thought, begins_inside=inside)
        family = self._family if options.tools or self._reads_both else AnswerParser
        parser = family(answer, options)
        parser.shown_tokens = () if inside is None and family is AnswerParser else self.special_tokens
        return parser


def _own_name(name: str, aliases: Mapping[str, str], known: tuple[str, ...]) -> str:
    """Return a parser's own name, given any of its names; raise ValueError for an unknown name."""
    own = aliases.get(name, name)
    if own and own not in known:
        raise ValueError(f"allowed {', '.join(known)}, or none")
    return own


PLAIN = AnswerFormat()
"""No parsers: all text is content."""
