"""The figures of the event bench as tables: rows of text, to be printed or written as Markdown."""

from collections.abc import Iterator, Sequence

from bench.events.cold import Cold
from bench.events.freshness import Freshness
from bench.events.heartbeats import HeartbeatResults
from bench.events.recovery import Recovery
from bench.events.results import EventResults
from bench.events.run import Busy
from bench.events.stages import STAGES
from bench.events.throughput import Throughput
from bench.index.tables import NONE, FigureTable, number, times
from bench.index.verdicts import IndexVerdict

_VERDICT_TEXT = {True: "ok", False: "MISSED", None: "not measured"}


def tables(results: EventResults) -> list[FigureTable]:
    """Return the tables of all groups that were measured."""
    made: list[FigureTable] = []
    if results.freshness is not None:
        made += [_freshness(results.freshness), _stages(results.freshness)]
    if results.throughput is not None:
        made.append(_throughput(results.throughput))
    if results.cold is not None:
        made += [_starts(results.cold), _snapshots(results.cold)]
    if results.recovery is not None:
        made.append(_recovery(results.recovery))
    if results.pulse is not None:
        made.append(_heartbeats(results.pulse))
    return made


def _freshness(cells: Sequence[Freshness]) -> FigureTable:
    columns = (
        "load", "blocks/s", "batches/s", "messages/s", "bytes each", "p50", "p99", "max", "bare p50", "bare p99",
        "bare max", "p50 / bare",
    )  # fmt: skip
    rows = [
        (
            cell.name,
            *map(number, (cell.blocks_s, cell.batches_s, cell.messages_s, cell.message_bytes)),
            *map(number, cell.age),
            *map(number, cell.bare),
            times(cell.age.p50_ms / cell.bare.p50_ms),
        )
        for cell in cells
    ]
    return FigureTable("freshness: from the engine's flush to applied in another process, ms", columns, rows)


def _stages(cells: Sequence[Freshness]) -> FigureTable:
    columns = ("load", *STAGES, "longest GC", "CPU agents", "nats-server", "index", "others", "agents, us a batch")
    rows = [
        (
            cell.name,
            *(number(cell.stages_ms.get(stage)) for stage in STAGES),
            number(cell.longest_gc_ms),
            *_busy(cell.busy),
            number(cell.busy and cell.busy.ours.agent_s / cell.batches_s, 1e-6),
        )
        for cell in cells
    ]
    return FigureTable(
        "freshness: where it goes, medians in ms (publish is a part of to log), and what it takes, CPU s a second",
        columns,
        rows,
    )


def _busy(busy: Busy | None) -> Iterator[str]:
    return map(number, (*busy.ours, busy.others) if busy else (None,) * 4)


def _throughput(cells: Sequence[Throughput]) -> FigureTable:
    columns = (
        "blocks an event", "blocks/s", "messages", "bytes each", "agent", "nats-server", "index",
        "bare blocks/s", "bare / ours", "bare client", "its nats-server",
    )  # fmt: skip
    rows = [
        (
            str(cell.event_blocks),
            *map(number, (cell.blocks_s, cell.messages, cell.message_bytes)),
            *map(number, cell.cpu),
            number(cell.bare_blocks_s),
            times(cell.bare_blocks_s / cell.blocks_s),
            *map(number, (cell.bare_cpu.agent_s, cell.bare_cpu.nats_s)),
        )
        for cell in cells
    ]
    return FigureTable("throughput: payloads of hop A to applied, one rank; CPU s a million blocks", columns, rows)


def _starts(cold: Cold) -> FigureTable:
    columns = ("from", "blocks", "bytes read", "connected", "caught up", "all proven", "reading the bytes alone")
    rows = [
        (
            each.name,
            f"{each.blocks:,}",
            f"{each.bytes:,}" if each.bytes else NONE,
            *map(number, (each.connected_s, each.caught_up_s, each.proven_s, each.limit_s)),
        )
        for each in cold.starts
    ]
    return FigureTable("cold start of an index, s since before its process began", columns, rows)


def _snapshots(cold: Cold) -> FigureTable:
    columns = ("snapshot", "blocks", "bytes", "checkpoint", "encode", "all, read back", "event loop blocked")
    rows = [
        (
            str(at),
            f"{each.blocks:,}",
            f"{each.bytes:,}",
            *(number(each_s, 1e-3) for each_s in (each.checkpoint_s, each.encode_s, each.total_s, each.blocked_s)),
        )
        for at, each in enumerate(cold.snapshots, 1)
    ]
    return FigureTable("writing a snapshot, ms", columns, rows)


def _recovery(cells: Sequence[Recovery]) -> FigureTable:
    columns = ("what", "healed by", "median", "worst", "asked, bytes", "answered, bytes", "the bytes alone", "rounds")
    rows = [
        (
            cell.name,
            cell.healed_by,
            *(number(each_s, 1e-3) for each_s in (cell.seconds, cell.worst_s)),
            f"{cell.asked_bytes:,}",
            f"{cell.answered_bytes:,}",
            number(cell.bare_s, 1e-3),
            str(cell.rounds),
        )
        for cell in cells
    ]
    return FigureTable("recovery: from detection to current, ms", columns, rows)


def _heartbeats(results: HeartbeatResults) -> FigureTable:
    first = results.pulses[0]
    rows = [(f"{each.ranks}", *(number(busy_s, 1e-3) for busy_s in each.busy.ours), "") for each in results.pulses]
    for each in results.pulses[1:]:
        more = each.ranks - first.ranks
        of_one = each.busy.ours.since(first.busy.ours).over(more)
        rows.append((f"one of {more} more", *(number(busy_s, 1e-6) for busy_s in of_one), "us a heartbeat"))
    rows.append(("bare", *(number(each_us) for each_us in results.bare_us), "us a message, in a burst"))
    return FigureTable("heartbeats with digests, CPU ms a second", ("ranks", "agent", "nats-server", "index", ""), rows)


def verdict_table(judged: Sequence[IndexVerdict]) -> FigureTable:
    """Return the targets, what was measured, and whether it is enough, a row for each cell."""
    rows = [
        (verdict.target, f"{verdict.sign} {verdict.needed:g}{verdict.unit}", *cell)
        for verdict in judged
        for cell in _judged(verdict)
    ]
    return FigureTable("Targets", ("target", "needed", "cell", "measured", ""), rows)


def _judged(verdict: IndexVerdict) -> Iterator[tuple[str, str, str]]:
    for each in verdict.judged:
        yield each.cell, f"{number(each.measured)}{verdict.unit}", _VERDICT_TEXT[each.holds]
    if not verdict.judged:
        yield NONE, NONE, _VERDICT_TEXT[None]
