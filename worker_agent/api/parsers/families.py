"""The parsers by the names that TensorRT-LLM, SGLang and vLLM have for them.

gpt_oss reads calls and reasoning in one format: either of the two settings chooses it; the other is empty or names it,
too. Source: vllm-project/vllm, `vllm/tool_parsers/__init__.py`, `vllm/reasoning/__init__.py`; sgl-project/sglang,
`python/sglang/srt/function_call/function_call_parser.py`; NVIDIA/TensorRT-LLM,
`tensorrt_llm/serve/tool_parser/tool_parser_factory.py`, `tensorrt_llm/llmapi/reasoning_parser.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from worker_agent.api.parsers.answer import AnswerOptions, AnswerParser, call_id_of, short_call_id_of
from worker_agent.api.parsers.calls import CallId, Parser, ToolParser
from worker_agent.api.parsers.forced_calls import CALL_FORMS, Format, forced_calls
from worker_agent.api.parsers.gemma4 import Gemma4Parser
from worker_agent.api.parsers.harmony import HarmonyParser
from worker_agent.api.parsers.json_calls import HermesParser, Llama3JsonParser, MistralParser
from worker_agent.api.parsers.reasoning import THOUGHTS, ThinkParser
from worker_agent.api.parsers.tag_calls import DEEPSEEK_V32, GLM46, MINIMAX_M2, QWEN3_CODER, TagForm, TagParser
from worker_agent.api.parsers.token_calls import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser
from worker_agent.api.parsers.values import Tool

_GPT_OSS = "gpt_oss"


class _Family(NamedTuple):
    """A parser of calls. It needs the text of its special tokens; stop tokens end an answer."""

    make: Callable[[CallId, AnswerOptions], ToolParser]
    special_tokens: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()
    call_id: Callable[[str, int], CallId] = call_id_of


def _tags(form: TagForm) -> _Family:
    return _Family(lambda call_id, wishes: TagParser(form, call_id, wishes.tools), form.special_tokens)


_FAMILIES: Mapping[str, _Family] = {
    "hermes": _Family(lambda call_id, _: HermesParser(call_id), ("<tool_call>", "</tool_call>")),
    "llama3_json": _Family(lambda call_id, _: Llama3JsonParser(call_id), ("<|python_tag|>",), ("<|eom_id|>",)),
    "mistral": _Family(
        lambda call_id, _: MistralParser(call_id), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), (), short_call_id_of
    ),
    "qwen3_coder": _tags(QWEN3_CODER),
    "glm46": _tags(GLM46),
    "minimax_m2": _tags(MINIMAX_M2),
    "kimi_k2": _Family(lambda call_id, _: KimiK2Parser(call_id), KimiK2Parser.special_tokens),
    "gemma4": _Family(lambda call_id, _: Gemma4Parser(call_id), Gemma4Parser.special_tokens, Gemma4Parser.stop_tokens),
    "deepseek_v3": _Family(lambda call_id, _: DeepSeekV3Parser(call_id), DeepSeekV3Parser.special_tokens),
    "deepseek_v31": _Family(lambda call_id, _: DeepSeekV31Parser(call_id), DeepSeekV31Parser.special_tokens),
    "deepseek_v32": _tags(DEEPSEEK_V32),
    _GPT_OSS: _Family(
        lambda call_id, wishes: HarmonyParser(call_id, finds_calls=wishes.finds_calls),
        HarmonyParser.special_tokens,
        HarmonyParser.stop_tokens,
    ),
}

TOOL_CALL_PARSERS = (*_FAMILIES, "harmony")
REASONING_PARSERS = (*THOUGHTS, _GPT_OSS, "harmony")
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
_REASONING_ALIASES = _ALIASES | {"deepseek_v3": "deepseek_v32", "deepseek-v3": "deepseek_v32", "minimax": "minimax_m2"}
"""Of DeepSeek the engines name one parser of reasoning for all models from V3.1 on."""


class AnswerFormat:
    """The parsers of one worker. `parses`: there are any. They see `special_tokens`; `stop_tokens` end answers."""

    def __init__(self, tool_call_parser: str = "", reasoning_parser: str = "") -> None:
        """Take the parsers by name; empty: none. Raises ValueError, which says what is allowed."""
        tools, reasoning = canonical_tool_call_parser(tool_call_parser), canonical_reasoning_parser(reasoning_parser)
        if _GPT_OSS in (tools, reasoning):
            if {tools, reasoning} - {"", _GPT_OSS}:
                raise ValueError(
                    f"found tool_call_parser {tools} beside reasoning_parser {reasoning}, allowed {_GPT_OSS} for both:"
                    " one format has calls and reasoning"
                )
            tools = reasoning = _GPT_OSS
        self._reads_both = tools == _GPT_OSS
        self._family = _FAMILIES[tools] if tools else None
        self._form = CALL_FORMS.get(tools)
        self._reasoning = "" if self._reads_both else reasoning
        self.parses = bool(tools or reasoning)
        self.special_tokens = self._family.special_tokens if self._family else ()
        if self._reasoning:
            self.special_tokens += (THOUGHTS[self._reasoning].opening, THOUGHTS[self._reasoning].closing)
        self.stop_tokens = self._family.stop_tokens if self._family else ()

    def parser(
        self, wishes: AnswerOptions, *, answer_id: str, choice: int, prompt_end: str = ""
    ) -> AnswerParser | None:
        """Return what reads one choice of an answer; None where its text is content as it is.

        `prompt_end` are the last characters of the prompt, special tokens too.
        """
        tools = None
        if self._family is not None and (wishes.finds_calls or self._reads_both):
            tools = self._family.make(self._family.call_id(answer_id, choice), wishes)
        reasoning = self._think_parser(prompt_end, tools)
        return None if tools is None and reasoning is None else AnswerParser(reasoning, tools, wishes)

    def forced(
        self, functions: Sequence[Tool], *, only_one: bool, prompt_end: str = "", begun: str = ""
    ) -> Format | None:
        """Return the structural tag of an answer that calls some of the functions, and goes on behind `begun`.

        None: the format has none, or such an answer cannot begin so.
        """
        if self._form is None or self._family is None:
            return None
        if self._reads_both:
            return forced_calls(self._form, functions, only_one=only_one, thought=self._form.thought, begun=begun)
        thought = THOUGHTS.get(self._reasoning)
        inside = thought and thought.begins(prompt_end)
        tools = self._family.make(call_id_of("", 0), AnswerOptions(finds_calls=True, tools=functions))
        return forced_calls(
            self._form,
            functions,
            only_one=only_one,
            thought=None if inside is None else thought,
            begins_inside=bool(inside),
            openings=tools.openings or tools.markers,
            begun=begun,
        )

    def _think_parser(self, prompt_end: str, tools: ToolParser | None) -> Parser | None:
        if not self._reasoning:
            return None
        thought = THOUGHTS[self._reasoning]
        inside = thought.begins(prompt_end)
        if inside is None:
            return None
        calls = () if tools is None else tools.openings or tools.markers
        return ThinkParser(thought, begins_inside=inside, calls=calls)


def canonical_tool_call_parser(name: str) -> str:
    """Return the first of a parser's names; raise ValueError for one that there is not."""
    family = "hermes" if name == "qwen3" else _ALIASES.get(name, name)
    return _checked(family, tuple(_FAMILIES), TOOL_CALL_PARSERS)


def canonical_reasoning_parser(name: str) -> str:
    """Return the first of a parser's names; raise ValueError for one that there is not."""
    return _checked(_REASONING_ALIASES.get(name, name), (*THOUGHTS, _GPT_OSS), REASONING_PARSERS)


def _checked(family: str, names: tuple[str, ...], shown: tuple[str, ...]) -> str:
    if family and family not in names:
        raise ValueError(f"allowed {', '.join(shown)}, or none")
    return family


PLAIN = AnswerFormat()
"""No parsers: all text is content."""
