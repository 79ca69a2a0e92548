"""Recorders get what is applied to a router's state, in order, but for what happens to its own leases."""

from typing import Protocol

from kv_protocol.journal import JournalRecord


class Recorder(Protocol):
    """Receives what is applied, in order."""

    def record(self, what: JournalRecord) -> None:
        """`what` was applied."""
