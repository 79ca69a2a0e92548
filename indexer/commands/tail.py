"""`indexer tail`: what the log says, line by line."""

import asyncio

import click
import msgspec

from indexer.commands.options import read_rank, with_settings
from indexer.config import IndexerSettings
from indexer.service import log_tail
from indexer.service.history import time_text
from indexer.service.log_lines import Line, text
from indexer.service.log_tail import TailFilter, TailStart
from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog, connected_log
from kv_runtime.process import PrintedLines, run_process
from kv_runtime.supervise import Part, run_parts

_DRAIN_S = 5.0


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
@click.option("--since", type=click.FloatRange(0, 1e9), metavar="SECONDS", help="begin so many seconds ago")
@click.option("--all", "from_start", is_flag=True, help="begin with the oldest that is kept")
@click.option("--heartbeats", is_flag=True, help="show heartbeats too, as they come")
@click.option("--limit", type=click.IntRange(1), help="end after so many lines")
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
    wanted = TailFilter(
        slug=subjects.model_slug(model) if model else "",
        worker_id=rank.worker_id if rank else "",
        dp_rank=rank.dp_rank if rank else None,
        heartbeats=heartbeats,
    )
    clock = Clock()

    async def start(log: EventLog) -> TailStart:
        if from_start:
            return log_tail.from_all()
        if since is not None:
            return await log_tail.since(log, clock.wall_ns() - round(since * 1e9))
        return await (log_tail.from_now(log) if from_seq is None else log_tail.from_seq(log, from_seq))

    async def main(stop: asyncio.Event) -> None:
        printed = PrintedLines(stop, limit, as_json=as_json)

        def show(line: Line) -> None:
            printed.show(lambda: text(line, time_text(line.time_ns)), lambda: msgspec.json.encode(line))

        async with connected_log(settings.nats, "indexer") as log:
            await log_tail.follow(log, clock, wanted, await start(log), show)
            await run_parts([Part("event-log", log.run)], stop=stop, drain_s=_DRAIN_S)

    run_process(main)
