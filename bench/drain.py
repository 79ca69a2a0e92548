"""`router bench drain`: a worker leaves under load; what do its sessions lose?

A run plays the same conversations on a new fleet of real processes with simulated engines. At `--drain-at` seconds

    undisturbed      nothing happens
    hand-over        the worker is drained, hands over what only it holds, and is stopped when it is drained
    without          the same without hand-over
    killed           the worker is killed

Every session has its own text. A session is *moved* if its last request before the drain
went to that worker. The report has the hit rate of these sessions' first requests afterwards, and of all their later
requests. Unless `--set` changes it, the router
keeps sessions at their worker where possible, so that a loss comes from the drain. The default policy moves them for a
small difference in load (`undisturbed` shows how much).
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench.demo.replay import Player
from bench.demo.workload import Conversation, WorkloadShape, conversations
from bench.processes import FleetProcesses, FleetShape
from bench.report import machine_line, percentile
from bench.streaming_client import Measured
from kv_runtime.clock import SystemClock
from kv_runtime.process import run_process

Way = Literal["undisturbed", "hand-over", "without", "killed"]
WAYS: tuple[Way, ...] = get_args(Way)
MODEL, LEAVES = "sim-8b", "w1"
_WORKER_SETTINGS = ("engine.block_size=32", "engine.total_kv_blocks=8192", "telemetry.log_level=error")
_ROUTER_SETTINGS = ("telemetry.log_level=error",)
_STAYING = ("policy.history_weight=0", "policy.prefill_scale=4")
_SHAPE = WorkloadShape(system_bytes=4000, question_bytes=300, think_s=2.5, arrival_s=0.08, answer_tokens=16)
_WAIT_S = 60
_WIDTH = 140

Session = Sequence[Measured]


class DrainLosses(NamedTuple):
    """What a run lost. Hit rates are cached over prompt tokens; times in seconds since the run began, TTFT in ms."""

    way: Way
    requests: int
    failed: int
    sessions: int
    moved: int
    first_hit_rate: float
    """Of the moved sessions' first requests afterwards."""
    first_ttft_p50_ms: float
    first_ttft_p95_ms: float
    later_hit_rate: float
    """Of all their requests afterwards."""
    fleet_hit_rate: float
    """Of the requests of all sessions."""
    cut_s: float
    drained_s: float | None
    handover: dict[str, Any] | None


def lost(
    way: Way, sessions: Sequence[Session], cut_s: float, drained_s: float | None, handover: dict[str, Any] | None
) -> DrainLosses:
    """Return what a run lost when the worker left at `cut_s`; each session's requests are in their order."""
    moved = [session for session in sessions if _was_there(session, cut_s)]
    afterwards = [[each for each in session if each.sent_s >= cut_s] for session in moved]
    first = [requests[0] for requests in afterwards if requests]
    ttfts_ms = [each.ttft_s * 1000 for each in first if not each.error]
    every = [each for session in sessions for each in session]
    return DrainLosses(
        way=way,
        requests=len(every),
        failed=sum(bool(each.error) for each in every),
        sessions=len(sessions),
        moved=len(first),
        first_hit_rate=_hit_rate(first),
        first_ttft_p50_ms=percentile(ttfts_ms, 0.5),
        first_ttft_p95_ms=percentile(ttfts_ms, 0.95),
        later_hit_rate=_hit_rate([each for requests in afterwards for each in requests]),
        fleet_hit_rate=_hit_rate([each for each in every if each.sent_s >= cut_s]),
        cut_s=cut_s,
        drained_s=drained_s,
        handover=handover,
    )


def _was_there(session: Session, cut_s: float) -> bool:
    before = [each for each in session if each.sent_s < cut_s]
    return bool(before) and before[-1].worker == LEAVES


def _hit_rate(requests: Sequence[Measured]) -> float:
    answered = [each for each in requests if not each.error]
    prompt_tokens = sum(each.prompt_tokens for each in answered)
    return sum(each.cached_tokens for each in answered) / prompt_tokens if prompt_tokens else 0.0


def verdicts(found: Sequence[DrainLosses]) -> list[str]:
    """Return the problems of the runs."""
    by_way = {each.way: each for each in found}
    problems = [
        f"{way}: {by_way[way].failed} requests failed"
        for way in ("undisturbed", "hand-over", "without")
        if way in by_way and by_way[way].failed
    ]
    if "hand-over" in by_way and "without" in by_way:
        warm, cold = by_way["hand-over"].first_hit_rate, by_way["without"].first_hit_rate
        if warm <= cold:
            problems.append(f"first requests hit {warm:.1%} with hand-over, more than {cold:.1%} wanted")
    return problems


