"""The events of a parser: the parts of an answer's text, in their order.

A call is one `ToolCallStarted`, then any number of `ToolCallArguments` of the same index. Indexes count from 0. The
arguments, joined, are the text that the model wrote; a model may write text that is not JSON.
"""

from collections.abc import Iterable
from itertools import groupby

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


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbours of one kind joined: text that continues the event before is added to it."""
    return [_as_one(list(run)) for _, run in groupby(events, _key)]


def _key(event: Event) -> tuple[object, ...]:
    """Return what events of one run have in common; of a call's begin it is alone."""
    if isinstance(event, ToolCallStarted | ToolCallArguments):
        return type(event), event.index
    return (type(event),)


def _as_one(run: list[Event]) -> Event:
    first = run[0]
    if len(run) == 1 or isinstance(first, ToolCallStarted):
        return first
    if isinstance(first, ToolCallArguments):
        return ToolCallArguments(
            first.index, "".join(each.delta for each in run if isinstance(each, ToolCallArguments))
        )
    texts = (each.text for each in run if isinstance(each, ContentDelta | ReasoningDelta))
    return type(first)("".join(texts))
