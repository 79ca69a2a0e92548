"""The data of finished spans of requests and KV event messages, and the rule that chooses which are sent. Pure.

| when the rule chooses | the traces that are sent |
|---|---|
| at the beginning, if it follows the caller's `traceparent` and there is one | those that the caller samples |
| at the beginning, otherwise | the share `ratio` |
| at the end of a request | also failed requests, and requests with a TTFT above `ttft_target_s` |

The share is drawn by the trace id, as the SDK does, so that services with one ratio draw the same traces.
Source: OpenTelemetry specification, "Environment Variable Specification"; SDK, `TraceIdRatioBased`.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

DROP_REASONS = ("queue_full", "not_sent", "stopped")
"""Why spans were not sent: too many waited; the collector did not take them; the process stopped.

A process that stops continues to send for `LAST_S` (`otlp.py`); "stopped" counts only the spans that are left then.
"""
TEXT_CHARACTERS_MAX = 256
"""A model's name, a request's id or an error in a span is cut to this number of characters."""

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
    """Spans of one trace that were made together.

    The first span is the parent of the others. `parent_id` is the id of the first span's own parent; 0: it has none.
    """

    trace_id: int
    parent_id: int
    spans: tuple[SpanData, ...]


def text(value: str) -> str:
    """Return the text as a span may have it: cut, and without characters that UTF-8 cannot encode."""
    return value[:TEXT_CHARACTERS_MAX].encode("utf-8", "replace").decode()


_LOW_64_BITS = (1 << 64) - 1

_RULES: dict[str, tuple[bool, float | None]] = {
    "always_on": (False, 1.0),
    "always_off": (False, 0.0),
    "parentbased_always_on": (True, 1.0),
    "parentbased_always_off": (True, 0.0),
    "traceidratio": (False, None),
    "parentbased_traceidratio": (True, None),
}
"""By the sampler's name: whether the sampler follows the caller, and which share of the other traces it samples.

A share of None stands for the value of `OTEL_TRACES_SAMPLER_ARG`.
"""
DEFAULT_SAMPLER = "parentbased_always_on"


class Sampling(NamedTuple):
    """The rule. An unsampled request is sent all the same if its TTFT exceeds `ttft_target_s`; None: no TTFT does."""

    follows_parent: bool
    ratio: float
    ttft_target_s: float | None = None

    def is_sampled(self, trace_id: int, *, parent: bool | None) -> bool:
        """Return whether the trace is sampled at its beginning; `parent`: whether its caller, if any, sampled it."""
        if parent is not None and self.follows_parent:
            return parent
        return trace_id & _LOW_64_BITS < round(self.ratio * (1 << 64))

    def is_kept(self, *, has_failed: bool, ttft_s: float | None) -> bool:
        """Return whether an ended request is sent although it was not sampled."""
        return has_failed or (self.ttft_target_s is not None and ttft_s is not None and ttft_s > self.ttft_target_s)


def sampling(environ: Mapping[str, str], *, ratio: float | None, ttft_target_s: float | None) -> Sampling | None:
    """Return the rule of `OTEL_TRACES_SAMPLER` and its argument; None: nothing is ever sent.

    If `ratio` is given, both variables are ignored: the rule follows a caller's `traceparent`, and samples the share
    `ratio` of requests without one.

    Raises:
        ValueError: the sampler is not known, or its argument is no ratio.
    """
    if ratio is not None:
        return Sampling(follows_parent=True, ratio=ratio, ttft_target_s=ttft_target_s)
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or DEFAULT_SAMPLER
    if name not in _RULES:
        raise ValueError(f"OTEL_TRACES_SAMPLER: found {name[:64]!r}, allowed {', '.join(_RULES)}")
    follows_parent, share = _RULES[name]
    if share is None:
        share = _ratio(environ.get("OTEL_TRACES_SAMPLER_ARG", ""))
    return None if name == "always_off" else Sampling(follows_parent, share, ttft_target_s)


def _ratio(argument: str) -> float:
    try:
        ratio = float(argument or "1")
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ValueError(f"OTEL_TRACES_SAMPLER_ARG: found {argument[:64]!r}, allowed 0..1")
    return ratio
