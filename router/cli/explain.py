"""`router explain`: one decision or the worst ones, from a running router or from the journal.

exit code   0 explained     2 not: bad arguments, no such decision, none that missed, or nothing answers
"""

import asyncio
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import click
import msgspec

from kv_runtime.clock import SystemClock
from kv_runtime.config.loading import ConfigurationError, load_settings
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.process import print_json, print_lines, run_process
from kv_runtime.supervise import until
from kv_runtime.telemetry import configure_logs
from router.cli.options import (
    NOT_DONE,
    NothingRead,
    check_token,
    checked_urls,
    plane_url,
    require_log,
    run_on_log,
)
from router.config import RouterSettings
from router.decision.report import Misses, MissKind, RequestReport
from router.decision.report_text import report_lines
from router.doctor.http_client import HttpAsker, Reply
from router.doctor.pages import PageUnreadable, decoded
from router.journal.reader import JournalEntry, read_journal
from router.journal.reports import Findings, JournalReports, Question

_TIMEOUT_S = 10.0
_NEWEST = 1000
"""Decisions of a running router among which the worst are looked for: the most that its list has."""
_NOT_FOUND = 404


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
@click.option("--router", "url", default="", help="the router's control plane, http://host:port")
@click.option("--token", help="the control plane's bearer token; better by KVROUTER_CONTROL__TOKEN")
@click.option("--journal", "from_journal", is_flag=True, help="read the journals on the event log, not a router")
@click.option("--nats-url", help="with --journal, the event log: nats://host:port; its token is nats.credentials")
@click.option("--config", "file", type=click.Path(path_type=Path), help="the router's own YAML file")
@click.option("--set", "assignments", multiple=True, metavar="SECTION.KEY=VALUE", help="set any field")
@click.option("--json", "as_json", is_flag=True, help="print the reports as one JSON list")
def explain(
    *,
    any_id: str,
    last: bool,
    worst: int | None,
    by: MissKind,
    from_journal: bool,
    url: str,
    as_json: bool,
    **flags: Any,  # noqa: ANN401
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
    if (url and from_journal) or (flags["nats_url"] and not from_journal):
        raise click.UsageError("found flags of both sources, allowed --router, or --journal and --nats-url")
    question = Question(any_id, worst or 0, by)
    try:
        given_flags = {"nats.url": flags["nats_url"], "control.token": flags["token"]}
        settings = load_settings(
            RouterSettings, file=flags["file"], assignments=flags["assignments"], flags=given_flags
        )
        configure_logs("warning")
        reports = _of_journal(settings, question) if from_journal else _of_router(settings, url, question)
    except (BrokerUnavailable, ConfigurationError, NothingRead) as error:
        print_lines(*f"router: {error}".split("\n"), err=True)
        sys.exit(NOT_DONE)
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


def _of_router(settings: RouterSettings, url: str, question: Question) -> list[RequestReport]:
    (address,) = checked_urls("--router", [url or plane_url(settings.control.host, settings.control.port)])
    token = settings.control.token.get_secret_value()
    check_token("control.token", token)
    reports: list[RequestReport] = []
    problems: list[str] = []

    async def asking() -> None:
        async with aiohttp.ClientSession() as session:
            asked = _RunningRouter(HttpAsker(session, _TIMEOUT_S), address, token)
            try:
                reports.extend(await asked.reports(question))
            except NothingRead as error:
                problems.append(str(error))
            except PageUnreadable as error:
                problems.append(f"--router: found no control plane of a router at {address}: {error}")

    async def main(stop: asyncio.Event) -> None:
        await until(stop, asking())

    run_process(main)
    if problems or not reports:
        raise NothingRead(problems[0] if problems else "stopped")
    return reports


class _RunningRouter:
    """The control plane of a router."""

    def __init__(self, asker: HttpAsker, url: str, token: str) -> None:
        self._asker, self._url, self._token = asker, url, token

    async def reports(self, question: Question) -> list[RequestReport]:
        """Return the answer; raise `NothingRead` if there is none."""
        ids = [question.any_id] if question.any_id else await self._ids(question)
        return [await self._report(any_id) for any_id in ids]

    async def _ids(self, question: Question) -> list[str]:
        path = f"/v1/decisions?limit={_NEWEST if question.worst else 1}"
        listed = decoded(await self._page(path), _List, path).decisions
        if not listed:
            raise NothingRead(f"{self._url} has taken no decision yet")
        if not question.worst:
            return [listed[0].decision_id]
        missed = [(each.misses.of(question.by) or 0.0, each.decision_id) for each in listed]
        worst = sorted((each for each in missed if each[0] > 0), reverse=True)[: question.worst]
        if not worst:
            newest = f"the newest {len(listed)} decisions of {self._url}"
            raise NothingRead(f"--worst: found no decision with a miss by {question.by} among {newest}")
        return [decision_id for _, decision_id in worst]

    async def _report(self, any_id: str) -> RequestReport:
        path = f"/v1/decisions/{quote(any_id, safe='')}"
        return decoded(await self._page(path, any_id), RequestReport, path)

    async def _page(self, path: str, any_id: str = "") -> bytes:
        reply: Reply = await self._asker.get(f"{self._url}{path}", self._token)
        if reply.is_ok:
            return reply.body
        if any_id and reply.status == _NOT_FOUND:
            words = "allowed a decision among the newest of the router; --journal finds older and refused ones"
            raise NothingRead(_not_there(any_id, words))
        found = reply.problem or f"status {reply.status}"
        raise NothingRead(f"--router: found {found} at {self._url}, allowed the control plane of a running router")
