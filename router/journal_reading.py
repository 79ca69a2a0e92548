"""Journals read back: the messages of one router, or of all, in the order in which the log has them."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from kv_protocol import subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.journal import JournalMessage, decode_journal
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, LogMessage, Reading

_LOOK_S = 0.02

_log = structlog.get_logger("router")


class Told(NamedTuple):
    """One message: whose, where and when (since 1970) the log has it."""

    router: str
    stream_seq: int
    time_ns: int
    message: JournalMessage


async def follow_journal(
    log: EventLog, router: str, take: Callable[[Told], None], *, after_seq: int = 0, created: str = ""
) -> Reading:
    """`take` gets every message behind `after_seq`, and those that come; of all routers where `router` is empty.

    One that cannot be read is said to be so, and passed over. Raises `BrokerUnavailable`, also where there is none.
    """

    async def on_message(message: LogMessage) -> None:
        name = message.subject.rpartition(".")[2]
        try:
            told = Told(name, message.stream_seq, message.time_ns, decode_journal(message.data))
        except MalformedMessage as error:
            _log.warning("message_refused", subject=message.subject, seq=message.stream_seq, reason=str(error))
            return
        take(told)

    subject = subjects.journal(router) if router else subjects.JOURNAL_ALL
    return await log.follow(subjects.JOURNAL_STREAM, subject, on_message, after_seq=after_seq, created=created)


async def read_journal(
    log: EventLog,
    clock: Clock,
    router: str,
    take: Callable[[Told], None],
    stop: asyncio.Event,
    *,
    after_seq: int = 0,
) -> None:
    """`take` gets every message behind `after_seq` that the log has now; returns behind the last, or at `stop`.

    The log's own part has to run.
    """
    state = await log.stream_state(subjects.JOURNAL_STREAM)
    end = state.last_seq
    reading = await follow_journal(log, router, take, after_seq=min(after_seq, end), created=state.created)
    while reading.unread and reading.told_seq < end and not stop.is_set():
        await clock.sleep(_LOOK_S)
    await log.leave(reading)
