"""`router explain`: one decision or the worst ones, from a running router or from the journal.

exit code   0 explained     2 not: bad arguments, no such decision, none that missed, or nothing answers
"""

import asyncio
from functools import partial
from urllib.parse import quote

import click
import msgspec

from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.process import print_json, print_lines
from router.cli.options import ControlPages, NothingRead, asked, journal_option, require_log, run_on_log, with_source
from router.config import RouterSettings
from router.decision.report import Misses, MissKind, RequestReport
from router.decision.report_text import report_lines
from router.journal.reader import JournalEntry, read_journal
from router.journal.reports import Findings, JournalReports, Question

_NEWEST = 1000
"""Decisions of a running router among which the worst are looked for: the most that its list has."""


class _Listed(msgspec.Struct):
    decision_id: str
    misses: Misses


class _List(msgspec.Struct):
    decisions: list[_Listed]


@click.command()
@click.argument("any_id", metavar="[ID]", default="")
@click.option("--last", is_flag=True, help="the newest decision")
@click.option("--worst", type=click.IntRange(1, _NEWEST), help="the N with the largest miss", metavar="N")
@click.option("--by", type=click.Choice(["cached", "ttft"]), default="cached", show_default=True,
              help="the miss: predicted minus actual cached tokens, or how late the first token was")  # fmt: skip
@click.option("--journal", "from_journal", is_flag=True, help="read the journals on the event log, not a router")
@click.option("--json", "as_json", is_flag=True, help="print the reports as one JSON list")
@journal_option
@with_source
def explain(
    *,
    settings: RouterSettings,
    any_id: str,
    last: bool,
    worst: int | None,
    by: MissKind,
    from_journal: bool,
    url: str,
    nats_url: str | None,
    as_json: bool,
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
    if (url and from_journal) or (nats_url and not from_journal):
        raise click.UsageError("found flags of both sources, allowed --router, or --journal and --nats-url")
    question = Question(any_id, worst or 0, by)
    reports = _of_journal(settings, question) if from_journal else asked(settings, url, partial(_of_router, question))
    if as_json:
        print_json(msgspec.json.encode(reports))
    else:
        for at, report in enumerate(reports):
            print_lines(*[""] * (at > 0), *report_lines(report))


# ------------------------------------------------------------------------------------------------------- the journal


def _of_journal(settings: RouterSettings, question: Question) -> list[RequestReport]:
    require_log(settings)
    findings, routers = Findings(question), dict[str, JournalReports]()

    def take(entry: JournalEntry) -> None:
        routers.setdefault(entry.router, JournalReports(findings)).take(entry.message)

    async def work(log: EventLog, stop: asyncio.Event) -> None:
        await read_journal(log, SystemClock(), "", take, stop)

    run_on_log(settings, work)
    reports = findings.reports()
    if not reports:
        raise NothingRead(_nothing_found(question, findings))
    return reports


def _nothing_found(question: Question, findings: Findings) -> str:
    unknown = findings.not_repeated
    counted = f"{findings.decisions} decisions" + (f", {unknown} without their candidates" if unknown else "")
    if question.any_id:
        return _not_there(question.any_id, findings.problem or f"allowed one in the journals, which have {counted}")
    if question.worst and findings.decisions:
        return f"--worst: found no decision with a miss by {question.by} in the journals, which have {counted}"
    return f"the journals have no decision to explain: {findings.problem or counted}"


def _not_there(any_id: str, words: str) -> str:
    return f"ID: found {any_id!r}, {words}"


# -------------------------------------------------------------------------------------------------- a running router


async def _of_router(question: Question, plane: ControlPages) -> list[RequestReport]:
    ids = [question.any_id] if question.any_id else await _ids(question, plane)
    words = "allowed a decision among the newest of the router; --journal finds older and refused ones"
    return [
        await plane.page(f"/v1/decisions/{quote(each, safe='')}", RequestReport, _not_there(each, words))
        for each in ids
    ]


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
