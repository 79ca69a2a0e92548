"""What other policies would have chosen: the figures of a journal, and what they advise."""

import asyncio
from typing import Any

import pytest

from kv_protocol.journal import JournalRecord, PolicyChanged
from router.decision.policy import CostParameters, Policy
from router.journal.what_if import VariantFigures, WhatIf, advice, what_if_lines
from tests.support.replayed import replay
from tests.unit.properties.router_life import POLICIES, journal

BLIND = Policy(parameters=CostParameters(overlap_credit=0.0))


def lived(policy: str) -> list[JournalRecord]:
    """Return a life under this policy alone: to the second policy of its journal."""
    records = asyncio.run(journal(2, POLICIES[policy]))[1]
    return records[: [at for at, record in enumerate(records) if isinstance(record, PolicyChanged)][1]]


def found(records: list[JournalRecord], **policies: Policy) -> WhatIf:
    what_if = WhatIf(list(policies))
    for each in replay(records, policies=list(policies.values())):
        if each.recorded is not None and each.is_exact:
            what_if.add(each)
    return what_if


def figures(**changed: object) -> VariantFigures:
    fields: dict[str, Any] = {
        "name": "p",
        "differ": 0.1,
        "hit_rate": 0.5,
        "gain": None,
        "imbalance": 1.2,
        "cost": 9.0,
    }
    return VariantFigures(**fields | changed)


def test_a_policy_that_ignores_overlap_hits_less_with_an_interval_around_the_difference() -> None:
    what_if = found(asyncio.run(journal(5, POLICIES["kv"]))[1], blind=BLIND)
    recorded, blind = what_if.figures()
    assert (recorded.differ, recorded.gain) == (0.0, None)
    assert blind.differ > 0
    assert blind.hit_rate is not None
    assert recorded.hit_rate is not None
    assert blind.hit_rate < recorded.hit_rate
    assert blind.gain is not None
    difference, low, high = blind.gain
    assert difference == pytest.approx(blind.hit_rate - recorded.hit_rate)
    assert low <= difference <= high


def test_where_a_policy_has_no_choice_none_is_compared() -> None:
    what_if = found(lived("random"), blind=BLIND, random=Policy(mode="random"))
    assert what_if.compared < what_if.left_out
    assert f"note: {what_if.left_out} decisions are not compared: a policy had no choice there" in what_if_lines(
        what_if.figures(), what_if
    )


def test_costs_are_those_of_policies_that_weigh_them() -> None:
    what_if = found(lived("kv"), turns=Policy(mode="round-robin"))
    assert [each.cost is None for each in what_if.figures()] == [False, True]


def test_a_journal_without_decisions_has_figures_too() -> None:
    what_if = WhatIf(["p"])
    lines = what_if_lines(what_if.figures(), what_if)
    assert lines[-1].startswith("Advice: keep the recorded policy")
    assert "0 decisions compared" in lines[3]


def test_the_advice_is_the_policy_with_the_largest_gain_whose_interval_is_above_0() -> None:
    recorded = figures(name="recorded", imbalance=1.5)
    unsure = figures(name="unsure", gain=(0.2, -0.01, 0.4))
    small, large = figures(name="small", gain=(0.02, 0.01, 0.03)), figures(name="large", gain=(0.05, 0.01, 0.09))
    assert advice([recorded, unsure, small, large]) == (
        "Advice: try large, it has +5.0 points of predicted hit rate (+1.0 to +9.0), imbalance 1.20, recorded 1.50; "
        "the engines' latency is not in these figures."
    )
    assert advice([recorded, unsure]).startswith("Advice: keep the recorded policy")
