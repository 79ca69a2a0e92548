"""Reads journals: the messages of one router, or of all, in the order of the log."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import structlog

from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.journal import JournalMessage, decode_journal
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, LogMessage, Reading

_LOOK_S = 0.02
OnMessage = Callable[[LogMessage], Awaitable[None]]

_log = structlog.get_logger("router")


class JournalEntry(NamedTuple):
    """One message: its router, its place in the log, and the log's time (since 1970)."""

    router: str
    stream_seq: int
    time_ns: int
    message: JournalMessage


class JournalMessages:
    """Passes each readable message of a journal to `take`; of unreadable ones the text log names the first."""

    def __init__(self, take: Callable[[JournalEntry], None]) -> None:
        self._take = take
        self._refused = 0

    async def on_message(self, message: LogMessage) -> None:
        """Take one message of the journal's stream."""
        name = message.subject.rpartition(".")[2]
        try:
            entry = JournalEntry(name, message.stream_seq, message.time_ns, decode_journal(message.data))
        except MalformedMessage as error:
            if not self._refused:
                reason = str(error)
                _log.warning("message_refused", subject=message.subject, seq=message.stream_seq, reason=reason)
            self._refused += 1
            return
        self._take(entry)

    def log_refused(self) -> None:
        """Log how many messages were refused, if not all of them were logged."""
        if self._refused > 1:
            _log.warning("journal_messages_refused", messages=self._refused)


async def follow_journal(
    log: EventLog, router: str, messages: JournalMessages, *, after_seq: int = 0, created: str = ""
) -> Reading:
    """Pass all messages after `after_seq`, and new ones, to `messages`; of all routers if `router` is empty.

    Raises `BrokerUnavailable`, also if there is no journal.
    """
    subject = subjects.journal(router) if router else subjects.JOURNAL_ALL
    return await log.follow(subjects.JOURNAL_STREAM, subject, messages.on_message, after_seq=after_seq, created=created)


async def read_journal(
    log: EventLog,
    clock: Clock,
    router: str,
    take: Callable[[JournalEntry], None],
    stop: asyncio.Event,
    *,
    after_seq: int = 0,
    from_ns: int | None = None,
) -> None:
    """Pass all messages after `after_seq` that the log has now to `take`, and no later ones.

    `from_ns`: and none before that time (since 1970). Return after the last message, or at `stop`. The log's own part
    has to run.
    """
    messages = JournalMessages(take)
    subject = subjects.journal(router) if router else subjects.JOURNAL_ALL
    await read_to_end(
        log, clock, subjects.JOURNAL_STREAM, subject, messages.on_message, stop, after_seq=after_seq, from_ns=from_ns
    )
    messages.log_refused()


async def read_to_end(
    log: EventLog,
    clock: Clock,
    stream: str,
    subject: str,
    on_message: OnMessage,
    stop: asyncio.Event,
    *,
    after_seq: int = 0,
    from_ns: int | None = None,
) -> None:
    """Pass the messages that the stream has now to `on_message`, as `read_journal` does for journals."""
    state = await log.stream_state(stream)
    end = state.last_seq
    if from_ns is not None:
        after_seq = max(after_seq, await log.seq_at(stream, from_ns - 1))

    async def take_until_end(message: LogMessage) -> None:
        if message.stream_seq <= end:
            await on_message(message)

    reading = await log.follow(stream, subject, take_until_end, after_seq=min(after_seq, end), created=state.created)
    while reading.unread and reading.delivered_seq < end and not stop.is_set():
        await clock.sleep(_LOOK_S)
    await log.leave(reading)
