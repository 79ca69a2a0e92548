"""What a parser finds in an answer's text, in the order in which it stands there.

A call is one `ToolCallStarted`, then any number of `ToolCallArguments` of the same index. Indexes count from 0. The
arguments, joined, are the text that the model wrote; a model may write text that is not JSON.
"""

import msgspec


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
    delta: str


Event = ContentDelta | ReasoningDelta | ToolCallStarted | ToolCallArguments


def appended(events: list[Event], event: Event) -> None:
    """Add `event` to `events`; text that goes on with the last event becomes one event with it."""
    last = events[-1] if events else None
    if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
        events[-1] = ContentDelta(last.text + event.text)
    elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
        events[-1] = ReasoningDelta(last.text + event.text)
    elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
        events[-1] = ToolCallArguments(event.index, last.delta + event.delta)
    else:
        events.append(event)


def joined(events: list[Event]) -> list[Event]:
    """Return the same text in as few events as possible."""
    fewer: list[Event] = []
    for event in events:
        appended(fewer, event)
    return fewer
