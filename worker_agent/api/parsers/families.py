"""One answer's text through the parsers of its model: reasoning first, calls in the remaining text.

    the request                              here
    tools absent, empty, tool_choice none    calls are not parsed: their text is content
    tool_choice required, or a function      as auto: the engine may be guided (`forced_calls.py`)
    parallel_tool_calls false                the first call is kept, others are dropped
    include_reasoning false                  reasoning is dropped

An answer that stops and has calls ends with `tool_calls`, unless a call was never closed.

Parsers have the names that TensorRT-LLM, SGLang and vLLM have for them. gpt_oss reads calls and reasoning in one
format: either of the two settings chooses it; the other is empty or names it, too.
Source: the OpenAI interface; `include_reasoning`: vLLM's interface; names: vllm-project/vllm,
`vllm/tool_parsers/__init__.py`, `vllm/reasoning/__init__.py`; sgl-project/sglang,
`python/sglang/srt/function_call/function_call_parser.py`; NVIDIA/TensorRT-LLM,
`tensorrt_llm/serve/tool_parser/tool_parser_factory.py`, `tensorrt_llm/llmapi/reasoning_parser.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from worker_agent.api.parsers.calls import (
    AnswerOptions,
    ContentDelta,
    Event,
    Parser,
    ReasoningDelta,
    ToolParser,
    joined,
)
from worker_agent.api.parsers.forced_calls import Format, forced_calls
from worker_agent.api.parsers.json_calls import HermesParser, Llama3JsonParser, MistralParser
from worker_agent.api.parsers.reasoning import THOUGHTS, ThinkParser
from worker_agent.api.parsers.tag_calls import DeepSeekV32Parser, Glm46Parser, MiniMaxM2Parser, Qwen3CoderParser
from worker_agent.api.parsers.token_calls import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    Gemma4Parser,
    HarmonyParser,
    KimiK2Parser,
)
from worker_agent.api.parsers.values import Tool

_GPT_OSS = "gpt_oss"
_FAMILIES: Mapping[str, type[ToolParser]] = {
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
_CALL_ALIASES = _ALIASES | {"qwen3": "hermes"}
_REASONING_ALIASES = _ALIASES | {"deepseek_v3": "deepseek_v32", "deepseek-v3": "deepseek_v32", "minimax": "minimax_m2"}
"""Of DeepSeek the engines name one parser of reasoning for all models from V3.1 on."""


class AnswerParser:
    """Finds the events of one choice. `reasoning`, if not None, splits the text before `tools`."""

    def __init__(self, reasoning: Parser | None, tools: ToolParser | None, wishes: AnswerOptions) -> None:
        self._reasoning, self._tools, self._wishes = reasoning, tools, wishes

    @property
    def calls(self) -> int:
        """How many of the kept calls have begun."""
        calls = 0 if self._tools is None else self._tools.calls
        return min(calls, 1) if self._wishes.only_first_call else calls

    @property
    def has_open_call(self) -> bool:
        """Whether the last kept call has begun and not ended."""
        return self._tools is not None and self._tools.has_open_call and self._tools.calls <= max(1, self.calls)

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""
        return self._kept(self._called([ContentDelta(text)] if self._reasoning is None else self._reasoning.feed(text)))

    def finish(self) -> list[Event]:
        """Return the withheld events, after the last text."""
        last = self._called([] if self._reasoning is None else self._reasoning.finish())
        return self._kept(last + ([] if self._tools is None else self._tools.finish()))

    def finish_reason(self, of_engine: str) -> str:
        """Return the answer's finish reason, given the engine's `of_engine`."""
        return "tool_calls" if of_engine == "stop" and self.calls and not self.has_open_call else of_engine

    def _called(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        read = (self._tools.feed(each.text) if isinstance(each, ContentDelta) else [each] for each in events)
        return list(chain.from_iterable(read))

    def _kept(self, events: list[Event]) -> list[Event]:
        return joined([event for event in events if self._is_kept(event)])

    def _is_kept(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._wishes.keeps_reasoning
        return isinstance(event, ContentDelta) or event.index == 0 or not self._wishes.only_first_call


class AnswerFormat:
    """The parsers of one worker; `parses` is false without any.

    They must see the text of `special_tokens`; `stop_tokens` end an answer.
    """

    def __init__(self, tool_call_parser: str = "", reasoning_parser: str = "") -> None:
        """Take the parsers by name; empty: none. Raise ValueError, which lists the allowed names, for another name."""
        tools = _own_name(tool_call_parser, _CALL_ALIASES, _FAMILIES, TOOL_CALL_PARSERS)
        reasoning = _own_name(reasoning_parser, _REASONING_ALIASES, (*THOUGHTS, _GPT_OSS), REASONING_PARSERS)
        if _GPT_OSS in (tools, reasoning):
            if {tools, reasoning} - {"", _GPT_OSS}:
                raise ValueError(
                    f"found tool_call_parser {tools} beside reasoning_parser {reasoning}, allowed {_GPT_OSS} for both:"
                    " one format has calls and reasoning"
                )
            tools = reasoning = _GPT_OSS
        self._reads_both = tools == _GPT_OSS
        self._family = _FAMILIES[tools] if tools else None
        self._thought = THOUGHTS.get(reasoning)
        self.parses = bool(tools or reasoning)
        self.special_tokens = self._family.special_tokens if self._family else ()
        if self._thought is not None:
            self.special_tokens += (self._thought.opening, self._thought.closing)
        self.stop_tokens = self._family.stop_tokens if self._family else ()

    def parser(
        self, wishes: AnswerOptions, *, answer_id: str, choice: int, prompt_end: str = ""
    ) -> AnswerParser | None:
        """Return what reads one choice of an answer; None where its text is content as it is.

        `prompt_end` are the last characters of the prompt, special tokens too.
        """
        tools = None
        if self._family is not None and (wishes.finds_calls or self._reads_both):
            tools = self._family(f"{answer_id}/{choice}", wishes)
        reasoning: Parser | None = None
        if self._thought is not None and (inside := self._thought.begins(prompt_end)) is not None:
            calls = () if tools is None else tools.openings
            reasoning = ThinkParser(self._thought, begins_inside=inside, calls=calls)
        return None if tools is None and reasoning is None else AnswerParser(reasoning, tools, wishes)

    def forced(
        self, functions: Sequence[Tool], *, only_one: bool, prompt_end: str = "", begun: str = ""
    ) -> Format | None:
        """Return the structural tag of an answer that calls some of the functions, and goes on behind `begun`.

        None: the format has no structural tag, or no answer of calls can begin with `begun`.
        """
        form = None if self._family is None else self._family.form
        if self._family is None or form is None:
            return None
        inside = self._thought and self._thought.begins(prompt_end)
        tools = self._family("", AnswerOptions(finds_calls=True, tools=functions))
        return forced_calls(
            form,
            functions,
            only_one=only_one,
            thought=form.thought if inside is None else self._thought,
            begins_inside=bool(inside),
            openings=() if form.thought else tools.openings,
            begun=begun,
        )


def _own_name(name: str, aliases: Mapping[str, str], known: Collection[str], shown: tuple[str, ...]) -> str:
    """Return a parser's own name, given any of its names; raise ValueError for an unknown name."""
    own = aliases.get(name, name)
    if own and own not in known:
        raise ValueError(f"allowed {', '.join(shown)}, or none")
    return own


PLAIN = AnswerFormat()
"""No parsers: all text is content."""
