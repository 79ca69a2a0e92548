"""`indexer tail`: what the log says, line by line."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import click
import msgspec

from indexer.commands.options import read_rank, with_settings
from indexer.config import IndexerSettings
from indexer.service.feed import LogPosition
from indexer.service.history import AvailableMoment, NotRetained, time_text
from indexer.service.log_lines import Line, beat_line, event_lines, fleet_line, text
from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, LogMessage, connected_log
from kv_runtime.process import PrintedLines, run_process
from kv_runtime.supervise import Part, run_parts

_DRAIN_S = 5.0
_EVENTS, _FLEET = subjects.EVENTS_STREAM, subjects.FLEET_STREAM
BEGINNING = dict.fromkeys((_EVENTS, _FLEET), LogPosition("", 0))
"""The places before the first message of each stream."""


@click.command()
@with_settings
@click.option(
    "--rank",
    type=read_rank,
    metavar="WORKER/RANK",
    help="only this worker rank, as w0/0, and its worker's fleet events",
)
@click.option("--model", help="only the ranks of this model")
@click.option("--from-seq", type=click.IntRange(1), help="begin with this message of the events")
@click.option("--since", type=click.FloatRange(0, 1e9), metavar="SECONDS", help="begin this many seconds ago")
@click.option("--all", "from_start", is_flag=True, help="begin with the oldest that is kept")
@click.option("--heartbeats", is_flag=True, help="show heartbeats too, as they come")
@click.option("--limit", type=click.IntRange(1), help="end after this many lines")
@click.option("--json", "as_json", is_flag=True, help="print each line as a JSON object")
def tail(
    *,
    settings: IndexerSettings,
    rank: WorkerRank | None,
    model: str | None,
    from_seq: int | None,
    since: float | None,
    from_start: bool,
    heartbeats: bool,
    limit: int | None,
    as_json: bool,
    **_: object,
) -> None:
    """Follow the log: what ranks stored, removed and cleared, and workers that come and leave, from now on or earlier.

    Consecutive batches that do the same on the same medium are one line. It has the time, the message's place in the
    log, the rank, the lower half of its epoch in hex, the batches' numbers, the operation and the medium, the number of
    blocks, the first block and its parent. An unreadable message is a line, too.

    It ends with a signal, or after --limit lines.

    \b
    Example:  indexer tail --since 60 --rank w0/0
    """  # noqa: D301
    if sum((from_seq is not None, since is not None, from_start)) > 1:
        raise click.UsageError("found several of --from-seq, --since and --all, allowed one of them at most")
    pattern = partial(
        subjects.pattern,
        slug=subjects.model_slug(model) if model else "",
        worker_id=rank.worker_id if rank else "",
        dp_rank=rank.dp_rank if rank else None,
    )
    since_ns = None if since is None else Clock().wall_ns() - round(since * 1e9)

    async def main(stop: asyncio.Event) -> None:
        printed = PrintedLines(stop, limit, as_json=as_json)

        def show(line: Line) -> None:
            printed.show(lambda: text(line, time_text(line.time_ns)), lambda: msgspec.json.encode(line))

        async with connected_log(settings.nats, "indexer") as log:
            start = BEGINNING if from_start else await places(log, from_seq=from_seq, since_ns=since_ns)
            await follow(log, pattern, start, show, heartbeats=heartbeats)
            await run_parts([Part("event-log", log.run)], stop=stop, drain_s=_DRAIN_S)

    run_process(main)


async def places(log: EventLog, *, from_seq: int | None = None, since_ns: int | None = None) -> dict[str, LogPosition]:
    """Return a place in each of the two streams: before message `from_seq` of the events, at a time, or the end.

    With `from_seq` the place in the fleet's stream is at the time of that message.

    Raises:
        NotRetained: there is no such message, or the log dropped it.
    """
    found = {name: await log.stream_state(name) for name in (_EVENTS, _FLEET)}
    if from_seq is not None:
        events = found[_EVENTS]
        message = await log.message_from(_EVENTS, from_seq) if from_seq <= events.last_seq else None
        if message is None or message.stream_seq != from_seq:
            oldest = AvailableMoment(events.first_seq, events.first_time_ns) if events.first_time_ns else None
            raise NotRetained("from-seq", from_seq, oldest, events.last_seq)
        since_ns = message.time_ns
    seqs = {
        name: state.last_seq if since_ns is None else await log.seq_at(name, since_ns) for name, state in found.items()
    }
    if from_seq is not None:
        seqs[_EVENTS] = from_seq - 1
    return {name: LogPosition(state.created, seqs[name]) for name, state in found.items()}


async def follow(
    log: EventLog,
    pattern: Callable[[str], str],
    start: Mapping[str, LogPosition],
    on_line: Callable[[Line], None],
    *,
    heartbeats: bool = False,
) -> None:
    """Let `on_line` get each line from `start` on; returns once subscribed: lines come while `log.run` runs.

    Each of the two streams is in order. Old messages of both come as fast as they can be read, not merged by time.
    `pattern` returns the subjects of a kind of message: "events", "fleet" or "heartbeat".

    Raises:
        BrokerUnavailable: the log is away, or has no streams.
    """

    async def on_events(message: LogMessage) -> None:
        for line in event_lines(message.subject, message.data, time_ns=message.time_ns, stream_seq=message.stream_seq):
            on_line(line)

    async def on_fleet(message: LogMessage) -> None:
        on_line(fleet_line(message.subject, message.data, time_ns=message.time_ns, stream_seq=message.stream_seq))

    async def on_heartbeat(message: LogMessage) -> None:
        on_line(beat_line(message.subject, message.data, time_ns=Clock().wall_ns()))

    for stream, kind, on_message in ((_FLEET, "fleet", on_fleet), (_EVENTS, "events", on_events)):
        created, seq = start[stream]
        await log.follow(stream, pattern(kind), on_message, after_seq=seq, created=created)
    if heartbeats:
        await log.listen(pattern("heartbeat"), on_heartbeat)
