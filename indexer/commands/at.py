"""`indexer at`: the index as it was."""

from typing import Any

import click
import msgspec

from indexer.commands.options import chosen_ranks, ranks_option, read_hashes, with_settings
from indexer.config import IndexerSettings
from indexer.follow.checkpoint import RankState
from indexer.follow.fold import IndexFold
from indexer.native.index import make_index
from indexer.service.history import Moment, moment_at, read_time, seq_at, time_text
from indexer.service.log_lines import short
from kv_protocol.events import TIERS
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import connected_log
from kv_runtime.process import print_json, print_lines, run_to_end

_CHILDREN_MAX = 20
_MEDIA = [tier.name.lower() for tier in TIERS]


@click.command()
@with_settings
@click.option("--seq", type=click.IntRange(1), help="after this message of the log")
@click.option("--time", "time_ns", type=lambda word: read_time(word, Clock().wall_ns()), metavar="AGO|ISO",
              help="after the last message of that time: seconds ago, or as 2026-11-21T22:10:00Z")  # fmt: skip
@ranks_option
@click.option(
    "--overlap",
    type=read_hashes,
    metavar="H1,H2,...|FILE",
    help="a prompt's sequence hashes, in order: how much of it each rank held",
)
@click.option(
    "--prefix",
    "prefixes",
    type=read_hashes,
    metavar="H1,H2,...|FILE",
    multiple=True,
    help="blocks: which ranks held each, and the blocks behind it",
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def at(
    *,
    settings: IndexerSettings,
    seq: int | None,
    time_ns: int | None,
    ranks: tuple[WorkerRank, ...],
    overlap: list[int] | None,
    prefixes: tuple[list[int], ...],
    as_json: bool,
    **_: object,
) -> None:
    """Show the index as it was after a message of the log, or at a time.

    It is made from the newest snapshot before it and the log since. Nothing that runs is disturbed. For each rank:
    its place in its stream, how many blocks it held on each medium, their digest, and notes, for instance that the log
    lacks some of its batches.

    A moment before the oldest that the log and its snapshots cover is refused with exit code 2; the error names the
    oldest.

    \b
    Examples:  indexer at --time 600
               indexer at --seq 120000 --rank w0/0 --overlap 8213904528,771239412
    """  # noqa: D301
    if (seq is None) == (time_ns is None):
        raise click.UsageError(f"found {'none' if seq is None else 'both'} of --seq and --time, allowed one of them")

    async def work() -> Moment:
        fold = IndexFold(make_index(settings.index))
        async with connected_log(settings.nats, "indexer") as log:
            there = seq if seq is not None else await seq_at(log, time_ns or 0)
            return await moment_at(log, there, fold)

    blocks = [block for hashes in prefixes for block in hashes]
    report = _report(run_to_end(work), ranks, overlap or [], blocks)
    if as_json:
        print_json(msgspec.json.encode(report))
    else:
        print_lines(*_lines(report, len(overlap or ())))


def _report(moment: Moment, wanted: tuple[WorkerRank, ...], overlap: list[int], prefixes: list[int]) -> dict[str, Any]:
    ranks, notes = chosen_ranks(wanted, moment.fold.ranks()), moment.notes()
    states = [state for rank in ranks if (state := moment.fold.state(rank)) is not None]
    views = zip(ranks, moment.fold.overlap(overlap, ranks), strict=True) if overlap else ()
    return {
        "stream_seq": moment.stream_seq,
        "time": time_text(moment.time_ns),
        "snapshot": moment.snapshot,
        "messages_read": moment.messages_read,
        "ranks": [_rank(state, notes[state.rank]) for state in states],
        "overlap": [
            {**rank._asdict(), "overlap_blocks": dict(zip(_MEDIA, view.overlap_blocks, strict=True))}
            for rank, view in views
        ],
        "prefixes": [_prefix(moment.fold, block) for block in prefixes],
    }


def _rank(state: RankState, notes: list[str]) -> dict[str, Any]:
    return {
        **state.place(),
        "blocks": state.block_counts,
        "digests": {digest.tier.name.lower(): digest.digest for digest in state.digests},
        "notes": notes,
    }


def _prefix(fold: IndexFold, block: int) -> dict[str, Any]:
    children = fold.children(block)
    return {
        "sequence_hash": block,
        "holders": [
            {**rank._asdict(), "media": [medium for tier, medium in enumerate(_MEDIA) if bits >> tier & 1]}
            for rank, bits in fold.holders(block).items()
        ],
        "children_total": len(children),
        "children": children[:_CHILDREN_MAX],
    }


def _lines(report: dict[str, Any], blocks_asked: int) -> list[str]:
    snapshot, messages = report["snapshot"], report["messages_read"]
    source = f"snapshot {snapshot} and {messages} messages" if snapshot else "the log alone"
    lines = [f"after message {report['stream_seq']}, of {report['time']} (from {source})"]
    for rank in report["ranks"]:
        blocks = [
            f"{count} {medium} (digest {rank['digests'][medium]})" for medium, count in rank["blocks"].items() if count
        ]
        position = f"{rank['worker_id']}/{rank['dp_rank']}  at {rank['seq']} of {short(rank['epoch'])}"
        lines.append(f"{position}, blocks: {', '.join(blocks) or 'none'}")
        lines += [f"    note: {note}" for note in rank["notes"]]
    if blocks_asked:
        lines.append(f"overlap with {blocks_asked} blocks, on each medium and those before it:")
    for view in report["overlap"]:
        depths = ", ".join(f"{depth} {medium}" for medium, depth in view["overlap_blocks"].items())
        lines.append(f"    {view['worker_id']}/{view['dp_rank']}  {depths}")
    for prefix in report["prefixes"]:
        holders = ", ".join(
            f"{each['worker_id']}/{each['dp_rank']} ({', '.join(each['media'])})" for each in prefix["holders"]
        )
        children = f": {', '.join(map(str, prefix['children']))}" if prefix["children"] else ""
        behind = f"{prefix['children_total']} blocks behind it{children}"
        lines.append(f"prefix {prefix['sequence_hash']}: held by {holders or 'no rank'}; {behind}")
    return lines
