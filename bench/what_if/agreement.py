"""`router bench agreement`: whether shadows rank policies as the closed loop does, on journals of simulated fleets.

A regime of `router bench placement` is served in virtual time under mode kv, and its router writes a journal. From that
journal alone each other policy is asked at the recorded moments, as its shadow would be, and is played in the closed
loop. Engines need `SLOWER` times as long as the prior of the fit.

    TTFT, regret    what a shadow predicts: the mean change of the request's own TTFT, and what its choice costs more by
                    the cost of mode kv, which counts what other requests lose by it
    sure            the interval of the closed loop's difference in mean TTFT from mode kv does not contain 0
    agreement       Spearman's rank correlation of all policies, ordered by the prediction and by the played mean TTFT
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import click
import msgspec

from bench.placement.regimes import REGIMES, Sizing
from bench.report import machine_line
from bench.routing.virtual_fleet import VirtualFleet
from bench.routing.virtual_router import VirtualClock
from bench.routing.virtual_worker import TEXT
from bench.what_if.figures import Estimate
from bench.what_if.play import Cell, play_all, staged
from bench.what_if.reading import JournalOfOne
from bench.what_if.report import IN_FORCE, Result, names, result_of
from kv_protocol.journal import JournalBegan, JournalRecord, decode_journal
from router.decision.policy import Policy
from router.decision.recorders import Applied
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings
from router.journal.encoder import JournalEncoder
from worker_agent.engines.simulated.timing import H200_8B

LIVE = Policy.current(mode="kv")
OTHERS: dict[str, dict[str, Any]] = {
    "ttft_weight=1": {"ttft_weight": 1},
    "ttft_weight=16": {"ttft_weight": 16},
    "kv-blocks": {"mode": "kv-blocks"},
    "least-loaded": {"mode": "least-loaded"},
    "round-robin": {"mode": "round-robin"},
    "random": {"mode": "random"},
}
SLOWER = 2.0
_REQUESTS_MAX = 5000


class SimulatedJournal:
    """The journal of a simulated fleet's router."""

    def __init__(self) -> None:
        self._encoder = JournalEncoder(1)
        self.records: list[JournalRecord] = []
        settings = msgspec.to_builtins(StateSettings(text=TEXT))
        self.record(JournalBegan(now_s=0.0, router="simulated", started_ns=1, settings=settings))

    def record(self, what: Applied) -> None:
        """`what` was applied."""
        self._encoder.add(what, 1, 0.0)
        self.records += decode_journal(self._encoder.cut().data).records


def journal_of(regime: str, policy: Policy = LIVE, *, scale: float, load: float, seed: int = 1) -> SimulatedJournal:
    """Return the journal of a fleet with small caches that serves the regime under the policy."""
    found, of = SimulatedJournal(), REGIMES[regime]
    workload = of.make(Sizing(seed, load, scale))

    def recorder_of(_state: RouterState, _clock: VirtualClock) -> SimulatedJournal:
        return found

    speeds = tuple(SLOWER * each for each in of.slowdowns or (1.0,))
    shape = of.fleet("small", workload)._replace(slowdowns=speeds)
    VirtualFleet(
        shape, policy, workload.requests, seed=seed, follow_ups=workload.follow_ups, recorder_of=recorder_of
    ).run()
    return found


def read(of: SimulatedJournal, others: Mapping[str, Mapping[str, Any]]) -> JournalOfOne:
    """Return the journal as it is read, with each other policy asked at its moments."""
    found = JournalOfOne(others, _REQUESTS_MAX, asks=True)
    for record in of.records:
        found.fold(record)
    return found


def played(of: JournalOfOne, jobs: int = 1) -> Result:
    """Return the policy in force and the others in the closed loop."""
    stage, fleet = staged(of.recorded, H200_8B), of.recorded.fleet
    assert fleet is not None, "a simulated router decides"
    cells = [Cell(name, policy) for name, policy in {IN_FORCE: fleet.policy, **of.policies}.items()]
    return result_of(of.recorded, stage, play_all(stage, cells, jobs))


