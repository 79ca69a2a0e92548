"""The settings of a router's state: with them and its journal the state can be computed again."""

from typing import NamedTuple

import msgspec

from router.fleet.breakers import BreakerLimits
from router.fleet.registry import TextDigests

LEASE_S = 300.0
"""How long a lease lives that nothing renews."""


class ApproximateLimits(NamedTuple):
    """How long a routed block counts (seconds), and how many blocks of one rank count at most."""

    ttl_s: float = 120.0
    blocks_max: int = 1 << 18


class AffinityLimits(NamedTuple):
    """How long an idle session stays bound (seconds), and how many sessions are kept."""

    idle_s: float = 600.0
    sessions_max: int = 65_536


class StateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the state. The policy is not among them: it is applied as a record."""

    text: TextDigests
    lease_s: float = LEASE_S
    approximate: ApproximateLimits = ApproximateLimits()
    affinity: AffinityLimits = AffinityLimits()
    breakers: BreakerLimits = BreakerLimits()
