"""One attempt to serve a request: the answer's status, and the failure, if any."""

from abc import ABC, abstractmethod

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeName
from router.request.refusals import Refusal
from router.server.exchange import UpstreamStage
from router.server.heads import Headers

CLIENT_FAULT = 400
_STREAM = b"text/event-stream"


class Attempt(ABC):
    """One try at a request: the answer's status, and the failure, if any."""

    __slots__ = ("has_begun", "is_streamed", "phase", "reason", "retry_after_s", "status")

    phase: UpstreamStage
    """Where it failed, if it did. `reason` is empty if it did not."""

    def __init__(self) -> None:
        self.status = 0
        self.phase = "first_byte"
        self.reason = ""
        self.retry_after_s: float | None = None
        self.has_begun = False
        """Whether a byte of the answer's body came, before its end."""
        self.is_streamed = False
        """Whether the answer is an event stream; known once its head came."""

    @property
    @abstractmethod
    def rank(self) -> WorkerRank:
        """The tried rank."""

    @property
    def is_answered(self) -> bool:
        """Whether the client got what it asked for, judged by the status."""
        return self.status < CLIENT_FAULT

    @property
    def is_engines_word(self) -> bool:
        """Whether a failed answer may be passed on when no other worker is left."""
        return False

    @property
    def end_outcome(self) -> OutcomeName:
        """The outcome of an answer that was passed on completely, judged by the status."""
        if self.reason:
            return "failed"
        return "ok" if self.is_answered else "refused"

    def on_head(self, status: int, headers: Headers) -> bool:
        """The answer's head came; return whether it may be passed on."""
        self.status = status
        self.is_streamed = headers.get(b"content-type", b"")[: len(_STREAM)].lower() == _STREAM
        return self._may_pass(headers)

    @abstractmethod
    def _may_pass(self, headers: Headers) -> bool:
        """Return whether the answer with this status may be passed on."""

    @abstractmethod
    def refusal(self) -> Refusal:
        """Return the client's error if this failed attempt was the last."""
