"""Where requests go, and what is recorded of them: the seam between a request's life and what it is served by.

the workers of a fleet    `serving.py`
pools                     `router/pools/served.py`
the cache of a worker     `router/drain/warming.py`
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kv_protocol.decision import Exclusion
from kv_protocol.journal import OutcomeName
from router.decision.verdict import Verdict
from router.http.exchange import OutboundCall
from router.http.refusals import Refusal
from router.request.attempt import Attempt

if TYPE_CHECKING:
    from router.request.request import Request

A = TypeVar("A", bound=Attempt)


class Destination(ABC, Generic[A]):
    """Where requests go. Its methods are called in the order of a request's life."""

    __slots__ = ()
    is_bounded = False
    """Whether a request may have to wait for `admitted`."""

    @abstractmethod
    def read(self, request: "Request[A]") -> Coroutine[Any, Any, None]:
        """Set the request's body, prompt, route and plan; `Request.later` awaits what takes a thread.

        Raises:
            RequestInvalid, TextError, EncodersBusy, RequestRejected: it cannot be served.
        """

    async def admitted(self, request: "Request[A]") -> None:
        """Return once the request may go on; raise `RequestRejected` if it may not."""

    def routed(self, request: "Request[A]", pinned: str | None = None) -> None:
        """Route the request for its plan's present phase, under a new decision id. `pinned`: to this worker alone."""

    @abstractmethod
    def choose(self, request: "Request[A]") -> A:
        """Choose a worker for the present phase, and book the work there; raise `RequestRejected`."""

    @abstractmethod
    def call(self, request: "Request[A]", attempt: A) -> OutboundCall:
        """Return the call to the chosen worker, and set the attempt's `lines`; raise `CannotResume`."""

    def fetching_call(self, request: "Request[A]") -> OutboundCall | None:  # noqa: ARG002 - the default
        """Return a call with which a decode worker fetches the KV of `request.handoff`: the client left; None: none."""
        return None

    def has_other(self, request: "Request[A]") -> bool:  # noqa: ARG002 - the default
        """Return whether another worker can serve the request."""
        return True

    def lost(self, attempt: A, quiet_s: float, *, begun: bool) -> str:  # noqa: ARG002 - the default
        """Return why the attempt's worker seems to be lost; empty if it does not. Times as of `Request.lost`."""
        return ""

    def pause_s(self, request: "Request[A]") -> float:  # noqa: ARG002 - the default
        """Return how long to wait before the request is sent to another worker than the one that failed; 0: not."""
        return 0.0

    # ------------------------------------------------------------------------------------------- what is recorded

    def unserved(self, request: "Request[A]", exclusions: tuple[Exclusion, ...]) -> None:
        """The request is refused because no worker is eligible."""

    def began(self, request: "Request[A]", attempt: A) -> None:
        """The worker computed the prompt."""

    @abstractmethod
    def settle(self, request: "Request[A]", attempt: A, outcome: OutcomeName) -> None:
        """A worker's part is over; `request.attempts` has those before. If `request.is_over`, this was the last."""

    @abstractmethod
    def ended(self, request: "Request[A]", outcome: OutcomeName, refusal: Refusal | None) -> None:
        """The request is over, and all of its attempts are settled."""


class Gateway(NamedTuple):
    """A gateway that sends a request itself: once, and to one worker, the chosen one or an alternative."""

    allowed_workers: frozenset[str] | None
    """Ids of those that it can reach, and offers; None: all."""
    alternatives: Callable[[Verdict], tuple[str, ...]]
    """Returns URLs of other workers that may take the same call."""
