"""The events of an answer's text, and the common part of the parsers of all families, which turn text into them.

A call is one `ToolCallStarted`, then any number of `ToolCallArguments` of the same index. Indexes count from 0. The
arguments, joined, are the text that the model wrote; a model may write text that is not JSON.

white space      at the beginning of the content is held back, and dropped if a call follows. After a call it is dropped
a call           begins once its function's name is complete. Text that only looked like its beginning is content,
                 as the model wrote it
a call that is   its arguments so far are sent; `has_open_call` is true. It is also true if the answer ends within the
never closed     beginning of a call, which then is content
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from worker_agent.api.parsers.reader import NAME_CHARACTERS_MAX, Reader, Rejected, Steps
from worker_agent.api.parsers.values import Tool

_CHARACTERS_AT_ONCE = 4096
"""Longer text is read in parts: every search for a marker scans the whole text that is there."""


class ContentDelta(msgspec.Struct, frozen=True, tag=True):
    """More of the text that is meant for the user; not empty."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag=True):
    """More of the model's reasoning; not empty."""

    text: str


class ToolCallStarted(msgspec.Struct, frozen=True, tag=True):
    """A call of the function `name` begins."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, tag=True):
    """More of the arguments of a call that has begun; not empty."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStarted | ToolCallArguments


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbours of one kind joined: text that continues the event before is added to it."""
    runs: list[list[Any]] = [
        list(run) for _, run in groupby(events, lambda each: (type(each), getattr(each, "index", 0)))
    ]
    return [
        run[0] if len(run) == 1 else msgspec.structs.replace(run[0], text="".join(each.text for each in run))
        for run in runs
    ]


class Thought(NamedTuple):
    """The tags around a family's reasoning. `label` follows the opening tag, and is not shown.

    With `begins_inside` an answer begins with reasoning, even without the tag. With `repeats` there may be more
    reasoning behind content.
    """

    begins_inside: bool = False
    opening: str = "<think>"
    closing: str = "</think>"
    label: str = ""
    repeats: bool = False

    def begins(self, prompt_end: str) -> bool | None:
        """Return whether an answer behind this prompt begins with reasoning; None: it has no reasoning."""
        end = prompt_end.rstrip()
        if end.endswith(self.closing):
            return False if self.repeats else None
        return self.begins_inside or end.endswith((self.opening + self.label).rstrip())


class CallForm(NamedTuple):
    """How a family writes a call: `begin`, its name, `behind`, what matches `pattern`, its arguments, `end`.

    All calls together are between the texts of `section`, with `separator` between them. Without `is_json` the
    arguments are any text; with `is_one` there is one call. `thought` is the reasoning of a family that has one parser
    for both.
    """

    begin: str
    behind: str
    end: str
    pattern: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""
    is_json: bool = True
    is_one: bool = False
    thought: Thought | None = None


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request's options for the events of its answer. Without `finds_calls` its `tools` are empty."""

    finds_calls: bool = False
    tools: Sequence[Tool] = ()
    only_first_call: bool = False
    keeps_reasoning: bool = True


class Parser(ABC):
    """Reads one answer's text. `_steps` reads `_reader` and puts what it finds into `_events`."""

    def __init__(self) -> None:
        self._reader, self._events = Reader(), list[Event]()
        self._running = self._steps()
        next(self._running)

    @abstractmethod
    def _steps(self) -> Steps[None]:
        """Read the text to its end."""

    def feed(self, text: str) -> list[Event]:
        """Return what `text` completes."""
        for at in range(0, len(text), _CHARACTERS_AT_ONCE):
            self._reader.add(text[at : at + _CHARACTERS_AT_ONCE])
            next(self._running)
        return self._drained()

    def finish(self) -> list[Event]:
        """Return what was held back; no more text comes."""
        self._reader.ended = True
        next(self._running, None)
        return self._drained()

    def _drained(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))


class ToolParser(Parser):
    """Finds calls, which begin with `call`. `calls` counts those that have begun; `answer` names their choice.

    It needs the text of its `special_tokens`; `stop_tokens` end an answer.
    """

    special_tokens: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()
    call = ""
    """The beginning of a call."""
    section = section_end = ""
    """What stands before the first call, and behind the last; empty: nothing."""
    markers: tuple[str, ...] = ()
    """What begins a call, or a section; empty: `section` and `call`."""
    openings: tuple[str, ...] = ()
    """How a call begins where a marker alone may be a word of a thought; empty: as the markers."""
    form: CallForm | None = None
    """How calls are forced; None: they cannot be."""

    def __init__(self, answer: str, options: AnswerOptions) -> None:
        self.markers = self.markers or tuple(filter(None, (self.section, self.call)))
        self.openings = self.openings or self.markers
        self._answer, self._options = answer, options
        self._space, self._is_at_edge = "", True  # at the answer's begin, or behind a call
        self.calls, self.has_open_call = 0, False
        super().__init__()

    def _one(self) -> Steps[None]:
        """Read one call behind its beginning; return with it open where the text ends first."""
        raise NotImplementedError

    def _call(self, marker: str) -> Steps[None]:
        """Read one or several calls behind `marker`; raise `Rejected` if the text is no call.

        From the marker on the text is recorded, until `_start`.
        """
        reader = self._reader
        if self.section and marker == self.section:
            yield from reader.skip_space()
            yield from reader.expect(self.call)
        yield from self._one()
        while self.section and not self.has_open_call:
            yield from reader.skip_space()
            reader.record("")
            if (yield from reader.literal(self.call, self.section_end)) != self.call:
                return
            yield from self._one()

    def _steps(self) -> Steps[None]:
        while marker := (yield from self._reader.until(self.markers, self._content)):
            yield from self._tried(marker)
        if self._is_at_edge and not self.calls:
            super()._content(self._space)

    def _tried(self, marker: str) -> Steps[None]:
        self._reader.record(marker)
        calls = self.calls
        try:
            yield from self._call(marker)
        except Rejected:
            self.has_open_call = self._reader.ended and (bool(marker) or self.calls > calls)
            self._content(self._reader.recorded())
        self._reader.recorded()

    def _content(self, text: str) -> None:
        if self._is_at_edge:
            self._space += text
            if not self._space.strip():
                return
            text, self._is_at_edge = self._space.lstrip() if self.calls else self._space, False
        super()._content(text)

    def _start(self, name: str, call_id: str = "") -> None:
        """Begin a call; raise `Rejected` where there can be no function of this name. `call_id` is the model's own."""
        if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():  # JSON can name lone surrogates
            raise Rejected
        self._reader.recorded()
        digest = sha256(f"{self._answer}/{self.calls}".encode()).hexdigest()  # equal where another worker resumes
        self._events.append(ToolCallStarted(self.calls, call_id or self._id_of(digest), name))
        self.calls, self.has_open_call = self.calls + 1, True
        self._space, self._is_at_edge = "", True

    @staticmethod
    def _id_of(digest: str) -> str:
        return f"call_{digest[:24]}"

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self.calls - 1, text))
