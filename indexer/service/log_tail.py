"""Follows the log: events, fleet events and heartbeats as lines, from the past or from now.

    from_now     new messages
    since        messages since a time, then new ones
    from_seq     this message of the events and all behind it, fleet events since its time, then new ones
    from_all     all that the log has, then new ones

Each of the two streams is in order. Old messages of both come as fast as they can be read, not merged by time.
"""

from collections.abc import Callable
from typing import NamedTuple

from indexer.service.feed import LogPosition
from indexer.service.history import AvailableMoment, NotRetained
from indexer.service.log_lines import Line, beat_line, event_lines, fleet_line
from kv_protocol import subjects
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, LogMessage

_EVENTS, _FLEET = subjects.EVENTS_STREAM, subjects.FLEET_STREAM


class TailStart(NamedTuple):
    """The start in both streams."""

    events: LogPosition
    fleet: LogPosition


class TailFilter(NamedTuple):
    """Filters by model slug, worker and rank (empty or None: all); `heartbeats` includes those."""

    slug: str = ""
    worker_id: str = ""
    dp_rank: int | None = None
    heartbeats: bool = False

    def subject(self, kind: str) -> str:
        """Return the subject pattern to follow."""
        return subjects.pattern(kind, slug=self.slug, worker_id=self.worker_id, dp_rank=self.dp_rank)


async def from_now(log: EventLog) -> TailStart:
    """Return the end of both streams."""
    events, fleet = await log.stream_state(_EVENTS), await log.stream_state(_FLEET)
    return TailStart(LogPosition(events.created, events.last_seq), LogPosition(fleet.created, fleet.last_seq))


def from_all() -> TailStart:
    """Return the beginning of both streams."""
    return TailStart(LogPosition("", 0), LogPosition("", 0))


async def since(log: EventLog, time_ns: int) -> TailStart:
    """Return where both streams were at a time."""
    events, fleet = await from_now(log)
    events_seq, fleet_seq = await log.seq_at(_EVENTS, time_ns), await log.seq_at(_FLEET, time_ns)
    return TailStart(events._replace(stream_seq=events_seq), fleet._replace(stream_seq=fleet_seq))


async def from_seq(log: EventLog, seq: int) -> TailStart:
    """Return the place before message `seq` of the events, and where the fleet's stream was at that message's time.

    Raises:
        NotRetained: there is no such message, or the log dropped it.
    """
    stream = await log.stream_state(_EVENTS)
    message = await log.message_from(_EVENTS, seq) if seq <= stream.last_seq else None
    if message is None or message.stream_seq != seq:
        oldest = AvailableMoment(stream.first_seq, stream.first_time_ns) if stream.first_time_ns else None
        raise NotRetained("from-seq", seq, oldest, stream.last_seq)
    then = await since(log, message.time_ns)
    return then._replace(events=then.events._replace(stream_seq=seq - 1))


async def follow(
    log: EventLog, clock: Clock, wanted: TailFilter, start: TailStart, on_line: Callable[[Line], None]
) -> None:
    """Call `on_line` with each wanted line from `start` on, while the log's own part runs.

    Raises:
        BrokerUnavailable: the log is away, or has no streams.
    """

    async def on_events(message: LogMessage) -> None:
        for line in event_lines(message.subject, message.data, time_ns=message.time_ns, stream_seq=message.stream_seq):
            on_line(line)

    async def on_fleet(message: LogMessage) -> None:
        on_line(fleet_line(message.subject, message.data, time_ns=message.time_ns, stream_seq=message.stream_seq))

    async def on_heartbeat(message: LogMessage) -> None:
        on_line(beat_line(message.subject, message.data, time_ns=clock.wall_ns()))

    for stream, kind, (created, seq), on_message in (
        (_FLEET, "fleet", start.fleet, on_fleet),
        (_EVENTS, "events", start.events, on_events),
    ):
        await log.follow(stream, wanted.subject(kind), on_message, after_seq=seq, created=created)
    if wanted.heartbeats:
        await log.listen(wanted.subject("heartbeat"), on_heartbeat)
