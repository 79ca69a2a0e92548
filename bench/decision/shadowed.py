"""`router bench shadows`: what shadow policies cost a request, on its path and beside it, within their budget.

offer       on the path: the decision is put into the shadows' queue
evaluate    beside it: one shadow decides and is compared, for a shadow of each kind
budget      what all shadows together take, a request, where the budget would not be enough for each decision
"""

import json
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple

import click

from bench.decision.fleet import DecisionFleet, DecisionShape
from bench.report import machine_line, percentile
from router.decision.verdict import Verdict
from router.shadows.config import BUDGET_US, ShadowSection
from router.shadows.service import Shadows

SHADOWS: dict[str, dict[str, Any]] = {
    "kv": {"ttft_weight": 8},
    "kv-blocks": {"mode": "kv-blocks"},
    "least-loaded": {"mode": "least-loaded"},
    "round-robin": {"mode": "round-robin"},
}
_BATCH = 50
"""Decisions between two evaluations: 10 ms at 5,000 requests a second."""
_UNBOUNDED_US = 10_000.0


class ShadowCost(NamedTuple):
    """Microseconds. `evaluate`: the median by shadow; `spent`: the mean a request under `BUDGET_US`, all shadows."""

    ranks: int
    offer_us: float
    evaluate_us: dict[str, float]
    spent_us: float
    evaluated_ratio: float


def shadow_cost(shape: DecisionShape, decisions: int, seed: int = 1) -> ShadowCost:
    """Take `decisions` decisions in a fleet of this shape, and have shadows decide beside them."""
    fleet = DecisionFleet(shape, seed)
    verdicts = [fleet.routing.decide(request) for request in fleet.requests(decisions)]
    offer_us, evaluate_us = 0.0, dict[str, float]()
    for name, policy in SHADOWS.items():
        offered, evaluated = _times(_shadows(fleet, {name: policy}, _UNBOUNDED_US), verdicts)
        offer_us, evaluate_us[name] = percentile(offered, 0.5), percentile(evaluated, 0.5)
    bounded = _shadows(fleet, SHADOWS, BUDGET_US)
    for at in range(0, decisions, _BATCH):
        for each in verdicts[at : at + _BATCH]:
            bounded.record(each)
        _settle(bounded)
    page = bounded.page()
    evaluated_ratio = page["shadows"][0]["decisions"] / page["requests"]
    return ShadowCost(shape.ranks, offer_us, evaluate_us, page["spent_us"], evaluated_ratio)


def _shadows(fleet: DecisionFleet, policies: Mapping[str, dict[str, Any]], budget_us: float) -> Shadows:
    given = [{"name": name, "policy": policy} for name, policy in policies.items()]
    section = ShadowSection.model_validate({"policies": given, "budget_us": budget_us})
    return Shadows(fleet.state, fleet.clock, section, fleet.routing.policy)


def _times(shadows: Shadows, verdicts: list[Verdict]) -> tuple[list[float], list[float]]:
    """Return how long it took to offer each decision, and to evaluate it, in us."""
    offered, evaluated = list[float](), list[float]()
    for each in verdicts:
        began_ns = perf_counter_ns()
        shadows.record(each)
        offered_ns = perf_counter_ns()
        _settle(shadows)
        evaluated.append((perf_counter_ns() - offered_ns) / 1e3)
        offered.append((offered_ns - began_ns) / 1e3)
    return offered, evaluated


def _settle(shadows: Shadows) -> None:
    while shadows.evaluate_slice():
        pass


@click.command()
@click.option("--decisions", type=click.IntRange(_BATCH), default=5000, show_default=True)
@click.option("--blocks", type=click.IntRange(2), default=128, show_default=True, help="full blocks of a prompt")
@click.option("--json", "as_json", is_flag=True, help="print the figures as one JSON object")
def shadows(*, decisions: int, blocks: int, as_json: bool) -> None:
    """Measure what shadow policies cost a request: with 8 and with 64 ranks, live mode kv."""
    cells = [shadow_cost(DecisionShape(ranks, blocks), decisions) for ranks in (8, 64)]
    if as_json:
        found = {"machine": machine_line(), "cells": [each._asdict() for each in cells]}
        click.echo(json.dumps(found))
        return
    click.echo(f"{machine_line()}; {blocks} blocks, {decisions} decisions a cell; us")
    for each in cells:
        by_shadow = "  ".join(f"{name} {us:.1f}" for name, us in each.evaluate_us.items())
        click.echo(f"{each.ranks} ranks: offer {each.offer_us:.2f}  evaluate {by_shadow}")
        click.echo(
            f"    all {len(SHADOWS)} under a budget of {BUDGET_US:.0f} us: {each.spent_us:.1f} a request,"
            f" {each.evaluated_ratio:.0%} of decisions evaluated"
        )
