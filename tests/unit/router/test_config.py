"""The settings of a policy are those that decisions are taken with."""

import pytest
from pydantic import ValidationError

from router.decision.policy import CostParameters, PhaseOverrides, Policy
from router.decision.policy_config import PolicySection
from router.decision.state_settings import ApproximateLimits


def test_the_defaults_are_the_cores() -> None:
    assert PolicySection().policy() == Policy()
    assert PolicySection().approximate() == ApproximateLimits()


def test_every_setting_comes_to_the_policy_or_to_the_approximate_index() -> None:
    given = PolicySection(
        mode="round-robin",
        overlap_credit=0.5,
        history_weight=2.0,
        temperature=0.25,
        predict_on_route=False,
        approximate_ttl_s=30.0,
    )
    costs = CostParameters(overlap_credit=0.5, history_weight=2.0)
    assert given.policy() == Policy(mode="round-robin", parameters=costs, temperature=0.25, predict_on_route=False)
    assert given.approximate() == ApproximateLimits(ttl_s=30.0)


def test_what_is_not_named_of_a_phase_is_as_by_default() -> None:
    given = PolicySection(prefill={"mode": "random"}, decode={"overlap_credit": None, "temperature": 1})
    assert given.policy().prefill == PhaseOverrides(mode="random", decode_scale=0.0)
    assert given.policy().decode == PhaseOverrides(temperature=1.0)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ({"temperature": -1}, "temperature: found -1, allowed 0 or more"),
        ({"mode": "best"}, 'mode: found "best", .*allowed kv, '),
        ({"spill_tokens": 1}, "found spill_tokens, allowed mode, temperature, "),
    ],
)
def test_a_phase_has_the_ranges_of_the_policy(phase: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PolicySection(decode=phase)
