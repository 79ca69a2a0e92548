"""Text that arrives in chunks, read by generators that yield when they need more of it.

A step depends only on the text up to its place, so the shown text does not depend on the chunks. Only text that may
begin a marker, or a call before its function's name is complete, is held back.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that returns a `T` once enough text has arrived."""
Show = Callable[[str], None]

NAME_CHARACTERS_MAX = 256
"""Bound of what may be a name: text that is held back because its end is not known yet."""


class Rejected(Exception):
    """The text does not have the expected form, or ended too early."""


class Reader:
    """The text so far. `ended`: no more comes."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._recorded: list[str] | None = None
        self.ended = False

    def add(self, text: str) -> None:
        """Add text at the end."""
        self._text, self._at = self._text[self._at :] + text, 0

    def record(self, begun: str) -> None:
        """Begin to record: `recorded` will return `begun`, and all that is taken after this call."""
        self._recorded = [begun]

    def recorded(self) -> str:
        """Return what was taken since `record`, and end the recording."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    def take(self, characters: int = 1) -> str:
        """Take and return the next `characters`, which must be there."""
        text = self._text[self._at : self._at + characters]
        self._at += characters
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def back(self, characters: int) -> None:
        """Put back the last `characters` that were taken."""
        self._at -= characters

    def peek(self) -> Steps[str]:
        """Return the next character; empty at the end."""
        while self._at >= len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def span(self, pattern: re.Pattern[str]) -> str:
        """Take and return the match of `pattern` in the text that is there; more text could extend it."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def literal(self, *texts: str) -> Steps[str]:
        """Take and return the one of `texts` that comes next; empty: none does."""
        while True:
            there = self._text[self._at : self._at + max(map(len, texts))]
            for text in texts:
                if there.startswith(text):
                    return self.take(len(text))
            if self.ended or not any(text.startswith(there) for text in texts):
                return ""
            yield

    def expect(self, text: str) -> Steps[None]:
        """Take `text`; raise `Rejected` if other text comes."""
        if not (yield from self.literal(text)):
            raise Rejected

    def skip_space(self) -> Steps[str]:
        """Take white space; return the character after it, empty at the end."""
        while (next_one := (yield from self.peek())) and next_one.isspace():
            self.take()
        return next_one

    def until(self, markers: Sequence[str], show: Show) -> Steps[str]:
        """Show the text before the first of `markers` as it comes; take and return the marker, empty at the end.

        No marker may begin with another.
        """
        while True:
            found = [(at, each) for each in markers if (at := self._text.find(each, self._at)) >= 0]
            end, marker = min(found, default=(len(self._text), ""))
            open_at = end if self.ended else self._open_at(markers, end)
            if open_at > self._at:
                show(self.take(open_at - self._at))
            if open_at == end and (marker or self.ended):
                return self.take(len(marker))
            yield

    def before(
        self, markers: Sequence[str], characters_max: int | None = NAME_CHARACTERS_MAX
    ) -> Steps[tuple[str, str]]:
        """Take and return the text before the first of `markers`, and the marker. `characters_max` None: any length.

        Raises:
            Rejected: the text is longer than `characters_max`, or ended first. Only the recorded part of it is kept.
        """
        parts: list[str] = []

        def show(text: str) -> None:
            parts.append(text)
            if characters_max is not None and sum(map(len, parts)) > characters_max:
                raise Rejected

        marker = yield from self.until(markers, show)
        if not marker:
            raise Rejected
        return "".join(parts), marker

    def _open_at(self, markers: Sequence[str], end: int) -> int:
        """Return where an incomplete marker may begin; `end` if none may begin before it."""
        longest, firsts = max(map(len, markers), default=1), {each[0] for each in markers}
        for at in range(max(self._at, len(self._text) - longest + 1), end):
            if self._text[at] in firsts and any(each.startswith(self._text[at:]) for each in markers):
                return at
        return end
