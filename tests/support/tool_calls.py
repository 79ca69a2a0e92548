"""The golden answers of model families: what a model writes, and what clients read of it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import RECORDINGS
from worker_agent.api.parsers.calls import (
    AnswerOptions,
    AnswerParser,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStarted,
    joined,
)
from worker_agent.api.parsers.families import AnswerFormat

_DIRECTORY = RECORDINGS / "tool_calls"


class Read(NamedTuple):
    """What came of an answer; None for content and reasoning that there are none of."""

    content: str | None
    reasoning: str | None
    tool_calls: list[dict[str, str]]


class Case(NamedTuple):
    """One answer. `is_open`: a call in it never closes."""

    family: str
    name: str
    text: str
    tool_call_parser: str
    reasoning_parser: str
    tools: list[dict[str, Any]]
    prompt_end: str
    read: Read
    finish_reason: str
    is_open: bool

    def parser(self) -> AnswerParser:
        answer_format = AnswerFormat(self.tool_call_parser, self.reasoning_parser)
        wishes = AnswerOptions(tools=self.tools)
        return answer_format.parser(wishes, "chatcmpl-1/0", prompt_end=self.prompt_end)


def golden_cases() -> list[Case]:
    """Return all answers of all families."""
    return [_case(path.stem, file, case) for path in sorted(_DIRECTORY.glob("*.json")) for file, case in _cases(path)]


def _cases(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    file = json.loads(path.read_text())
    return [(file, case) for case in file["cases"]]


def _case(family: str, file: dict[str, Any], case: dict[str, Any]) -> Case:
    return Case(
        family=family,
        name=case["name"],
        text=case["text"],
        tool_call_parser=file["tool_call_parser"],
        reasoning_parser=file["reasoning_parser"],
        tools=file["tools"],
        prompt_end=case.get("prompt_end", ""),
        read=Read(case["content"], case["reasoning"], case["tool_calls"]),
        finish_reason=case["finish_reason"],
        is_open=case.get("is_open", False),
    )


def fed(parser: AnswerParser, chunks: list[str]) -> list[Event]:
    """Return the events of these chunks, without the end."""
    return joined([event for chunk in chunks for event in parser.feed(chunk)])


def parsed(parser: AnswerParser, chunks: list[str]) -> list[Event]:
    """Return the events of a whole answer in these chunks."""
    return joined(fed(parser, chunks) + parser.finish())


def read_of(events: list[Event]) -> Read:
    """Return what a client makes of the events; each call begins before its arguments, in turn."""
    calls: list[dict[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStarted):
            assert event.index == len(calls)
            calls.append({"name": event.name, "arguments": ""})
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(calls) - 1
            calls[event.index]["arguments"] += event.text
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return Read(content or None, reasoning or None, calls)
