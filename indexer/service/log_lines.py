"""The log as lines for people and programs: one line for consecutive batches that do the same on one tier.

    message                 lines
    ---------------------   ------------------------------------------------------------------------------------
    of a rank's stream      an `EventLine` for consecutive seqs of one epoch, one kind and one tier
    of the fleet            `FleetLine`
    a heartbeat             `BeatLine`
    malformed               `UnreadableLine`, with the reason

A line is a struct, tagged `line` in JSON; `text` formats it for people.
"""

from collections.abc import Iterator

import msgspec

from kv_protocol import codec, fleet, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Batch, Cleared, Stored
from kv_protocol.fleet import WorkerLeft, WorkerRegistered

_SHORT = 1 << 32


class EventLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="events"):
    """Batches `first_seq` to `last_seq`; their first block (None: cleared), and its parent if it was stored."""

    time_ns: int
    stream_seq: int
    worker_id: str
    dp_rank: int
    epoch: int
    first_seq: int
    last_seq: int
    kind: str
    medium: str
    blocks: int
    first_hash: int | None
    parent: int | None


class FleetLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="fleet"):
    """A worker registered, drains or left; `detail` is its address and ranks, or why it left."""

    time_ns: int
    stream_seq: int
    worker_id: str
    instance: str
    kind: str
    detail: str


class BeatLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="heartbeat"):
    """A rank's heartbeat: its place, and its number of blocks by medium."""

    time_ns: int
    worker_id: str
    dp_rank: int
    epoch: int
    last_seq: int
    blocks: dict[str, int]
    stale: str


class UnreadableLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="unreadable"):
    """A malformed message."""

    time_ns: int
    stream_seq: int
    subject: str
    bytes: int
    reason: str


Line = EventLine | FleetLine | BeatLine | UnreadableLine


def event_lines(subject: str, data: bytes, *, time_ns: int, stream_seq: int) -> Iterator[Line]:
    """Yield the lines of a message of a rank's stream."""
    try:
        rank, batches = subjects.rank_of(subject), codec.decode_message(data)
    except MalformedMessage as error:
        yield _unreadable(subject, data, error, time_ns, stream_seq)
        return
    for alike in _runs(batches):
        first, events = alike[0].event, [batch.event for batch in alike]
        yield EventLine(
            time_ns=time_ns,
            stream_seq=stream_seq,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            epoch=alike[0].epoch,
            first_seq=alike[0].seq,
            last_seq=alike[-1].seq,
            kind=type(first).__name__.lower(),
            medium=first.tier.name.lower(),
            blocks=sum(0 if isinstance(event, Cleared) else len(event.sequence_hashes) for event in events),
            first_hash=None if isinstance(first, Cleared) else first.sequence_hashes[0],
            parent=first.parent if isinstance(first, Stored) else None,
        )


def _runs(batches: list[Batch]) -> Iterator[list[Batch]]:
    run: list[Batch] = []
    for batch in batches:
        if run and not _continues(run[-1], batch):
            yield run
            run = []
        run.append(batch)
    yield run


def _continues(last: Batch, batch: Batch) -> bool:
    same = type(batch.event) is type(last.event) and batch.event.tier == last.event.tier
    return same and (batch.epoch, batch.seq) == (last.epoch, last.seq + 1)


def fleet_line(subject: str, data: bytes, *, time_ns: int, stream_seq: int) -> Line:
    """Return the line of a message of the fleet."""
    try:
        event = fleet.decode_fleet_event(data)
    except MalformedMessage as error:
        return _unreadable(subject, data, error, time_ns, stream_seq)
    detail = ""
    if isinstance(event, WorkerRegistered):
        ranks = ", ".join(map(str, event.dp_ranks))
        detail = f"{event.model} at {event.base_url}, dp_ranks {ranks}, block_size {event.block_size}"
    elif isinstance(event, WorkerLeft):
        detail = event.reason
    return FleetLine(
        time_ns=time_ns,
        stream_seq=stream_seq,
        worker_id=event.worker_id,
        instance=event.instance,
        kind=type(event).__name__.removeprefix("Worker").lower(),
        detail=detail,
    )


def beat_line(subject: str, data: bytes, *, time_ns: int) -> Line:
    """Return the line of a heartbeat, received at `time_ns`."""
    try:
        rank, beat = subjects.rank_of(subject), fleet.decode_heartbeat(data)
    except MalformedMessage as error:
        return _unreadable(subject, data, error, time_ns, 0)
    return BeatLine(
        time_ns=time_ns,
        worker_id=rank.worker_id,
        dp_rank=rank.dp_rank,
        epoch=beat.epoch,
        last_seq=beat.last_seq,
        blocks={digest.tier.name.lower(): digest.block_count for digest in beat.tiers if digest.block_count},
        stale=beat.stale,
    )


def _unreadable(subject: str, data: bytes, error: Exception, time_ns: int, stream_seq: int) -> UnreadableLine:
    return UnreadableLine(time_ns=time_ns, stream_seq=stream_seq, subject=subject, bytes=len(data), reason=str(error))


def short(epoch: int) -> str:
    """Return the lower half of an epoch, in hex: enough to tell epochs apart."""
    return f"{epoch % _SHORT:08x}"


def text(line: Line, time: str) -> str:
    """Return the line as text, after its formatted time."""
    match line:
        case EventLine():
            seqs = f"{line.first_seq}" if line.first_seq == line.last_seq else f"{line.first_seq}-{line.last_seq}"
            what = f"{line.worker_id}/{line.dp_rank} {short(line.epoch)} {seqs} {line.kind} {line.medium}"
            blocks = "" if line.first_hash is None else f" {line.blocks} blocks from {line.first_hash}"
            behind = "" if line.parent is None else f" behind {line.parent}"
            return f"{time} {line.stream_seq} {what}{blocks}{behind}"
        case FleetLine():
            detail = f": {line.detail}" if line.detail else ""
            return f"{time} fleet {line.stream_seq} {line.worker_id} {line.kind} (instance {line.instance}){detail}"
        case BeatLine():
            held = ", ".join(f"{count} {medium}" for medium, count in line.blocks.items()) or "none"
            stale = f", stale: {line.stale}" if line.stale else ""
            rank = f"{line.worker_id}/{line.dp_rank}"
            return f"{time} heartbeat {rank} {short(line.epoch)} at {line.last_seq}, blocks: {held}{stale}"
        case UnreadableLine():
            position = f" {line.stream_seq}" if line.stream_seq else ""
            return f"{time}{position} {line.subject} unreadable, {line.bytes} bytes: {line.reason}"
