"""`router report`: what the reuse of prompts saved, from a running router or from journals.

exit code   0 reported     2 not: bad arguments, no journal in the period, or nothing answers
"""

import asyncio

import click
import msgspec

from kv_protocol import subjects
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog, LogMessage
from kv_runtime.process import print_json, print_lines
from router.attribution.journal import JournalSavings, Removals, count_removals
from router.attribution.report import DIMENSIONS, Dimension, SavingsReport, report_of, report_page, report_text
from router.attribution.service import iso
from router.cli.options import NothingRead, asked, journal_option, moment, require_log, run_on_log, with_source
from router.config import RouterSettings
from router.journal.log import CHECKPOINT_S, JournalEntry, read_journal, read_to_end

_NS_PER_S = 1_000_000_000
_CHECKPOINTS_BEFORE = 2
"""How far before `--since` the journal is read, in the intervals of checkpoints: a replay starts at a checkpoint."""


@click.command()
@click.option(
    "--since", "since_ns", type=moment, metavar="ISO", help="requests that ended from then on; needs a journal"
)
@click.option("--until", "until_ns", type=moment, metavar="ISO", help="requests that ended before; needs a journal")
@click.option("--journal", "--from-journal", "from_journal", is_flag=True,
              help="read the journals on the event log, not a router")  # fmt: skip
@click.option("--evictions", "with_evictions", is_flag=True,
              help="also read what the ranks removed; needs a journal, reads all KV events of the period")  # fmt: skip
@click.option("--by", type=click.Choice(DIMENSIONS), multiple=True, help="the tables to print; without it all")
@click.option("--json", "as_json", is_flag=True, help="print the report as one JSON object, with all tables")
@click.option("--html", "as_html", is_flag=True, help="print the report as one HTML page")
@journal_option
@with_source
def report(
    *,
    settings: RouterSettings,
    since_ns: int | None,
    until_ns: int | None,
    from_journal: bool,
    with_evictions: bool,
    by: tuple[Dimension, ...],
    url: str,
    nats_url: str | None,
    as_json: bool,
    as_html: bool,
) -> None:
    """Report what the reuse of prompts saved, and for whom: by model, tenant, LoRA adapter and prefix family.

    A running router reports all requests since it started. With --journal, --since or --until the journals on the event
    log are read, for any period that they still have. docs/REPORT.md defines each figure.

    \b
    Examples:  router report --by tenant
               router report --since 2026-11-21T22:00:00Z --nats-url nats://127.0.0.1:4222 --html > report.html
    """  # noqa: D301
    reads_journal = from_journal or with_evictions or since_ns is not None or until_ns is not None
    if (url and reads_journal) or (nats_url and not reads_journal):
        words = "found flags of both sources, allowed --router, or --nats-url with --journal"
        raise click.UsageError(words)
    if as_json and as_html:
        raise click.UsageError("found --json and --html, allowed one of them")
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        raise click.UsageError(f"--until: found {iso(until_ns)}, allowed a time after --since, {iso(since_ns)}")
    if reads_journal:
        found = _of_journal(settings, (since_ns, until_ns), with_evictions)
    else:
        found = asked(settings, url, lambda plane: plane.page("/v1/report", SavingsReport))
    if as_json:
        print_json(msgspec.json.encode(found))
    elif as_html:
        click.echo(report_page(found, by or DIMENSIONS))
    else:
        print_lines(*report_text(found, by or DIMENSIONS))


def _of_journal(
    settings: RouterSettings,
    period: tuple[int | None, int | None],
    with_evictions: bool,  # noqa: FBT001
) -> SavingsReport:
    require_log(settings)
    since_ns, until_ns = period
    removals = Removals() if with_evictions else None
    savings = JournalSavings(settings.report.limits(), since_ns, until_ns, removals)
    lead_ns = round(_CHECKPOINTS_BEFORE * CHECKPOINT_S * _NS_PER_S)
    from_ns = None if since_ns is None else max(0, since_ns - lead_ns)

    def take(entry: JournalEntry) -> None:
        savings.take(entry.router, entry.time_ns, entry.message)

    async def remove(message: LogMessage) -> None:
        if removals is not None and (until_ns is None or message.time_ns < until_ns):
            count_removals(removals, message.subject, message.time_ns, message.data)

    async def work(log: EventLog, stop: asyncio.Event) -> None:
        if removals is not None:
            events = subjects.EVENTS_STREAM, subjects.EVENTS_ALL
            await read_to_end(log, SystemClock(), *events, remove, stop, from_ns=since_ns)
        await read_journal(log, SystemClock(), "", take, stop, from_ns=from_ns)

    run_on_log(settings, work)
    savings.settle()
    if savings.first_ns is None:
        within = f"from {iso(since_ns) if since_ns else 'the oldest'} to {iso(until_ns) if until_ns else 'now'}"
        raise NothingRead(f"the journals on the event log have no message {within}")
    since = iso(since_ns if since_ns is not None else savings.first_ns)
    last = iso(until_ns if until_ns is not None else savings.last_ns)
    return report_of(
        savings.attribution,
        "journal",
        since,
        last,
        settings.report.families,
        not_repeated=savings.not_repeated,
        removed_blocks=None if removals is None else removals.total,
    )
