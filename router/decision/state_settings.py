"""The settings of a router's state: with them and its journal the state can be computed again."""

from collections.abc import Mapping

import msgspec

from router.decision.affinity import Affinity, AffinityLimits
from router.decision.approximate import ApproximateIndex, ApproximateLimits
from router.decision.policies import MODES, Mode
from router.decision.state import RouterState
from router.fleet.breakers import BreakerLimits, Breakers
from router.fleet.ledger import LEASE_S, Ledger
from router.fleet.registry import Fleet, TextDigests


class StateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the folds. The policy is none of them: it is applied as a record."""

    text: TextDigests
    lease_s: float = LEASE_S
    approximate: ApproximateLimits = ApproximateLimits()
    affinity: AffinityLimits = AffinityLimits()
    breakers: BreakerLimits = BreakerLimits()

    def state(self, modes: Mapping[str, Mode] = MODES) -> RouterState:
        """Return the initial state of a router."""
        return RouterState(
            Fleet(self.text),
            Ledger(self.lease_s),
            ApproximateIndex(self.approximate),
            affinity=Affinity(self.affinity),
            breakers=Breakers(self.breakers),
            modes=modes,
        )
