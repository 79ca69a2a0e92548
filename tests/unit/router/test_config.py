"""The settings of policy, queue, breakers and affinity are those that decisions are taken with."""

from typing import Any

import pytest
from pydantic import ValidationError

from router.config import FailuresSection
from router.decision.policy import CostParameters, PhaseOverrides, Policy
from router.decision.policy_config import PolicySection
from router.decision.state import AffinityLimits, ApproximateLimits
from router.fleet.breakers import BreakerLimits
from router.queue.config import QueueSection


def test_every_setting_comes_to_the_policy_or_to_the_approximate_index() -> None:
    given = PolicySection(
        mode="round-robin",
        overlap_credit=0.5,
        host_weight=0.2,
        temperature=0.25,
        predict_on_route=False,
        approximate_ttl_s=30.0,
    )
    costs = CostParameters(overlap_credit=0.5, host_weight=0.2)
    assert given.policy() == Policy(mode="round-robin", parameters=costs, temperature=0.25, predict_on_route=False)
    assert given.approximate() == ApproximateLimits(ttl_s=30.0)


def test_what_is_not_named_of_a_phase_is_as_by_default() -> None:
    given = PolicySection(prefill={"mode": "random"}, decode={"overlap_credit": None, "temperature": 1})
    assert given.policy().prefill == PhaseOverrides(mode="random")
    assert given.policy().decode == PhaseOverrides(temperature=1.0)


def test_a_phase_has_the_ranges_of_the_policy() -> None:
    cases: dict[str, dict[str, Any]] = {
        "temperature: found -1, allowed 0 or more": {"temperature": -1},
        'mode: found "best", .*allowed kv, ': {"mode": "best"},
        "found lateness_s, allowed mode, temperature, ": {"lateness_s": 1},
    }
    for words, phase in cases.items():
        with pytest.raises(ValidationError, match=words):
            PolicySection(decode=phase)


def test_the_defaults_are_the_cores_and_no_request_waits() -> None:
    assert PolicySection().policy() == Policy()
    assert PolicySection().approximate() == ApproximateLimits()
    assert FailuresSection().breakers() == BreakerLimits()
    assert PolicySection().affinity_limits() == AffinityLimits()
    assert QueueSection().threshold is None


def test_every_setting_of_breakers_and_sessions_comes_to_them() -> None:
    failures = FailuresSection(breaker_failures=1, breaker_open_s=3.0)
    assert failures.breakers() == BreakerLimits(failures=1, open_s=3.0)
    assert PolicySection(affinity_idle_s=6.0).affinity_limits() == AffinityLimits(idle_s=6.0)


def test_a_breaker_opens_for_its_first_time_at_the_least() -> None:
    assert FailuresSection(breaker_open_s=500.0).breakers().open_s_max == 500.0


def test_tenants_are_not_told_by_secrets_nor_weighed_by_what_is_no_weight() -> None:
    for header in ("authorization", "x-api-key", "cookie", "proxy-authorization"):
        with pytest.raises(ValidationError, match=f"found {header}, its values are secrets"):
            QueueSection(fair_share_by=header)
    for weight in (0.0, -1.0, 1001.0):
        with pytest.raises(ValidationError, match=r"fair_share_weights\.team-a"):
            QueueSection(fair_share_weights={"team-a": weight})
