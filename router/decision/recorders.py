"""Recorders get all that is applied to a router's state, in order: the journal, the replicas, the shadows."""

from typing import Protocol

from kv_protocol.journal import JournalRecord
from router.decision.verdict import Verdict

Applied = JournalRecord | Verdict


class Recorder(Protocol):
    """Receives all that is applied, in order."""

    def record(self, what: Applied) -> None:
        """`what` was applied."""
