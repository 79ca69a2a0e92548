"""The event log with observers: when each message was sent and received.

    handed over    `send` was called for the message
    delivered      the client calls the consumer with the message
    applied        the consumer has returned

Times are in nanoseconds since 1970.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kv_runtime.clock import SystemClock
from kv_runtime.event_log import CONFIRM_S, EventLog, LogMessage, OnMessage, Reading


class AppliedMessage(NamedTuple):
    """One message as the consumer got it, and when."""

    message: LogMessage
    delivered_ns: int
    applied_ns: int


class WatchedLog(EventLog):
    """A connection whose owner can observe each message."""

    def __init__(self, url: str, on_found: Callable[[], None], *, confirm_s: float = CONFIRM_S) -> None:
        super().__init__(url, on_found, confirm_s=confirm_s)
        self._wall_ns = SystemClock().wall_ns
        self.on_applied: Callable[[AppliedMessage], None] = lambda _: None
        self.on_handed: Callable[[str, int], None] = lambda *_: None
        """Gets the id of a published message and the time."""

    async def send(
        self,
        subject: str,
        data: bytes,
        message_id: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        after_seq: int | None = None,
    ) -> asyncio.Future[int]:
        """Send as the log does; report the time."""
        self.on_handed(message_id, self._wall_ns())
        return await super().send(subject, data, message_id, headers=headers, after_seq=after_seq)

    async def follow(
        self, stream: str, subject: str, on_message: OnMessage, *, after_seq: int = 0, created: str = ""
    ) -> Reading:
        """Follow as the log does; report the times."""
        return await super().follow(stream, subject, self._watched(on_message), after_seq=after_seq, created=created)

    async def listen(self, subject: str, on_message: OnMessage) -> None:
        """Listen as the log does; report the times."""
        await super().listen(subject, self._watched(on_message))

    def _watched(self, on_message: OnMessage) -> OnMessage:
        async def watched(message: LogMessage) -> None:
            delivered_ns = self._wall_ns()
            await on_message(message)
            self.on_applied(AppliedMessage(message, delivered_ns, self._wall_ns()))

        return watched
