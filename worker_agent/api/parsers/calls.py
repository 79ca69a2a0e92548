"""The events of an answer's text, and `AnswerParser`, which finds them in text.

A call is one `ToolCallStarted`, then any number of `ToolCallArguments` of the same index. Indexes count from 0. The
arguments, joined, are the text that the model wrote; a model may write text that is not JSON.

white space      if calls are read: at the beginning of the content it is held back, and dropped if a call follows.
                 After a call it is dropped
a call           begins once its function's name is complete. Text that only looked like its beginning is content,
                 as the model wrote it
a call that is   its arguments so far are sent; `has_open_call` is true. It is also true if the answer ends within the
never closed     beginning of a call, which then is content
"""

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
    reasoning after content.
    """

    begins_inside: bool = False
    opening: str = "<think>"
    closing: str = "</think>"
    label: str = ""
    repeats: bool = False

    def begins(self, prompt_end: str) -> bool | None:
        """Return whether an answer to this prompt begins with reasoning; None: it has no reasoning."""
        end = prompt_end.rstrip()
        if end.endswith(self.closing):
            return False if self.repeats else None
        return self.begins_inside or end.endswith((self.opening + self.label).rstrip())


class CallForm(NamedTuple):
    """How a family writes a call: `begin`, its name, `behind`, what matches `pattern`, its arguments, `end`.

    All calls together are between the texts of `section`, with `separator` between them. Without `is_json` the
    arguments are any text; with `is_one` there is one call. `thought` is the reasoning of a family that has one parser
    for calls and reasoning.
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
    """What a request wants of its answer's events. Without `tools` no calls are read, except by gpt_oss.

    `thought` None: the answer has no reasoning between tags. `begins_inside`: the prompt ended within a thought.
    """

    thought: Thought | None = None
    begins_inside: bool = False
    tools: Sequence[Tool] = ()
    only_first_call: bool = False
    keeps_reasoning: bool = True


