"""Finished spans, as they wait for the collector. Pure."""

from typing import Literal, NamedTuple

TEXT_CHARACTERS_MAX = 256
"""A model's name, a request's id or a reason in a span is cut to this length."""

SpanKind = Literal["server", "internal", "client", "producer", "consumer"]
Attributes = dict[str, str | int | float | bool]


class SpanEvent(NamedTuple):
    """A moment of a span."""

    name: str
    at_ns: int


class SpanLink(NamedTuple):
    """Another span of the same trace, and why it is linked."""

    span_id: int
    why: str


class SpanData(NamedTuple):
    """A finished span. Times are nanoseconds since 1970; `error` is empty if there was none."""

    name: str
    kind: SpanKind
    span_id: int
    start_ns: int
    end_ns: int
    attributes: Attributes
    error: str = ""
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()


class TraceData(NamedTuple):
    """Spans of one trace that were made together; the first is the others' parent, `parent_id` (0: none) its own."""

    trace_id: int
    parent_id: int
    spans: tuple[SpanData, ...]


def text(value: str) -> str:
    """Return what may stand in a span: short, and with no character that UTF-8 cannot encode."""
    return value[:TEXT_CHARACTERS_MAX].encode("utf-8", "replace").decode()
