"""The event log as the bench listens in on it: when each message left and came, and what may befall one on its way.

    handed over    `send` was called for the message
    delivered      the client gives a message to whoever follows or listens
    applied        that one has returned

Times are in nanoseconds since 1970.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kv_runtime.clock import SystemClock
from kv_runtime.event_log import CONFIRM_S, EventLog, LogMessage, OnMessage, Reading


class AppliedMessage(NamedTuple):
    """One message as it was told, and when."""

    message: LogMessage
    delivered_ns: int
    applied_ns: int


class WatchedLog(EventLog):
    """A connection like any other, whose owner may say what is done at each of its messages."""

    def __init__(
        self, url: str, on_lost: Callable[[], None], on_found: Callable[[], None], *, confirm_s: float = CONFIRM_S
    ) -> None:
        super().__init__(url, on_lost, on_found, confirm_s=confirm_s)
        self._wall_ns = SystemClock().wall_ns
        self.on_way: Callable[[LogMessage], LogMessage | None] = lambda message: message
        """Returns what comes of a message; None: it is lost."""
        self.on_applied: Callable[[AppliedMessage], None] = lambda _: None
        self.on_handed: Callable[[str, int], None] = lambda *_: None
        """Hears the id of a message that is published, and when."""
        self.on_announced: Callable[[str, bytes], None] = lambda *_: None

    async def send(
        self,
        subject: str,
        data: bytes,
        message_id: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        after_seq: int | None = None,
    ) -> asyncio.Future[int]:
        """Do as the log does, and tell when."""
        self.on_handed(message_id, self._wall_ns())
        return await super().send(subject, data, message_id, headers=headers, after_seq=after_seq)

    async def announce(self, subject: str, data: bytes, reply: str = "") -> None:
        """Do as the log does, and tell of it."""
        self.on_announced(subject, data)
        await super().announce(subject, data, reply)

    async def follow(
        self, stream: str, subject: str, on_message: OnMessage, *, after_seq: int = 0, created: str = ""
    ) -> Reading:
        """Do as the log does, with what is left of each message, and tell when."""
        return await super().follow(stream, subject, self._watched(on_message), after_seq=after_seq, created=created)

    async def listen(self, subject: str, on_message: OnMessage) -> None:
        """Do as the log does, with what is left of each message, and tell when."""
        await super().listen(subject, self._watched(on_message))

    def _watched(self, on_message: OnMessage) -> OnMessage:
        async def watched(message: LogMessage) -> None:
            delivered_ns = self._wall_ns()
            left = self.on_way(message)
            if left is not None:
                await on_message(left)
                self.on_applied(AppliedMessage(left, delivered_ns, self._wall_ns()))

        return watched
