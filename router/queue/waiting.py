"""The queue of requests before the fleet: limits, refusals, order. Pure. `gate.py` decides when requests wait.

    a request      is admitted at once if there is headroom and no other of its kind waits; else it waits or is refused
    headroom       as `gate.py` finds it: with a threshold, some eligible rank must have no more uncached tokens queued
                   than threshold x max_num_batched_tokens of its worker (`eligibility.is_below`)
    order          by fair share of uncached tokens between tenants; within a tenant: strict priority, the higher
                   first; the policy's key, the smaller first; the order of arrival

                       fcfs   arrival_s - max(0, priority)                 a priority is worth as many seconds
                       wspt   uncached tokens / (1 + max(0, priority))     short work first
                       edf    arrival_s + the TTFT target, or a default    the most urgent first

    kinds          requests with the same constraints and targets (`placing_of`) have the same headroom: it is checked
                   once a `take` for each kind. A kind without headroom is skipped, and so is a tenant that has only
                   such kinds waiting

    refused        because                                                       status
    ------------   -----------------------------------------------------------   ------
    tenant_full    its tenant has as many requests waiting as are allowed        429
    queue_full     in all, as many requests or tokens wait as are allowed        503
    timeout        it waited for `wait_s`                                        503
    stopping       the router ends                                               503

A request larger than the bound on tokens waits if nothing else does. Each model has its own queue, so that a saturated
one does not block others; the bounds apply to all together. `retry_after_s` is the time that the waiting requests
will take, at the recent rate in tokens per second.

Strict priority is strict within a tenant only. The order between tenants is self-clocked fair queuing, so none starves.
Each model has a virtual time in tokens, 0 at first:

    start          of a tenant: the virtual time at which it came, or at which its last request went
    finish         of a tenant: its start + the cost of its first request that may go now / its weight
    next           the tenant with the least finish, which becomes the virtual time
    idle           a tenant without waiting requests is forgotten: it gains nothing while it sends none
    skipped        a tenant is passed over while none of its waiting requests may go

So while two tenants always have a request that may go, what each was served, divided by its weight, differs by no more
than the sum of their largest requests, each divided by its tenant's weight. While a request of cost c is the first of
tenant A, tenant B is served no more than c x B's weight / A's weight, plus one request, whatever others send.
Source: S. J. Golestani, "A self-clocked fair queueing scheme for broadband applications", INFOCOM 1994.
"""

import math
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Literal

import msgspec
from sortedcontainers import SortedDict

from kv_protocol.decided import RouteRequest
from router.http.refusals import Refusal
from router.queue.config import QueueSection

