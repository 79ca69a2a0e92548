"""`router explain` and `router report`: they ask a running router, or read the journals on the event log.

    explain    one decision, or the worst ones
    report     what the reuse of prompts saved, and for whom

exit code   0 it is printed     2 it is not: invalid arguments, nothing found, or no answer

Journals are read in one pass. They do not have every candidate's terms: to explain, each decision is taken again
(`router/journal/replay.py`) and kept as its verdict, which is rendered if it is asked for. An outcome is joined to its
decision while the request is among the newest `REQUESTS_MAX`.
"""

import asyncio
from collections import OrderedDict, defaultdict
from functools import partial
from heapq import nlargest
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import quote

import click
import msgspec
from msgspec.structs import asdict, replace

from kv_protocol import subjects
from kv_protocol.decided import Decided
from kv_protocol.journal import AttemptEnded, OutcomeKnown, Refused
from kv_runtime.event_log import EventLog, LogMessage
from kv_runtime.process import print_json, print_lines
from router.attribution.journal import JournalSavings, Removals, count_removals
from router.attribution.report import DIMENSIONS, Dimension, SavingsReport, report_of, report_page, report_text
from router.attribution.service import iso
from router.cli.options import NothingRead, asked, moment, run_on_log, with_source
from router.config import RouterSettings
from router.decision.report import DecisionReport, Misses, MissKind, Outcome, RequestReport, misses, report_lines
from router.decision.verdict import Verdict
from router.doctor.pages import ControlPages, PageUnreadable
from router.journal.log import CHECKPOINT_S, read_journal, read_stream
from router.journal.replay import JournalEntry, Redecided, Replay

_NS_PER_S = 1_000_000_000
_CHECKPOINTS_BEFORE = 2
"""How many intervals of checkpoints before `--since` the journal is read: a replay starts at a checkpoint."""
REQUESTS_MAX = 8192
OF_A_REQUEST_MAX = 16
"""How many decisions of one request are kept: the newest."""
_NEWEST = 1000
"""How many decisions of a running router are searched for the worst: its list never has more."""


class Question(NamedTuple):
    """Which decisions to explain: the newest with `any_id` (its own or its request's), the `worst`, or the newest."""

    any_id: str = ""
    worst: int = 0
    """How many of the decisions with a miss above 0, the largest miss first; 0: none is asked for."""
    by: MissKind = "cached"


class _Known:
    """One decision that was read; `of_request` lists all decisions of its request."""

    def __init__(self, verdict: Verdict, note: str, of_request: "list[_Known]") -> None:
        self.verdict, self._note, self._of_request = verdict, note, of_request
        self.begun_s: float = of_request[0].begun_s if of_request else verdict.now_s
        self.outcome: Outcome | None = None
        self.error, self.missed = "", 0.0

    def alone(self) -> DecisionReport:
        outcome = self.outcome
        if self.error:
            outcome = replace(outcome or Outcome(outcome="failed"), error=self.error)
        return DecisionReport(decision=self.verdict.decision(), outcome=outcome, note=self._note)

    def report(self) -> RequestReport:
        others = tuple(each.alone() for each in self._of_request)
        return RequestReport(**asdict(self.alone()), decisions=others)


