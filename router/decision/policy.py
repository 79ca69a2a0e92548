"""A routing policy as data: the mode, and its parameters. The journal records it as a whole.

Formulas: `tests/reference/time_cost.py`; modes: `policies.py`.
"""

from typing import Literal

import msgspec
from msgspec.structs import asdict, replace

from kv_protocol.decided import RequestPhase

Affinity = Literal["off", "soft", "hard"]
"""How a session's former rank counts: not at all, as a preference, or as the only choice while it is eligible."""
Unmet = Literal["admit", "queue", "reject"]
"""What happens to a request if no rank is predicted to meet its latency targets."""


class CostParameters(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The parameters of the cost: weights of its terms, and `lateness_s`."""

    overlap_credit: float = 1.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    ttft_weight: float = 4.0
    """Weight of the time to a request's own first token; all other time that requests lose has weight 1."""
    lateness_s: float = 2.0
    """A first token as late as this counts twice."""


class PhaseOverrides(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Fields of `Policy` and `CostParameters` that differ for one phase of a request; None: no difference."""

    mode: str | None = None
    temperature: float | None = None
    overlap_credit: float | None = None
    host_weight: float | None = None
    disk_weight: float | None = None


class Policy(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """How a router chooses: a mode and its parameters.

    `mode` is one of `policies.MODES`, or a user's, named `package.module:function` in the configuration.
    """

    mode: str = "kv"
    parameters: CostParameters = CostParameters()
    temperature: float = 0.0
    """0: the lowest cost wins; above 0: drawn by softmax(-cost / temperature), costs scaled to [0, 1]."""
    predict_on_route: bool = True
    """Whether blocks expected at a rank count as held by it."""
    newcomers: bool = True
    """Whether a joining rank gets only a bounded share of the requests of which no rank holds a block."""
    affinity: Affinity = "off"
    affinity_discount: float = 0.5
    """soft: share (0..1) by which the cost, or the predicted time, of the session's rank is lowered."""
    itl_target_s: float | None = None
    """predicted-ttft: largest acceptable predicted time between tokens, if the request states none."""
    ttft_target_s: float | None = None
    """predicted-ttft: largest acceptable predicted time to the first token, if the request states none."""
    unmet: Unmet = "admit"
    prefill: PhaseOverrides = PhaseOverrides()
    """What differs for workers of the role prefill."""
    decode: PhaseOverrides = PhaseOverrides()
    """What differs for workers of the role decode."""

    def of(self, phase: RequestPhase) -> "Policy":
        """Return the policy that chooses a worker for `phase`."""
        if phase not in ("prefill", "decode"):
            return self
        changed = {name: value for name, value in asdict(getattr(self, phase)).items() if value is not None}
        own = {name: changed.pop(name) for name in ("mode", "temperature") if name in changed}
        return replace(self, **own, parameters=replace(self.parameters, **changed))
