"""The settings of a policy are those that decisions are taken with."""

from router.decision.policy import CostParameters, Policy
from router.decision.policy_config import PolicySection
from router.decision.state_settings import ApproximateLimits


def test_the_defaults_are_the_cores() -> None:
    assert PolicySection().policy() == Policy.current()
    assert PolicySection().approximate() == ApproximateLimits()


def test_every_setting_comes_to_the_policy_or_to_the_approximate_index() -> None:
    given = PolicySection(
        mode="round-robin",
        overlap_credit=0.5,
        history_weight=2.0,
        temperature=0.25,
        predict_on_route=False,
        approximate_ttl_s=30.0,
        approximate_blocks_max=9,
    )
    costs = CostParameters(overlap_credit=0.5, history_weight=2.0)
    assert given.policy() == Policy.current(
        mode="round-robin", parameters=costs, temperature=0.25, predict_on_route=False
    )
    assert given.approximate() == ApproximateLimits(ttl_s=30.0, blocks_max=9)