class JournalReports:
    """Answers a question from the journals of all routers."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._replays = defaultdict[str, Replay](Replay)
        self._of_request: OrderedDict[tuple[str, str], list[_Known]] = OrderedDict()
        self._of_decision: dict[str, _Known] = {}
        self._one: _Known | None = None
        self._worst: list[_Known] = []
        self.decisions = self.not_repeated = 0
        """How many decisions were read, and how many could not be taken again as records before them are missing."""
        self.problem = ""
        """Why the id that was asked for has no report although it was read."""

    def take(self, entry: JournalEntry) -> None:
        """Fold in the records of a router's message."""
        for record, found in self._replays[entry.router].read(entry.message):
            if isinstance(record, Decided) and isinstance(found, Redecided):
                self._decided(entry.router, record, found)
            elif isinstance(record, Refused) and self._is_asked_for(record):
                ranks = (f"{each.worker_id}/{each.dp_rank} {each.reason}" for each in record.exclusions)
                self.problem = f"it was refused, no rank was eligible: {'; '.join(ranks) or 'there was none'}"
            elif isinstance(record, AttemptEnded | OutcomeKnown) and record.decision_id in self._of_decision:
                self._ended(self._of_decision[record.decision_id], record)

    def reports(self) -> list[RequestReport]:
        """Return the answer; empty if there is none."""
        if self._question.worst:
            return [known.report() for known in self._worst]
        return [] if self._one is None else [self._one.report()]

    def _is_asked_for(self, record: Decided | Refused) -> bool:
        return self._question.any_id in (record.request.decision_id, record.request.request_id)

    def _decided(self, router: str, record: Decided, found: Redecided) -> None:
        self.decisions += 1
        known = None if found.verdict is None else self._keep(router, found.verdict, found.difference)
        self.not_repeated += known is None
        if self._question.any_id and not self._is_asked_for(record):
            return
        if known is not None:
            self._one = known
        else:
            self.problem = f"it went to {record.rank}, but its candidates are not known: {found.difference}"

    def _ended(self, known: _Known, record: AttemptEnded | OutcomeKnown) -> None:
        if isinstance(record, AttemptEnded):
            if record.outcome != "ok":
                known.error = " ".join(filter(None, (record.outcome, record.phase, record.reason)))
        elif known.outcome is None:
            known.outcome = msgspec.convert(record, Outcome, from_attributes=True)
            if self._question.worst:
                missed = misses(known.verdict.decision(), known.outcome, known.begun_s)
                known.missed = missed.of(self._question.by) or 0.0
                if known.missed > 0:  # of equal ones the earlier come first
                    self._worst = nlargest(self._question.worst, [*self._worst, known], key=lambda each: each.missed)

    def _keep(self, router: str, verdict: Verdict, difference: str) -> _Known:
        key = router, verdict.request.request_id
        of_request = self._of_request.setdefault(key, [])
        self._of_request.move_to_end(key)
        note = f"the repeated decision differs from the journal: {difference}" if difference else ""
        known = self._of_decision[verdict.decision_id] = _Known(verdict, note, of_request)
        of_request.append(known)
        forgotten = [of_request.pop(0)] if len(of_request) > OF_A_REQUEST_MAX else []
        if len(self._of_request) > REQUESTS_MAX:
            forgotten += self._of_request.popitem(last=False)[1]
        for each in forgotten:
            self._of_decision.pop(each.verdict.decision_id, None)
        return known


class _Listed(msgspec.Struct):
    decision_id: str
    misses: Misses


class _List(msgspec.Struct):
    decisions: list[_Listed]


@click.command()
@with_source
@click.argument("any_id", metavar="[ID]", default="")
@click.option("--last", is_flag=True, help="the newest decision")
@click.option("--worst", type=click.IntRange(1, _NEWEST), help="the N with the largest miss", metavar="N")
@click.option("--by", type=click.Choice(["cached", "ttft"]), default="cached", show_default=True,
              help="the miss: predicted minus actual cached tokens, or how late the first token was")  # fmt: skip
@click.option("--journal", "from_journal", is_flag=True, help="read the journals on the event log, not a router")
@click.option("--json", "as_json", is_flag=True, help="print the reports as one JSON list")
def explain(
    *,
    settings: RouterSettings,
    any_id: str,
    last: bool,
    worst: int | None,
    by: MissKind,
    from_journal: bool,
    url: str,
    nats__url: str | None,
    as_json: bool,
    **_: object,
) -> None:
    """Explain a decision: why that worker, what every other would have cost, and whether the prediction held.

    ID is a decision's (x-decision-id) or a request's (x-request-id). A running router explains its newest decisions;
    --journal reads all that the event log keeps, and adds why an attempt failed. A late first token is one behind the
    request's target, or behind the predicted time if it has none (modes kv and predicted-ttft have one).

    \b
    Examples:  router explain --last
               router explain --worst 3 --by ttft --journal --nats-url nats://127.0.0.1:4222
    """  # noqa: D301
    if bool(any_id) + last + bool(worst) != 1:
        given = [name for name, value in (("an ID", any_id), ("--last", last), ("--worst", worst)) if value]
        raise click.UsageError(f"found {' and '.join(given) or 'none'}, allowed one of an ID, --last and --worst N")
    _check_source(url, nats__url, reads_journal=from_journal)
    question = Question(any_id, worst or 0, by)
    if from_journal:
        found = JournalReports(question)
        run_on_log(settings, lambda log, stop: read_journal(log, "", found.take, stop))
        if not (reports := found.reports()):
            raise NothingRead(_nothing_found(question, found))
    else:
        reports = asked(settings, url, partial(_explained_by_router, question))
    if as_json:
        print_json(msgspec.json.encode(reports))
    else:
        for at, report in enumerate(reports):
            print_lines(*[""] * (at > 0), *report_lines(report))