RefusalReason = Literal["tenant_full", "queue_full", "timeout", "stopping"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = ("tenant_full", "queue_full", "timeout", "stopping")
Resume = Callable[[Refusal | None], None]
"""A callback that is called once, with None to admit the request, or with its refusal."""
Placing = tuple[object, ...]
"""A request's constraints and targets (`placing_of`). Requests that have the same find the same headroom."""
OTHERS = "others"
Order = tuple[int, float, int]
"""Order within a tenant, smallest first: strict priority (negated), the policy's key, the arrival."""
KINDS_MAX = 32
"""Kinds that are kept apart for a tenant; requests of further kinds share one."""
_OTHER_KINDS: Placing = ("others",)
_RATE_RETRY_S_MAX = 60.0
RATE_HALF_LIFE_S = 10.0


def order_of(request: RouteRequest, cost_tokens: int, limits: QueueSection, now_s: float, arrival: int) -> Order:
    """Return the key that orders a request among its tenant's; `arrival` is its number among all that ever waited."""
    priority = max(0, request.priority)
    match limits.policy:
        case "fcfs":
            key = now_s - priority
        case "wspt":
            key = cost_tokens / (1 + priority)
        case "edf":
            key = now_s + (limits.ttft_default_s if request.ttft_target_s is None else request.ttft_target_s)
    return (-request.strict_priority, key, arrival)


placing_of: Callable[[RouteRequest], Placing] = attrgetter(
    "endpoint", "lora", "required_taints", "pinned_worker", "pinned_dp_rank", "tried", "ttft_target_s", "itl_target_s"
)
"""Returns the properties of a request, except its length, that decide which ranks may take it, and how soon."""


class Place(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request's place in the queue."""

    request: RouteRequest
    resume: Resume
    cost_tokens: int
    """What it costs its tenant: the prompt without the longest prefix that a rank holds, at least 1."""
    tenant: str
    """The tenant under which it waits."""
    order: Order
    arrived_s: float
    placing: Placing
    """Its request's constraints and targets."""

    @property
    def arrival(self) -> int:
        """Its number among all requests that ever waited."""
        return self.order[2]


class _Tenant:
    """The waiting requests of one tenant for one model: by kind, each kind in its order."""

    def __init__(self, weight: float, start: float) -> None:
        self.weight, self.start = weight, start
        self.kinds: dict[Placing, SortedDict[Order, Place]] = {}

    def add(self, place: Place) -> None:
        """Add a request to its kind; beyond `KINDS_MAX` all further kinds share one."""
        kind = place.placing
        if kind not in self.kinds and len(self.kinds) >= KINDS_MAX - 1:
            kind = _OTHER_KINDS
        self.kinds.setdefault(kind, SortedDict())[place.order] = place

    def remove(self, place: Place) -> None:
        """Remove a request."""
        kind = place.placing if place.order in self.kinds.get(place.placing, ()) else _OTHER_KINDS
        del self.kinds[kind][place.order]
        if not self.kinds[kind]:
            del self.kinds[kind]

    def first(self, has_headroom: Callable[[Place], bool]) -> Place | None:
        """Return the first request that has headroom, among the first of each kind."""
        found: Place | None = None
        for kind in self.kinds.values():
            order, place = kind.peekitem(0)
            if (found is None or order < found.order) and has_headroom(place):
                found = place
        return found


class ModelQueue:
    """The waiting requests of one model, by tenant."""

    def __init__(self, limits: QueueSection) -> None:
        self._weights = limits.fair_share_weights
        self._time = 0.0
        self.tenants: dict[str, _Tenant] = {}

    def add(self, place: Place) -> None:
        """Add a waiting request."""
        tenant = self.tenants.get(place.tenant)
        if tenant is None:
            weight = self._weights.get(place.tenant, 1.0)
            tenant = self.tenants[place.tenant] = _Tenant(weight, self._time)
        tenant.add(place)

    def remove(self, place: Place) -> None:
        """Remove a request."""
        tenant = self.tenants[place.tenant]
        tenant.remove(place)
        if not tenant.kinds:
            del self.tenants[place.tenant]

    def next(self, has_headroom: Callable[[Place], bool]) -> Place | None:
        """Charge the tenant that is next, and return its first request with headroom; None if there is none."""
        least, found = math.inf, None
        for tenant in self.tenants.values():
            if (place := tenant.first(has_headroom)) is not None:
                finish = tenant.start + place.cost_tokens / tenant.weight
                if finish < least:
                    least, found = finish, place
        if found is not None:
            self._time = self.tenants[found.tenant].start = max(self._time, least)
        return found


class _Rate:
    """Recent rate of admitted tokens per second."""

    def __init__(self) -> None:
        self._sum, self._at_s = 0.0, 0.0

    def add(self, tokens: int, now_s: float) -> None:
        self._sum = self._left(now_s) + tokens
        self._at_s = now_s

    def _left(self, now_s: float) -> float:
        return float(self._sum * 2.0 ** ((self._at_s - now_s) / RATE_HALF_LIFE_S))

    def seconds_for(self, tokens: float, now_s: float, most_s: float) -> float:
        """Return how long `tokens` will take, 1..`most_s`; `most_s` without recent admissions."""
        rate = self._left(now_s) * math.log(2) / RATE_HALF_LIFE_S
        return max(1.0, min(most_s, tokens / rate if rate > 0 else most_s))


class RequestQueue:
    """All waiting requests. `now_s` never decreases."""

    def __init__(self, limits: QueueSection) -> None:
        self._limits = limits
        self._models: dict[str, ModelQueue] = {}
        self.waiting: dict[int, Place] = {}
        """The waiting requests by arrival, in the order of arrival, in which they time out."""
        self._arrivals = 0
        self._requests_of, self._tokens_of = Counter[str](), Counter[str]()
        """Waiting requests, and their tokens, by tenant."""
        self._kinds = Counter[tuple[str, Placing]]()
        self._rate = _Rate()

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def tokens(self) -> int:
        """Uncached tokens of the requests that wait."""
        return self._tokens_of.total()

    def models(self) -> tuple[str, ...]:
        """Return the models with waiting requests."""
        return tuple(self._models)

    def is_waited_for(self, request: RouteRequest) -> bool:
        """Return whether a request of the same kind waits."""
        return bool(self.waiting) and (request.model, placing_of(request)) in self._kinds

    # ---------------------------------------------------------------- in

    def offer(self, request: RouteRequest, uncached_tokens: int, now_s: float, resume: Resume) -> Place | Refusal:
        """Queue the request; return its place, or why it is refused.

        `tick` and `stop` call `resume` with a refusal. For a place that `take` returns, the caller calls it.
        `uncached_tokens`: its prompt without the longest prefix that a rank holds.
        """
        limits, tenant, cost_tokens = self._limits, request.tenant, max(1, uncached_tokens)
        if tenant not in self._requests_of and len(self._requests_of) >= limits.tenants_max:
            tenant = OTHERS
        if 0 < limits.tenant_requests_max <= self._requests_of[tenant]:
            return self._refusal("tenant_full", tenant, cost_tokens, now_s)
        count = len(self.waiting)
        if count >= limits.requests_max or (count and self.tokens + cost_tokens > limits.tokens_max):
            return self._refusal("queue_full", tenant, cost_tokens, now_s)
        self._arrivals += 1
        placing = placing_of(request)
        place = Place(
            request=request,
            resume=resume,
            cost_tokens=cost_tokens,
            tenant=tenant,
            order=order_of(request, cost_tokens, limits, now_s, self._arrivals),
            arrived_s=now_s,
            placing=placing,
        )
        self._models.setdefault(request.model, ModelQueue(limits)).add(place)
        self._kinds[request.model, placing] += 1
        self.waiting[place.arrival] = place
        self._requests_of[tenant] += 1
        self._tokens_of[tenant] += cost_tokens
        return place

    # ---------------------------------------------------------------- out

    def take(self, model: str, has_headroom: Callable[[RouteRequest], bool], now_s: float) -> Place | None:
        """Remove and return the next request with headroom; None if there is none.

        `has_headroom` is called at most once for each kind, with the first request of some tenant.
        """
        headroom: dict[Placing, bool] = {}

        def fits(place: Place) -> bool:
            known = headroom.get(place.placing)
            if known is None:
                known = headroom[place.placing] = has_headroom(place.request)
            return known

        queue = self._models.get(model)
        place = None if queue is None else queue.next(fits)
        if place is not None:
            self._remove(place)
            self._rate.add(place.cost_tokens, now_s)
        return place

    def cancel(self, place: Place) -> bool:
        """Remove the request; return whether it still waited."""
        if place.arrival not in self.waiting:
            return False
        self._remove(place)
        return True

    def tick(self, now_s: float) -> None:
        """Refuse, one by one, the requests that have waited for `wait_s`."""
        while self.waiting and now_s - next(iter(self.waiting.values())).arrived_s >= self._limits.wait_s:
            self._refuse_first("timeout", now_s)

    def stop(self, now_s: float) -> None:
        """Refuse all requests, one by one."""
        while self.waiting:
            self._refuse_first("stopping", now_s)

    def _refuse_first(self, reason: RefusalReason, now_s: float) -> None:
        place = next(iter(self.waiting.values()))
        refusal = self._refusal(reason, place.tenant, place.cost_tokens, now_s)
        self._remove(place)
        place.resume(refusal)

    def _remove(self, place: Place) -> None:
        del self.waiting[place.arrival]
        model = place.request.model
        self._models[model].remove(place)
        self._kinds[model, place.placing] -= 1
        if not self._kinds[model, place.placing]:
            del self._kinds[model, place.placing]
        if not self._models[model].tenants:
            del self._models[model]
        self._requests_of[place.tenant] -= 1
        self._tokens_of[place.tenant] -= place.cost_tokens
        if not self._requests_of[place.tenant]:
            del self._requests_of[place.tenant], self._tokens_of[place.tenant]

    # ---------------------------------------------------------------- refusals

    def _refusal(self, reason: RefusalReason, tenant: str, tokens: int, now_s: float) -> Refusal:
        """Return the refusal of a tenant's request of `tokens`."""
        limits, count, waiting_tokens = self._limits, len(self.waiting), self.tokens
        if reason == "tenant_full":
            count, waiting_tokens = self._requests_of[tenant], self._tokens_of[tenant]
        found = f"{count} requests with {waiting_tokens} tokens wait, and {tokens} tokens came"
        again_s = self._rate.seconds_for(waiting_tokens, now_s, min(_RATE_RETRY_S_MAX, limits.wait_s))
        match reason:
            case "tenant_full":
                allowed = f"{limits.tenant_requests_max} requests of one tenant"
                message = f"queue.tenant_requests_max: {found}; allowed {allowed}"
                return Refusal(429, message, code=reason, retry_after_s=again_s)
            case "queue_full":
                bounds = f"{limits.requests_max} requests, {limits.tokens_max} tokens"
                message = f"queue.requests_max: {found}; allowed {bounds}"
            case "timeout":
                message = f"queue.wait_s: no worker had room for the request within {limits.wait_s:g} s"
            case "stopping":
                message = "the router stops; the request had not begun"
        return Refusal(503, message, code=reason, retry_after_s=again_s, outcome="failed")
