"""What a request records of itself while it is traced: times, decisions, and what came of each upstream request.

Times are seconds of the clock that `Exchange.began_s` is of (`perf_counter`); None: it did not happen. A record is
written by `tracer.py` and read by `trace_projection.py`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kv_protocol.decided import RouteRequest
from kv_protocol.trace_context import TraceParent
from router.native import built

if TYPE_CHECKING:
    from router.decision.verdict import Verdict

SERVER_FAULT = 500


@dataclass(slots=True)
class Turn:
    """One decision, and the request that the winner got, if it got one."""

    began_s: float
    decided_s: float
    verdict: "Verdict | None" = None
    """None: no worker was chosen; `refused` says why, in a word."""
    refused: str = ""
    span_id: int = 0
    """Of the upstream request; 0: none was sent."""
    sent_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    status: int = 0
    """Of the worker's answer; 0: none came."""
    outcome: str = ""
    """ok, refused, failed or cancelled; empty while it is open."""
    stage: str = ""
    reason: str = ""
    """Where and why it failed; empty if it did not."""
    answer: built.Answer = field(default_factory=built.Answer)


Stretch = tuple[float, float]
"""From one moment to another."""


class RequestEnd(NamedTuple):
    """How a request ended. `status` is that of the client's answer; 0: unknown, the client left."""

    route: RouteRequest | None
    """None: it was not understood."""
    model: str
    """As the client wrote it; empty: unknown."""
    path: str
    mode: str
    outcome: str
    status: int
    error: str
    """A word for what went wrong; empty: nothing."""
    answer: built.Answer
    ended_s: float
    retries: int = 0
    migrations: int = 0

    @property
    def is_error(self) -> bool:
        """Whether it ended by a fault of the router or its workers."""
        return is_error(self.outcome, self.status)


def is_error(outcome: str, status: int) -> bool:
    """Return whether a request with this outcome and status ended by a fault of the router or its workers."""
    return outcome == "failed" or status >= SERVER_FAULT


class RequestTrace:
    """The record of one request: its place in the trace, and its turns, first one first."""

    __slots__ = ("began_s", "is_sampled", "parent", "prompt", "queue", "span_id", "trace_id", "ttft_s", "turns")

    def __init__(
        self, parent: TraceParent | None, trace_id: int, span_id: int, began_s: float, *, is_sampled: bool
    ) -> None:
        """`parent`: the caller's span; None: the trace begins here. `span_id` 0: it is drawn once it is needed."""
        self.parent, self.trace_id, self.span_id = parent, trace_id, span_id
        self.began_s, self.is_sampled = began_s, is_sampled
        self.turns: list[Turn] = []
        self.prompt: Stretch | None = None
        """While the prompt was rendered, encoded and hashed; None: the mode needs none of it."""
        self.queue: Stretch | None = None
        """While the request waited in the queue; None: it did not."""
        self.ttft_s: float | None = None

    @property
    def hex_id(self) -> str:
        """The trace id as logs and exemplars have it."""
        return f"{self.trace_id:032x}"