@click.command("drain", context_settings={"show_default": True})
@click.option("--workers", type=click.IntRange(2, 16), default=4)
@click.option("--sessions", type=click.IntRange(4, 512), default=64)
@click.option("--turns", type=click.IntRange(2, 50), default=4)
@click.option(
    "--drain-at", "drain_at_s", type=click.FloatRange(1, 600), default=7.0, help="seconds after the beginning"
)
@click.option("--tokens", type=click.IntRange(1, 1 << 30), default=200_000, help="that the hand-over may cost")
@click.option("--set", "assignments", multiple=True, default=_STAYING, help="the router's settings")
@click.option("--ways", default=",".join(WAYS), help="runs, between commas")
@click.option("--seed", type=int, default=1, help="of the conversations and of the router's draws")
@click.option("--json", "is_json", is_flag=True, help="print JSON and nothing else")
@click.pass_context
def drain(
    context: click.Context,
    workers: int,
    sessions: int,
    turns: int,
    drain_at_s: float,
    tokens: int,
    assignments: tuple[str, ...],
    *,
    ways: str,
    seed: int,
    is_json: bool,
) -> None:
    """Let one of several workers leave while people talk with it, in several ways, and print what they lost.

    Exit code 1 where a request failed that should not have, or the hand-over won nothing.
    """
    named = tuple(each for each in WAYS if each in ways.split(","))
    if unknown := set(ways.split(",")) - set(WAYS):
        context.fail(f"--ways: found {min(unknown)!r}, allowed {', '.join(WAYS)}")
    shape = _SHAPE._replace(conversations=sessions, turns=turns, assistants=16 * sessions)
    people, found = list(conversations(shape, seed)), list[DrainLosses]()

    async def play(_: asyncio.Event) -> None:
        for way in named:
            settings = (*_ROUTER_SETTINGS, *assignments, f"policy.seed={seed}")
            async with FleetProcesses(FleetShape(workers, "kv", MODEL, _WORKER_SETTINGS, settings)) as fleet:
                found.append(await _run(fleet, way, people, shape.answer_tokens, drain_at_s, tokens))

    run_process(play)
    problems = verdicts(found)
    if is_json:
        click.echo(
            msgspec.json.encode(
                {"workers": workers, "seed": seed, "runs": [each._asdict() for each in found], "problems": problems}
            )
        )
    else:
        _show(found, problems, workers)
    context.exit(1 if problems else 0)


async def _run(
    fleet: FleetProcesses, way: Way, people: Sequence[Conversation], answer_tokens: int, drain_at_s: float, tokens: int
) -> DrainLosses:
    clock, drained_s, handover = SystemClock(), None, None
    async with asyncio.TaskGroup() as group:
        began_s = clock.now()
        talks = [group.create_task(Player(fleet.data_url, MODEL, clock).play([each], answer_tokens)) for each in people]
        await clock.sleep(drain_at_s)
        cut_s = clock.now() - began_s
        if way == "killed":
            await fleet.kill(LEAVES)
        elif way != "undisturbed":
            handover = await _drained(fleet, tokens if way == "hand-over" else 0)
            drained_s = clock.now() - began_s
            await fleet.workers[LEAVES].end()
    return lost(way, [talk.result() for talk in talks], cut_s, drained_s, handover)


async def _drained(fleet: FleetProcesses, tokens: int) -> dict[str, Any] | None:
    """Drain the worker; return what was handed over."""
    url = f"{fleet.control_url}/v1/workers/{LEAVES}/drain"
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(url, json={"handover_tokens": tokens, "handover_s": _WAIT_S}) as response:
            status = (await response.json())["drain"]
        while status["state"] != "drained":
            async with session.get(url, params={"wait": _WAIT_S}) as response:
                status = await response.json()
    handover: dict[str, Any] | None = status["handover"]
    return handover


def _show(found: Sequence[DrainLosses], problems: Sequence[str], workers: int) -> None:
    console = Console() if Console().is_terminal else Console(width=_WIDTH)
    console.print(f"{workers} workers, of which {LEAVES} leaves. {machine_line()}", highlight=False)
    table = Table(
        "run", "requests", "failed", "moved sessions", "their first request hits", "all of theirs", "of all sessions",
        "first TTFT p50, ms", "p95, ms", "drained after, s", "prefixes warmed / listed", "tokens",
    )  # fmt: skip
    for each in found:
        handover = each.handover or {"warmed": 0, "listed": 0, "spent_tokens": 0}
        table.add_row(
            each.way,
            str(each.requests),
            str(each.failed),
            f"{each.moved} of {each.sessions}",
            f"{each.first_hit_rate:.1%}",
            f"{each.later_hit_rate:.1%}",
            f"{each.fleet_hit_rate:.1%}",
            f"{each.first_ttft_p50_ms:.0f}",
            f"{each.first_ttft_p95_ms:.0f}",
            "" if each.drained_s is None else f"{each.drained_s - each.cut_s:.1f}",
            f"{handover['warmed']} / {handover['listed']}",
            f"{handover['spent_tokens']:,}",
        )
    console.print(table)
    for line in [*problems, *_gain(found)]:
        console.print(line, highlight=False)


def _gain(found: Sequence[DrainLosses]) -> list[str]:
    by_way = {each.way: each for each in found}
    if "hand-over" not in by_way or "without" not in by_way:
        return []
    rates = [(name, getattr(by_way["hand-over"], name), getattr(by_way["without"], name)) for name in _RATES]
    return [
        f"{_RATES[name]}: {warm:.1%} with hand-over, {cold:.1%} without: {100 * (warm - cold):+.1f} points"
        + (f", x{warm / cold:.2f}" if cold else "")
        for name, warm, cold in rates
    ]


_RATES = {
    "first_hit_rate": "first request of a moved session",
    "later_hit_rate": "all requests of moved sessions",
    "fleet_hit_rate": "all requests of all sessions",
}
