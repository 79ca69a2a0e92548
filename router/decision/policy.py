"""A routing policy as data: which mode chooses, and with what parameters. It is recorded whole.

Costs and weights are in blocks; formulas: `cost.py`, modes: `policies.py`.
"""

from functools import lru_cache
from typing import Literal

import msgspec
from msgspec.structs import asdict, replace

from kv_protocol.decided import RequestPhase

Affinity = Literal["off", "soft", "hard"]
"""What a session's former rank means: nothing, a preference, or the only choice while it may take the request."""
Unmet = Literal["admit", "queue", "reject"]
"""What becomes of a request whose latency targets no rank is predicted to meet."""


class CostParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the terms."""

    overlap_credit: float = 1.0
    overlap_credit_decay: float = 0.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    prefill_scale: float = 1.0
    request_weight: float = 0.0
    history_weight: float = 0.5
    decode_scale: float = 1.0


class PhaseOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """What is otherwise for one phase of a request than for whole ones; None: nothing. Fields of both classes here."""

    mode: str | None = None
    temperature: float | None = None
    overlap_credit: float | None = None
    overlap_credit_decay: float | None = None
    host_weight: float | None = None
    disk_weight: float | None = None
    prefill_scale: float | None = None
    request_weight: float | None = None
    history_weight: float | None = None
    decode_scale: float | None = None


PREFILL_OVERRIDES = PhaseOverrides(decode_scale=0.0)
"""Nothing is decoded there."""
DECODE_OVERRIDES = PhaseOverrides(overlap_credit=0.0)
"""The prompt's KV comes from elsewhere, whatever is held there."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How a router chooses: a mode and its parameters.

    `mode` is one of `policies.MODES`, or a user's, named `package.module:function` in the configuration.
    """

    mode: str = "kv"
    parameters: CostParameters = CostParameters()
    temperature: float = 0.0
    """0: the lowest cost wins; more: drawn by softmax(-cost / temperature), costs scaled to [0, 1]."""
    predict_on_route: bool = True
    """Whether blocks on their way to a rank count as held by it."""
    spill_tokens: int = 16384
    """A rank with more queued uncached tokens than this and than 4 x ISL may lose its credit; 0: none ever does."""
    newcomers: bool = True
    """Whether a joining rank's share of full misses is bounded."""
    affinity: Affinity = "off"
    affinity_discount: float = 0.5
    """soft: by what share (0..1) the cost, or the predicted time, of the session's rank is lowered."""
    itl_target_s: float | None = None
    """predicted-ttft: the longest predicted time between tokens that is good enough, where the request names none."""
    ttft_target_s: float | None = None
    """predicted-ttft: the longest predicted time to the first token, where the request names none."""
    unmet: Unmet = "admit"
    prefill: PhaseOverrides = PREFILL_OVERRIDES
    """Of workers that only prefill."""
    decode: PhaseOverrides = DECODE_OVERRIDES
    """Of workers that decode what others prefilled."""

    def of(self, phase: RequestPhase) -> "Policy":
        """Return the policy by which a worker is chosen for `phase`."""
        return _of(self, phase) if phase in ("prefill", "decode") else self


@lru_cache(maxsize=64)
def _of(policy: Policy, phase: Literal["prefill", "decode"]) -> Policy:
    overrides: PhaseOverrides = getattr(policy, phase)
    changed = {name: value for name, value in asdict(overrides).items() if value is not None}
    own = {name: changed.pop(name) for name in ("mode", "temperature") if name in changed}
    return replace(policy, **own, parameters=replace(policy.parameters, **changed))
