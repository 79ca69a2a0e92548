"""The load that routed requests bring to the workers of each model and role, over the last seconds.

The core counts it (`router/native/offered.hpp`): every routed attempt, of this router and of its replicas. A retry is
work, too. A request that waits in the queue, or was refused, does not count.
"""

from typing import NamedTuple, cast

from kv_protocol.fleet import Role
from router.native import built
from router.planner.queueing import ServiceTimes

SLOT_S: float = built.SLOT_S


class Group(NamedTuple):
    """The workers of one model and role: what an autoscaler scales."""

    model: str
    role: Role


class OfferedLoad(NamedTuple):
    """What came in `covered_s` seconds. `context_tokens` is the mean of a request; `prompts` their work."""

    covered_s: float
    requests: int = 0
    uncached_tokens: int = 0
    context_tokens: float = 0.0
    prompts: ServiceTimes = ServiceTimes(())

    @property
    def requests_per_s(self) -> float:
        """Mean rate of routed attempts."""
        return self.requests / self.covered_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Mean rate of prompt tokens that workers have to compute."""
        return self.uncached_tokens / self.covered_s


def offered(core: built.Core, window_s: float, now_s: float, began_s: float) -> dict[Group, OfferedLoad]:
    """Return what came in the window to a core that began to count at `began_s`, by group."""
    covered_s = covered(window_s, now_s, began_s)
    return {
        Group(model, cast("Role", role)): OfferedLoad(
            covered_s, requests, uncached_tokens, context_tokens / requests, ServiceTimes(tuple(times))
        )
        for (model, role), requests, uncached_tokens, context_tokens, times in core.offered(_first(window_s, now_s))
    }


def covered(window_s: float, now_s: float, began_s: float) -> float:
    """Return of how many seconds of the window the load is known: at least one slot."""
    return max(SLOT_S, now_s - max(_first(window_s, now_s) * SLOT_S, began_s))


def _first(window_s: float, now_s: float) -> int:
    """Return the number of the window's first slot."""
    return int(now_s / SLOT_S) - max(1, round(window_s / SLOT_S)) + 1
