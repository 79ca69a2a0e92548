"""The section `shadow`, which is also the body of `PUT /v1/shadows`."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import Section
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.policy_swap import swapped
from router.shadows.tally import SHADOW_NAME

SHADOWS_MAX = 8
BUDGET_US = 50.0


class ShadowPolicySection(Section):
    """One shadow: its name, and the fields in which its policy differs from the policy in force."""

    name: str = Field(pattern=SHADOW_NAME, description="its name in metrics; each name once")
    policy: dict[str, Any] = Field(
        min_length=1, description="fields of the section policy that differ from the policy in force"
    )


class ShadowSection(Section):
    """Policies that decide beside the one in force, without effect ([WHAT_IF](../WHAT_IF.md))."""

    policies: tuple[ShadowPolicySection, ...] = Field(
        (),
        max_length=SHADOWS_MAX,
        description="shadows, in this order; more take more of budget_us",
    )
    budget_us: float = Field(
        BUDGET_US,
        gt=0,
        le=10_000,
        description="CPU time that all shadows may take, in microseconds a request on average; beyond it decisions are"
        " skipped, and counted",
    )

    @field_validator("policies")
    @classmethod
    def _have_names_of_their_own(cls, policies: tuple[ShadowPolicySection, ...]) -> tuple[ShadowPolicySection, ...]:
        names = [each.name for each in policies]
        if len(set(names)) < len(names):
            raise ValueError(f"found names {', '.join(names)}, allowed each name once")
        return policies

    def replaced(self, given: Mapping[str, Any]) -> "ShadowSection":
        """Return the section with these fields; a budget that is not given stays. Raises pydantic's ValidationError."""
        return ShadowSection(**{"budget_us": self.budget_us, **given})

    def resolved(self, live: Policy, modes: Mapping[str, Mode]) -> dict[str, Policy]:
        """Return the policies by name: the live one with each shadow's fields.

        Raises:
            ConfigurationError: a field is none of a policy, or has a value that is not allowed.
        """
        found, problems = dict[str, Policy](), list[str]()
        for each in self.policies:
            try:
                found[each.name] = swapped(live, each.policy, modes, replace_all=False)
            except ConfigurationError as error:
                problems += [f"shadow.policies: {each.name}: {problem}" for problem in error.problems]
        if problems:
            raise ConfigurationError(problems)
        return found
