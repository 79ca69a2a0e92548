"""The common part of the parsers of all families: content and calls become events.

white space      at the beginning of the content is held back, and dropped if a call follows. After a call it is dropped
a call           begins once its function's name is complete. Text that only looked like its beginning is content,
                 as the model wrote it
a call that is   its arguments so far are sent; `has_open_call` is true. It is also true if the answer ends within the
never closed     beginning of a call, which then is content
CALLS_MAX        further calls of one answer are content
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from worker_agent.api.parsers.events import ContentDelta, Event, ToolCallArguments, ToolCallStarted
from worker_agent.api.parsers.reader import Reader, Rejected, Steps

CALLS_MAX = 128
NAME_CHARACTERS_MAX = 256
_SPACE_CHARACTERS_MAX = 64
_CHARACTERS_AT_ONCE = 4096
"""Longer text is read in parts: every search for a marker scans the whole text that is there."""

CallId = Callable[[int], str]
"""Returns the id of the call with this index."""


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


class ToolParser(Parser):
    """Finds calls. `calls` counts those that have begun."""

    markers: tuple[str, ...]
    """The markers that begin a call."""
    openings: tuple[str, ...] = ()
    """How a call begins where a marker alone may be a word of a thought; empty: as the markers."""

    def __init__(self, call_id: CallId) -> None:
        self._call_id = call_id
        self._space = ""
        self._is_at_begin, self._is_behind_call = True, False
        self.calls, self.has_open_call = 0, False
        super().__init__()

    @abstractmethod
    def _call(self, marker: str) -> Steps[None]:
        """Read one call, or several, of which `marker` was taken; raise `Rejected` where it is none.

        From the marker on the text is recorded, until `_start`.
        """

    def _steps(self) -> Steps[None]:
        while marker := (yield from self._reader.until(self._markers_now(), self._content)):
            yield from self._tried(marker)
        if not self.calls:
            self._show(self._space)

    def _tried(self, marker: str) -> Steps[None]:
        self._reader.record(marker)
        calls = self.calls
        try:
            yield from self._call(marker)
        except Rejected:
            self.has_open_call = self._reader.ended and (bool(marker) or self.calls > calls)
            self._content(self._reader.recorded())
        self._reader.recorded()

    def _markers_now(self) -> tuple[str, ...]:
        return self.markers if self.calls < CALLS_MAX else ()

    def _content(self, text: str) -> None:
        if self._is_behind_call:
            text = text.lstrip()
            self._is_behind_call = not text
        elif self._is_at_begin:
            text, self._space = self._space + text, ""
            self._is_at_begin = text.isspace() and len(text) <= _SPACE_CHARACTERS_MAX
            if self._is_at_begin:
                text, self._space = "", text
        self._show(text)

    def _show(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def _start(self, name: str, call_id: str = "") -> None:
        """Begin a call; raise `Rejected` where there can be no function of this name. `call_id` is the model's own."""
        if not 0 < len(name) <= NAME_CHARACTERS_MAX or not _is_unicode(name):
            raise Rejected
        self._reader.recorded()
        self._events.append(ToolCallStarted(self.calls, call_id or self._call_id(self.calls), name))
        self.calls, self.has_open_call = self.calls + 1, True
        self._space, self._is_at_begin, self._is_behind_call = "", False, True

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(self.calls - 1, text))

    def _end(self) -> None:
        self.has_open_call = False


class SectionParser(ToolParser):
    """Finds calls that begin with `call`. `section`, if there is one, stands before the first, `section_end` behind."""

    section = section_end = ""
    call: str

    @abstractmethod
    def _one(self) -> Steps[None]:
        """Read one call behind its beginning; return with it open where the text ends first."""

    def _call(self, marker: str) -> Steps[None]:
        reader = self._reader
        if marker == self.section:
            yield from reader.skip_space()
            yield from reader.expect(self.call)
        yield from self._one()
        while self.section and not self.has_open_call:
            yield from reader.skip_space()
            reader.record("")
            following = (self.call, self.section_end) if self._markers_now() else (self.section_end,)
            if (yield from reader.literal(*following)) != self.call:
                return
            yield from self._one()


def _is_unicode(text: str) -> bool:
    """Return whether UTF-8 can express the text: it has no lone surrogates, which JSON can name."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