class Agreement(NamedTuple):
    """Of each policy, its difference from the policy in force: as a shadow, and its mean TTFT played. Seconds."""

    ttft_s: dict[str, float]
    regret_s: dict[str, float]
    played_s: dict[str, Estimate]
    ranking: list[str]
    """All policies, and the one in force, by rising mean TTFT in the closed loop."""

    @property
    def sure(self) -> list[str]:
        """The policies of which the closed loop is sure that they are better, or worse."""
        return [name for name, each in self.played_s.items() if each.is_above_zero or each.is_below_zero]

    def contradicted(self, predicted_s: Mapping[str, float]) -> list[str]:
        """Return the sure ones of which the shadow predicts the opposite."""
        return [name for name in self.sure if (predicted_s[name] > 0) != (self.played_s[name].value > 0)]

    def correlation(self, predicted_s: Mapping[str, float]) -> float:
        """Return how the order by a prediction agrees with the ranking, -1..1."""
        return rank_correlation(sorted(self.ranking, key=lambda name: predicted_s.get(name, 0.0)), self.ranking)


def agreement(journal: JournalOfOne, result: Result) -> Agreement:
    """Return how the shadows of a journal and the closed loop agree."""
    reports = {name: tally.report() for name, tally in journal.tallies.items()}
    return Agreement(
        {name: -report.ttft_gain_s.mean for name, report in reports.items()},
        {name: -1e-3 * report.live_cost_gain["ms"].mean for name, report in reports.items()},
        {each.cell.name: each.gains.ttft_mean_s for each in result.played if each.gains is not None},
        names(result.played),
    )


def rank_correlation(one: list[str], other: list[str]) -> float:
    """Return Spearman's coefficient of two orders of the same names."""
    count = len(one)
    squares = sum((at - other.index(name)) ** 2 for at, name in enumerate(one))
    return 1.0 - 6.0 * squares / (count * (count**2 - 1))


@click.command("agreement")
@click.option("--regimes", default="chat,documents,agents,hot prefix,two speeds", show_default=True)
@click.option("--scale", type=click.FloatRange(0.01, 10), default=0.5, show_default=True, help="of the workloads")
@click.option("--load", type=click.FloatRange(0.01, 10), default=1.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="policies played side by side")
def command(*, regimes: str, scale: float, load: float, seed: int, jobs: int) -> None:
    """Compare what shadows predict with the closed loop, on journals of simulated fleets; Markdown."""
    click.echo(f"{machine_line()}; scale {scale:g}, load {load:g}, seed {seed}\n")
    click.echo("| regime | requests | policy | TTFT | regret | played TTFT (95 %) |\n|---|---:|---|---:|---:|---:|")
    for regime in regimes.split(","):
        if regime not in REGIMES:
            raise click.BadParameter(f"found {regime!r}, allowed {', '.join(REGIMES)}")
        journal = read(journal_of(regime, scale=scale, load=load, seed=seed), OTHERS)
        result = played(journal, jobs)
        for line in _rows(regime, result.requests, agreement(journal, result)):
            click.echo(line)


def _rows(regime: str, requests: int, found: Agreement) -> list[str]:
    rows = list[str]()
    wrong = [set(found.contradicted(each)) for each in (found.ttft_s, found.regret_s)]
    for name, each in found.played_s.items():
        ttft, regret = (
            f"{1e3 * of[name]:+.1f} ms{' (wrong)' if name in names_wrong else ''}"
            for of, names_wrong in zip((found.ttft_s, found.regret_s), wrong, strict=True)
        )
        sure = "sure" if name in found.sure else "not sure"
        between = f"{1e3 * each.low:+.1f}..{1e3 * each.high:+.1f}, {sure}"
        rows.append(f"| {regime} | {requests} | {name} | {ttft} | {regret} | {1e3 * each.value:+.1f} ms ({between}) |")
    by_ttft, by_regret = found.correlation(found.ttft_s), found.correlation(found.regret_s)
    return [*rows, f"| {regime} | | rank correlation with the played | {by_ttft:.2f} | {by_regret:.2f} | |"]
