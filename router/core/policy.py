"""A routing policy as data: which mode chooses, and with what parameters. It is recorded whole.

Costs and weights are in blocks; formulas: `cost.py`, modes: `policies.py`.
"""

from typing import Literal

import msgspec

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
