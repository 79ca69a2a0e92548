"""Recorders get all that is applied to a router's state, in order: the journal, the replicas, the shadows."""

from typing import NamedTuple, Protocol

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Exclusion
from kv_protocol.journal import JournalRecord
from router.decision.verdict import Verdict


class RefusedRequest(NamedTuple):
    """No rank was eligible for this request at that time."""

    now_s: float
    request: RouteRequest
    exclusions: tuple[Exclusion, ...]


Applied = JournalRecord | Verdict | RefusedRequest


class Recorder(Protocol):
    """Receives all that is applied, in order."""

    def record(self, what: Applied) -> None:
        """`what` was applied."""
