"""The queue's limits, waiting requests, and reasons for refusal. The rules are in `admission.py`."""

from typing import Literal, NamedTuple

import msgspec

from kv_protocol.decided import RouteRequest
from router.queue.fair_share import FairShareLimits

QueuePolicy = Literal["fcfs", "wspt", "edf"]
RefusalReason = Literal["tenant_full", "queue_full", "timeout", "stopping"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = ("tenant_full", "queue_full", "timeout", "stopping")

Placing = tuple[object, ...]
"""A request's constraints and targets (`placing_of`). Requests that have the same find the same headroom."""
OTHERS = "others"
Order = tuple[int, float, int]
"""Order within a tenant, smallest first: strict priority (negated), the policy's key, the arrival."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The order of waiting requests, and bounds on their number and uncached tokens. 0 for a tenant: no bound."""

    policy: QueuePolicy = "fcfs"
    wait_s: float = 30.0
    ttft_default_s: float = 10.0
    """edf: the TTFT target of a request that states none; longer than that of interactive requests."""
    requests_max: int = 2048
    tokens_max: int = 16_000_000
    """The default is far more than a fleet computes within `wait_s`."""
    tenant_requests_max: int = 0
    tenants_max: int = 256
    """Tenants with a share of their own; all others share one, `OTHERS`."""
    fair_share: FairShareLimits = FairShareLimits()


class QueuedRequest(NamedTuple):
    """A request that asks for admission. `uncached_tokens`: its prompt without the longest prefix that a rank holds."""

    request: RouteRequest
    uncached_tokens: int

    @property
    def cost_tokens(self) -> int:
        """The request's cost for its tenant; at least 1."""
        return max(1, self.uncached_tokens)

    def order(self, policy: QueuePolicy, ttft_default_s: float, now_s: float, arrival: int) -> Order:
        """Return its key in the order of its tenant's requests; `arrival` is its number among all that ever waited."""
        request, priority = self.request, max(0, self.request.priority)
        match policy:
            case "fcfs":
                key = now_s - priority
            case "wspt":
                key = self.cost_tokens / (1 + priority)
            case "edf":
                key = now_s + (ttft_default_s if request.ttft_target_s is None else request.ttft_target_s)
        return (-request.strict_priority, key, arrival)


def placing_of(request: RouteRequest) -> Placing:
    """Return the properties of a request, except its length, that decide which ranks may take it, and how soon."""
    return (
        request.endpoint,
        request.lora,
        request.required_taints,
        request.pinned_worker,
        request.pinned_dp_rank,
        request.tried,
        request.ttft_target_s,
        request.itl_target_s,
    )


class Place(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request's place in the queue."""

    waiting: QueuedRequest
    tenant: str
    """The tenant under which it waits."""
    order: Order
    arrived_s: float
    placing: Placing
    """Its request's constraints and targets."""
    kind: Placing
    """The kind under which it waits: its placing; if its tenant has too many kinds, the one that further ones share."""

    @property
    def arrival(self) -> int:
        """Its number among all requests that ever waited."""
        return self.order[2]