def _check_source(url: str, nats_url: str | None, *, reads_journal: bool) -> None:
    if (url and reads_journal) or (nats_url and not reads_journal):
        raise click.UsageError("found flags of both sources, allowed --router, or --journal with --nats-url")


def _nothing_found(question: Question, read: JournalReports) -> str:
    unknown = read.not_repeated
    counted = f"{read.decisions} decisions" + (f", {unknown} without their candidates" if unknown else "")
    if question.any_id:
        return f"ID: found {question.any_id!r}, {read.problem or f'allowed one in the journals, which have {counted}'}"
    if question.worst and read.decisions:
        return f"--worst: found no decision with a miss by {question.by} in the journals, which have {counted}"
    return f"the journals have no decision to explain: {read.problem or counted}"


async def _explained_by_router(question: Question, plane: ControlPages) -> list[RequestReport]:
    ids = [question.any_id] if question.any_id else await _ids(question, plane)
    reports = []
    for each in ids:
        try:
            reports.append(await plane.page(f"/v1/decisions/{quote(each, safe='')}", RequestReport))
        except PageUnreadable as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            words = "allowed a decision among the newest of the router; --journal finds older and refused ones"
            raise NothingRead(f"ID: found {each!r}, {words}") from error
    return reports


async def _ids(question: Question, plane: ControlPages) -> list[str]:
    listed = (await plane.page(f"/v1/decisions?limit={_NEWEST if question.worst else 1}", _List)).decisions
    if not listed:
        raise NothingRead(f"{plane.url} has taken no decision yet")
    if not question.worst:
        return [listed[0].decision_id]
    missed = [(each.misses.of(question.by) or 0.0, each.decision_id) for each in listed]
    worst = sorted((each for each in missed if each[0] > 0), reverse=True)[: question.worst]
    if not worst:
        newest = f"the newest {len(listed)} decisions of {plane.url}"
        raise NothingRead(f"--worst: found no decision with a miss by {question.by} among {newest}")
    return [decision_id for _, decision_id in worst]


@click.command()
@with_source
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
def report(
    *,
    settings: RouterSettings,
    since_ns: int | None,
    until_ns: int | None,
    from_journal: bool,
    with_evictions: bool,
    by: tuple[Dimension, ...],
    url: str,
    nats__url: str | None,
    as_json: bool,
    as_html: bool,
    **_: object,
) -> None:
    """Report what the reuse of prompts saved, and for whom: by model, tenant, LoRA adapter and prefix family.

    A running router reports all requests since it started. With --journal, --since or --until the journals on the event
    log are read, for any period that they still have. docs/REPORT.md defines each figure.

    \b
    Examples:  router report --by tenant
               router report --since 2026-11-21T22:00:00Z --nats-url nats://127.0.0.1:4222 --html > report.html
    """  # noqa: D301
    reads_journal = from_journal or with_evictions or since_ns is not None or until_ns is not None
    _check_source(url, nats__url, reads_journal=reads_journal)
    if as_json and as_html:
        raise click.UsageError("found --json and --html, allowed one of them")
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        raise click.UsageError(f"--until: found {iso(until_ns)}, allowed a time after --since, {iso(since_ns)}")
    if reads_journal:
        found = _saved_by_journal(settings, since_ns, until_ns, with_evictions=with_evictions)
    else:
        found = asked(settings, url, lambda plane: plane.page("/v1/report", SavingsReport))
    if as_json:
        print_json(msgspec.json.encode(found))
    elif as_html:
        click.echo(report_page(found, by or DIMENSIONS))
    else:
        print_lines(*report_text(found, by or DIMENSIONS))


def _saved_by_journal(
    settings: RouterSettings, since_ns: int | None, until_ns: int | None, *, with_evictions: bool
) -> SavingsReport:
    removals = Removals() if with_evictions else None
    savings = JournalSavings(settings.report.attribution(), since_ns, until_ns, removals)
    lead_ns = round(_CHECKPOINTS_BEFORE * CHECKPOINT_S * _NS_PER_S)
    from_ns = None if since_ns is None else max(0, since_ns - lead_ns)

    async def work(log: EventLog, stop: asyncio.Event) -> None:
        if removals is not None:

            async def remove(message: LogMessage) -> None:
                if until_ns is None or message.time_ns < until_ns:
                    count_removals(removals, message.subject, message.time_ns, message.data)

            await read_stream(log, subjects.EVENTS_STREAM, subjects.EVENTS_ALL, remove, stop, from_ns=since_ns)
        await read_journal(log, "", savings.take, stop, from_ns=from_ns)

    run_on_log(settings, work)
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
