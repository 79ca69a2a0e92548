"""One answer's text through the parsers of its model: reasoning first, calls in the remaining text.

    the request                              here
    tools absent, empty, tool_choice none    calls are not parsed: their text is content
    tool_choice required, or a function      as auto: the engine may be guided (`forced_calls.py`)
    parallel_tool_calls false                the first call is kept, others are dropped
    include_reasoning false                  reasoning is dropped

An answer that stops and has calls ends with `tool_calls`, unless a call was never closed.
Source: the OpenAI interface; `include_reasoning`: vLLM's interface.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import msgspec

from worker_agent.api.parsers.calls import CallId, Parser, ToolParser
from worker_agent.api.parsers.events import ContentDelta, Event, ReasoningDelta, joined
from worker_agent.api.parsers.values import Tool

_ID_CHARACTERS = 24


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request's options for the events of its answer. Without `finds_calls` its `tools` are empty."""

    finds_calls: bool = False
    tools: Sequence[Tool] = ()
    only_first_call: bool = False
    keeps_reasoning: bool = True


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
        is_kept = self._tools is not None and self._tools.calls <= max(1, self.calls)
        return is_kept and self._tools is not None and self._tools.has_open_call

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""
        if self._reasoning is None:
            return self._kept(self._called(ContentDelta(text)))
        return self._kept([each for event in self._reasoning.feed(text) for each in self._called(event)])

    def finish(self) -> list[Event]:
        """Return the withheld events, after the last text."""
        last = [] if self._reasoning is None else self._reasoning.finish()
        events = [each for event in last for each in self._called(event)]
        return self._kept(events + ([] if self._tools is None else self._tools.finish()))

    def finish_reason(self, of_engine: str) -> str:
        """Return the answer's finish reason, given the engine's `of_engine`."""
        return "tool_calls" if of_engine == "stop" and self.calls and not self.has_open_call else of_engine

    def _called(self, event: Event) -> list[Event]:
        if self._tools is None or not isinstance(event, ContentDelta):
            return [event]
        return self._tools.feed(event.text)

    def _kept(self, events: list[Event]) -> list[Event]:
        return joined([event for event in events if self._is_kept(event)])

    def _is_kept(self, event: Event) -> bool:
        if isinstance(event, ReasoningDelta):
            return self._wishes.keeps_reasoning
        return isinstance(event, ContentDelta) or event.index == 0 or not self._wishes.only_first_call


def call_id_of(answer_id: str, choice: int) -> CallId:
    """Return the function that names the calls of one choice; a worker that resumes the answer gives equal names."""
    return _named(answer_id, choice, lambda digest: f"call_{digest[:_ID_CHARACTERS]}")


def short_call_id_of(answer_id: str, choice: int) -> CallId:
    """Return the same with names of nine letters and digits, which Mistral's templates require.

    Source: vllm-project/vllm, `vllm/entrypoints/openai/tool_parsers/mistral_tool_parser.py`.
    """
    return _named(answer_id, choice, lambda digest: digest[:9])


def _named(answer_id: str, choice: int, shape: Callable[[str], str]) -> CallId:
    return lambda index: shape(sha256(f"{answer_id}/{choice}/{index}".encode()).hexdigest())
