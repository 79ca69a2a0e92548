"""`router journal tail`: prints a journal record by record."""

import asyncio
from datetime import UTC, datetime
from functools import partial

import click
import msgspec

from kv_protocol import subjects
from kv_protocol.decided import Decided, cost_unit
from kv_protocol.journal import FleetApplied, JournalRecord, LedgerApplied, Lost, Refused
from kv_runtime.event_log import EventLog
from kv_runtime.process import PrintedLines
from kv_runtime.supervise import until
from router.cli.options import run_on_log, with_settings
from router.config import RouterSettings
from router.journal.log import JournalEntry, JournalMessages

_NOT_SHOWN = (
    "now_s", "request", "best", "terms", "costs", "overlap", "event", "exclusions", "settings", "report",
    "data", "rows",
)  # fmt: skip


@click.group()
def journal() -> None:
    """Look into routers' journals."""


@journal.command()
@with_settings
@click.option("--all", "from_start", is_flag=True, help="begin with the oldest that is kept")
@click.option("--limit", type=click.IntRange(1), help="end after so many records")
@click.option("--json", "as_json", is_flag=True, help="print each record as a JSON object; bytes are base64")
def tail(
    *,
    settings: RouterSettings,
    assignments: tuple[str, ...],
    router_name: str,
    from_start: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    """Follow the journal: records as routers applied them, from now on, or from the oldest that is kept.

    It ends with a signal, or after --limit records.

    \b
    Example:  router journal tail --nats-url nats://127.0.0.1:4222 --all --limit 50
    """  # noqa: D301
    del assignments
    done = asyncio.Event()
    printed = PrintedLines(done, limit, as_json=as_json)

    def show(entry: JournalEntry) -> None:
        for record in entry.message.records:
            printed.show(partial(as_line, entry, record), partial(as_object, entry, record))

    async def work(log: EventLog, stop: asyncio.Event) -> None:
        state = await log.stream_state(subjects.JOURNAL_STREAM)
        after_seq = 0 if from_start else state.last_seq
        messages = JournalMessages(show)
        subject = subjects.journal(router_name) if router_name else subjects.JOURNAL_ALL
        stream, created = subjects.JOURNAL_STREAM, state.created
        await log.follow(stream, subject, messages.on_message, after_seq=after_seq, created=created)
        await until(stop, done.wait())
        messages.log_refused()

    run_on_log(settings, work)


def as_object(entry: JournalEntry, record: JournalRecord) -> bytes:
    """Return the record as JSON, with its kind and its place."""
    return msgspec.json.encode(
        {
            "time": _time(entry.time_ns),
            "router": entry.router,
            "life": entry.message.life,
            "seq": entry.stream_seq,
            "kind": record.__struct_config__.tag,
            "record": msgspec.structs.asdict(record),
        }
    )


def as_line(entry: JournalEntry, record: JournalRecord) -> str:
    """Return the record as a line for people."""
    kind = str(record.__struct_config__.tag)
    return f"{_time(entry.time_ns)} {entry.stream_seq:>8} {entry.router} {record.now_s:.3f} {kind:<8} {_text(record)}"


def _text(record: JournalRecord) -> str:
    match record:
        case Decided(request=request):
            margin = "" if record.margin is None else f", {record.margin:.1f} {cost_unit(record)} ahead"
            return (
                f"{request.decision_id}: {request.isl_tokens} tokens for {request.model} to {record.rank}, "
                f"{record.policy} by {record.reason}{margin}, of {record.ranks} ranks"
            )
        case Refused(request=request):
            reasons = (f"{each.worker_id}/{each.dp_rank} {each.reason}" for each in record.exclusions)
            return f"{request.decision_id}: {'; '.join(reasons)}"
        case FleetApplied(event=event):
            return f"{type(event).__name__} {event.worker_id} {event.instance}"
        case LedgerApplied(event=event, router=router):
            return f"{type(event).__name__} {_words(event, ('blocks',))}{f' of {router}' if router else ''}"
        case Lost():
            return f"{record.count} records that stood here were given up"
        case _:
            return _words(record, _NOT_SHOWN)


def _words(struct: msgspec.Struct, left_out: tuple[str, ...]) -> str:
    fields = msgspec.structs.asdict(struct).items()
    return " ".join(f"{name}={value}" for name, value in fields if name not in left_out and value not in ("", None, ()))


def _time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