class AnswerParser:
    """Reads the text of one choice: reasoning, and in the subclass of a family its calls.

    The text must contain the names of a family's `special_tokens`. Its `stop_tokens` end an answer.
    """

    special_tokens: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()
    call = ""
    """The beginning of a call; empty: no calls are read."""
    section = section_end = ""
    """The texts before the first call, and after the last; empty: there are none."""
    markers: tuple[str, ...] = ()
    """What begins a call, or a section; empty: `section` and `call`."""
    openings: tuple[str, ...] = ()
    """How a call begins, if a marker by itself may occur in a thought; empty: `markers`."""
    form: CallForm | None = None
    """How calls are forced; None: they cannot be."""

    def __init__(self, answer: str, options: AnswerOptions) -> None:
        """`answer` names the choice: the ids of its calls are hashes of it."""
        self.markers = self.markers or tuple(filter(None, (self.section, self.call)))
        self.openings = self.openings or self.markers
        self._answer, self.options, self._thought = answer, options, options.thought
        self._space, self._is_at_edge = "", bool(self.markers)  # at the beginning of the answer, or after a call
        self._begun, self._is_open, self._is_thought_cut = 0, False, False
        self._reader, self._events = Reader(), list[Event]()
        self._running = self._steps()
        self.shown_tokens: tuple[str, ...] = ()
        """The special tokens whose names are in the text."""

    @property
    def calls(self) -> int:
        """How many of the kept calls have begun."""
        return min(self._begun, 1) if self.options.only_first_call else self._begun

    @property
    def has_open_call(self) -> bool:
        """Whether the last kept call has begun and not ended."""
        return self._is_open and (self._begun <= 1 or not self.options.only_first_call)

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""
        if not self.markers and self._thought is None:  # most answers: this saves 3 us a token
            return [ContentDelta(text)] if text else []
        for at in range(0, len(text), _CHARACTERS_AT_ONCE):
            self._reader.add(text[at : at + _CHARACTERS_AT_ONCE])
            next(self._running)
        return self._drained()

    def finish(self) -> list[Event]:
        """Return the withheld events, after the last text."""
        self._reader.ended = True
        next(self._running, None)
        return self._drained()

    def finish_reason(self, of_engine: str) -> str:
        """Return the answer's finish reason, given the engine's reason `of_engine`."""
        return "tool_calls" if of_engine == "stop" and self.calls and not self.has_open_call else of_engine

    def _drained(self) -> list[Event]:
        events, self._events = self._events, []
        return events if len(events) <= 1 else joined(events)

    def _steps(self) -> Steps[None]:
        """Read the text to its end."""
        if self._thought is not None:
            yield from self._first_thought(self._thought)
        yield from self._begin()
        while marker := (yield from self._reader.until(self._looked_for(), self._content)):
            if marker in self.markers:
                yield from self._tried(marker)
            elif self._thought is not None and marker == self._thought.opening:
                yield from self._think(self._thought)
            else:
                self._is_thought_cut = False
        if self._is_at_edge and not self._begun:
            self._show_content(self._space)

    def _begin(self) -> Steps[None]:
        """Read what only the beginning of the answer may have, after its first thought."""
        yield from ()

    def _looked_for(self) -> tuple[str, ...]:
        """Return the texts that end content."""
        thought = self._thought
        if thought is None:
            return self.markers
        again, end = (thought.opening,) if thought.repeats else (), (thought.closing,) if self._is_thought_cut else ()
        return (*self.markers, *again, *end)

    # ------------------------------------------------------------ reasoning
    def _first_thought(self, thought: Thought) -> Steps[None]:
        space = ""
        while (yield from self._reader.peek()).isspace():
            space += self._reader.take()
        if (yield from self._reader.literal(thought.opening)):
            yield from self._think(thought)
        elif self.options.begins_inside:
            self._reasoning(space)
            yield from self._think(thought)
        else:
            self._content(space)

    def _think(self, thought: Thought) -> Steps[None]:
        """Read a thought after its opening tag; a call ends it, too, and is read next."""
        if thought.label:
            yield from self._reader.literal(thought.label)
        end = yield from self._reader.until((thought.closing, *self.openings), self._reasoning)
        self._is_thought_cut = end not in ("", thought.closing)
        if self._is_thought_cut:
            self._reader.back(len(end))

    def _reasoning(self, text: str) -> None:
        if text and self.options.keeps_reasoning:
            self._events.append(ReasoningDelta(text))

    # ------------------------------------------------------------ content and calls
    def _one(self) -> Steps[None]:
        """Read one call after its beginning; it stays open if the text ends first."""
        raise NotImplementedError

    def _call(self, marker: str) -> Steps[None]:
        """Read one or several calls after `marker`; raise `Rejected` if the text is no call.

        From the marker on the text is recorded, until `_start`.
        """
        reader = self._reader
        if self.section and marker == self.section:
            yield from reader.skip_space()
            yield from reader.expect(self.call)
        yield from self._one()
        while self.section and not self._is_open:
            yield from reader.skip_space()
            reader.record("")
            if (yield from reader.literal(self.call, self.section_end)) != self.call:
                return
            yield from self._one()

    def _tried(self, marker: str) -> Steps[None]:
        self._reader.record(marker)
        begun = self._begun
        try:
            yield from self._call(marker)
        except Rejected:
            self._is_open = self._reader.ended and (bool(marker) or self._begun > begun)
            text = self._reader.recorded()
            if self._thought and self._is_thought_cut and self._thought.closing in text:
                text, self._is_thought_cut = text.replace(self._thought.closing, "", 1), False
            self._content(text)
        self._reader.recorded()

    def _content(self, text: str) -> None:
        if self._is_at_edge:
            self._space += text
            if not self._space.strip():
                return
            text, self._is_at_edge = self._space.lstrip() if self._begun else self._space, False
        self._show_content(text)

    def _show_content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _start(self, name: str, call_id: str = "") -> None:
        """Begin a call; raise `Rejected` if no function can have this name. `call_id` is the model's own."""
        if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():  # JSON can spell lone surrogates
            raise Rejected
        self._reader.recorded()
        digest = sha256(f"{self._answer}/{self._begun}".encode()).hexdigest()  # the same if another worker resumes
        if not self._begun or not self.options.only_first_call:
            self._events.append(ToolCallStarted(self._begun, call_id or self._id_of(digest), name))
        self._begun, self._is_open = self._begun + 1, True
        self._space, self._is_at_edge = "", True

    @staticmethod
    def _id_of(digest: str) -> str:
        return f"call_{digest[:24]}"

    def _arguments(self, text: str) -> None:
        if text and (self._begun == 1 or not self.options.only_first_call):
            self._events.append(ToolCallArguments(self._begun - 1, text))
