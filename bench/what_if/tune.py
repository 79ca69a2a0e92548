"""`router tune`: proposes a policy from a journal, and a router's shadows. It changes nothing.

1. candidates    `CANDIDATES`, those that are named, and the shadows of a router, each as a difference from the policy
                 in force at the journal's first request
2. screening     each is asked at the recorded moments; those that stay are taken in turn from two orders: by the mean
                 gain of predicted TTFT, and by the mean gain of the live cost
3. closed loop   these and the policy in force are played through engines fitted to the fleet
4. proposal      the policy with the lowest mean TTFT. Its gain over the policy in force must exceed the gain's
                 interval; its p99 may not be worse by more than the p99's interval. There may be no proposal
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
import yaml

from bench.report import machine_line
from bench.what_if.command import Asked, named_policies, read, simulated, simulation_options
from bench.what_if.recorded import JournalOfOne
from bench.what_if.report import Result, advice, as_object, best_of, lines
from kv_runtime.process import print_json, print_lines
from router.cli.options import asked, with_settings
from router.config import RouterSettings
from router.shadows.comparison import SeriesMean, ShadowReport, Tally

PLAYED = 4
CANDIDATES: dict[str, dict[str, Any]] = {
    **{f"ttft_weight={weight}": {"mode": "kv", "ttft_weight": weight} for weight in (1, 2, 8, 16)},
    **{f"lateness_s={seconds:g}": {"mode": "kv", "lateness_s": seconds} for seconds in (0.5, 8.0)},
    "kv": {"mode": "kv"},
    "predicted-ttft": {"mode": "predicted-ttft"},
    "least-loaded": {"mode": "least-loaded"},
}


class _Page(msgspec.Struct):
    """The part of `/v1/shadows` that is read."""

    shadows: list[ShadowReport]


@click.command()
@with_settings
@simulation_options
@click.option("--modes", help="further candidates: modes, between commas")
@click.option("--sweep", multiple=True, metavar="FIELD=A,B,...", help="further candidates: this field with each value")
@click.option("--only-named", is_flag=True, help="no candidates but those that are named here, and shadows")
@click.option(
    "--shadows", "url", default="", help="a router's control plane, http://host:port: its shadows are candidates"
)
@click.option("--played", type=click.IntRange(1, 32), default=PLAYED, show_default=True, help="candidates to play")
@click.option("--json", "as_json", is_flag=True, help="print all figures as one JSON object")
def tune(
    *,
    settings: RouterSettings,
    asked: Asked,
    modes: str | None,
    sweep: tuple[str, ...],
    only_named: bool,
    url: str,
    played: int,
    as_json: bool,
    **_: object,
) -> None:
    """Propose a policy from a journal: what it would gain, how sure that is, and the command that sets it.

    Other policies are asked at the recorded moments; the best of them are played through simulated engines that are as
    fast as the recorded fleet. Nothing is changed. The token of --shadows is KVROUTER_CONTROL__TOKEN.

    \b
    Example:  router tune --nats-url nats://127.0.0.1:4222 --shadows http://127.0.0.1:8001
    """  # noqa: D301
    shadows = _shadows_of(settings, url) if url else []
    candidates = {} if only_named else dict(CANDIDATES)
    candidates |= named_policies(modes, sweep) | {f"shadow {each.name}": each.policy for each in shadows}
    if not candidates:
        raise click.UsageError("--only-named: found no candidate, allowed --modes, --sweep or --shadows")
    journal = read(settings, asked, JournalOfOne(candidates, asked.requests, asks=True))
    kept = screened(journal.tallies, played)
    result = simulated(journal, asked, {name: journal.policies[name] for name in kept})
    found = proposal(result, candidates)
    if as_json:
        screening = {name: tally.report() for name, tally in journal.tallies.items()}
        page = {**as_object(result), "screening": screening, "shadows": shadows, "proposal": found}
        print_json(msgspec.json.encode(page))
        return
    shown = [*_shadow_lines(shadows), *_screening_lines(journal.tallies, kept), "", *lines(result)[:-1], ""]
    print_lines(machine_line(), *shown, *proposal_lines(result, found))


def screened(tallies: Mapping[str, Tally], count: int) -> list[str]:
    """Return the names of `count` policies, taken in turn from the order of TTFT gain and from that of live cost gain.

    A request's own TTFT alone would favour policies that let other requests wait. Policies without a prediction
    (if the recorded policy read no overlap) come last, in their order.
    """
    reports = {name: tally.report() for name, tally in tallies.items()}
    by_ttft = sorted(reports, key=lambda name: _rank(reports[name].ttft_gain_s))
    by_cost = sorted(reports, key=lambda name: _rank(reports[name].live_cost_gain_ms))
    in_turn = dict.fromkeys(name for pair in zip(by_ttft, by_cost, strict=True) for name in pair)
    return list(in_turn)[:count]


def _rank(gain: SeriesMean) -> tuple[bool, float]:
    """Return a sort key: the largest gain first, a gain of no requests last."""
    return not gain.count, -gain.mean


def proposal(result: Result, candidates: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the fields of the policy to set; None: the policy in force stays."""
    best = best_of(result)
    return None if best is None else dict(candidates[best.cell.name])


def proposal_lines(result: Result, fields: Mapping[str, Any] | None) -> list[str]:
    """Return the advice, and how to follow it."""
    if fields is None:
        return [advice(result), "Nothing to set."]
    policy = dict(fields)
    shadow = json.dumps({"policies": [{"name": "tuned", "policy": policy}]})
    return [
        advice(result),
        "To watch it first, without effect:",
        f"  curl -X PUT http://127.0.0.1:8001/v1/shadows -d {shlex.quote(shadow)}",
        "To set it in a running router (DELETE undoes it):",
        f"  curl -X PATCH http://127.0.0.1:8001/v1/policy -d {shlex.quote(json.dumps(policy))}",
        "To keep it, in the configuration:",
        *(f"  {line}" for line in yaml.safe_dump({"policy": policy}, sort_keys=False).splitlines()),
    ]


def _screening_lines(tallies: Mapping[str, Tally], kept: Sequence[str]) -> list[str]:
    rows = []
    for name, tally in tallies.items():
        report = tally.report()
        skipped = sum(report.skipped.values())
        rows.append(
            f"  {'played' if name in kept else '':6}  {name}: {report.differ_ratio:.0%} other ranks, predicted TTFT "
            f"{_gain(report.ttft_gain_s)}" + (f", {skipped} not asked" if skipped else "")
        )
    return ["screening: each asked at the recorded moments, in the state that the recorded decisions made", *rows]


def _shadow_lines(shadows: Sequence[ShadowReport]) -> list[str]:
    return [
        f"shadow {each.name}: {each.differ_ratio:.0%} of {each.decisions} live decisions for other ranks, "
        f"predicted TTFT {_gain(each.ttft_gain_s)}"
        for each in shadows
    ]


def _gain(mean: SeriesMean) -> str:
    """Return by how much the TTFT changes: a gain is a lower TTFT, so the sign is the opposite."""
    if not mean.count:
        return "not known"
    interval = mean.interval_95
    between = "" if interval is None else f" ({-1e3 * interval[1]:+.1f} to {-1e3 * interval[0]:+.1f})"
    return f"{-1e3 * mean.mean:+.1f} ms{between}"


def _shadows_of(settings: RouterSettings, url: str) -> list[ShadowReport]:
    """Return the shadows of a running router; raise `NothingRead` if it does not answer with them."""
    page = asked(settings, url, lambda plane: plane.page("/v1/shadows", _Page), flag="--shadows")
    return page.shadows
