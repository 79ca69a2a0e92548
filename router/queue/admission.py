"""The queue before the fleet, pure. It is off until a threshold is set.

    asked          no request of its kind waits and there is headroom: admitted at once. Else it waits, or is refused
    headroom       some eligible rank has no more uncached tokens queued than threshold x max_num_batched_tokens of its
                   worker (`headroom.py`)
    order          by fair share of uncached tokens between tenants (`waiting.py`); within a tenant: strict
                   priority, the higher first; the policy's key, the smaller first; the order of arrival

                       fcfs   arrival_s - max(0, priority)                 a priority is worth as many seconds
                       wspt   uncached tokens / (1 + max(0, priority))     short work first
                       edf    arrival_s + the TTFT target, or a default    the most urgent first

    kinds          requests with the same constraints and targets (`placing_of`) have the same headroom: it is checked
                   once a turn for each kind. A kind without headroom is skipped, and so is a tenant that has only such
                   kinds waiting

    refused        because                                                       status
    ------------   -----------------------------------------------------------   ------
    tenant_full    its tenant has the allowed requests or tokens waiting         429
    queue_full     all tenants together have                                     503
    timeout        it waited for `wait_s`                                        503
    stopping       the router ends                                               503

A request may be larger than a bound on tokens: it waits if nothing else does. Each model has its own queue, so that a
saturated one does not block others; the bounds apply to all together. `retry_after_s` is the time that the waiting
requests will take, at the recent rate in tokens per second.

Strict priority is strict within a tenant only: no tenant starves another by the priorities that it states.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from kv_protocol.decided import RouteRequest
from router.http.refusals import Refusal
from router.queue.waiting import OTHERS, ModelQueue, Place, Placing, QueueLimits, RefusalReason, order_of, placing_of

_RATE_RETRY_S_MAX = 60.0
RATE_HALF_LIFE_S = 10.0
_LN_2 = 0.6931471805599453
_UNBOUNDED = 1 << 62


class _Sum:
    """Waiting requests and tokens of one tenant, or of all."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.tokens = 0

    def add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens

    def is_full(self, tokens: int, requests_max: int, tokens_max: int) -> bool:
        return self.requests >= requests_max or (self.requests > 0 and self.tokens + tokens > tokens_max)


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
        rate = self._left(now_s) * _LN_2 / RATE_HALF_LIFE_S
        return max(1.0, min(most_s, tokens / rate if rate > 0 else most_s))


class RequestQueue:
    """All waiting requests. `now_s` never decreases."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self._limits = limits or QueueLimits()
        self._models: dict[str, ModelQueue] = {}
        self._waiting: dict[int, Place] = {}  # in the order of arrival, and of timeouts
        self._arrivals = 0
        self._all, self._tenants = _Sum(), dict[str, _Sum]()
        self._kinds = Counter[tuple[str, Placing]]()
        self._rate = _Rate()

    def __len__(self) -> int:
        return self._all.requests

    def models(self) -> tuple[str, ...]:
        """Return the models with waiting requests."""
        return tuple(self._models)

    def is_waited_for(self, request: RouteRequest) -> bool:
        """Return whether a request of the same kind waits."""
        return bool(self._waiting) and (request.model, placing_of(request)) in self._kinds

    # ---------------------------------------------------------------- in

    def offer(self, request: RouteRequest, uncached_tokens: int, now_s: float) -> Place | Refusal:
        """Queue the request; return its place, or why it is refused.

        `uncached_tokens`: its prompt without the longest prefix that a rank holds.
        """
        tenant, cost_tokens, limits = self._tenant_of(request.tenant), max(1, uncached_tokens), self._limits
        reason = self._full(tenant, cost_tokens)
        if reason is not None:
            return self._refusal(reason, tenant, cost_tokens, now_s)
        self._arrivals += 1
        queue = self._models.get(request.model)
        if queue is None:
            queue = self._models[request.model] = ModelQueue(limits)
        placing = placing_of(request)
        place = Place(
            request=request,
            cost_tokens=cost_tokens,
            tenant=tenant,
            order=order_of(request, cost_tokens, limits.policy, limits.ttft_default_s, now_s, self._arrivals),
            arrived_s=now_s,
            placing=placing,
            kind=queue.kind_of(tenant, placing),
        )
        queue.add(place)
        self._kinds[request.model, placing] += 1
        self._waiting[place.arrival] = place
        for total in (self._all, self._tenants.setdefault(tenant, _Sum())):
            total.add(1, cost_tokens)
        return place

    def _tenant_of(self, tenant: str) -> str:
        return tenant if tenant in self._tenants or len(self._tenants) < self._limits.tenants_max else OTHERS

    def _full(self, tenant: str, tokens: int) -> RefusalReason | None:
        limits = self._limits
        own = self._tenants.get(tenant, _Sum())
        if own.requests >= (limits.tenant_requests_max or _UNBOUNDED):
            return "tenant_full"
        return "queue_full" if self._all.is_full(tokens, limits.requests_max, limits.tokens_max) else None

    # ---------------------------------------------------------------- out

    def take(self, model: str, has_headroom: Callable[[RouteRequest], bool], now_s: float) -> Place | None:
        """Remove and return the next request with headroom; None if there is none.

        `has_headroom` is called once for each kind that a first request has.
        """
        queue = self._models.get(model)
        if queue is None:
            return None
        headroom: dict[Placing, bool] = {}
        firsts: dict[str, Place] = {}

        def fits(place: Place) -> bool:
            known = headroom.get(place.placing)
            if known is None:
                known = headroom[place.placing] = has_headroom(place.request)
            return known

        def cost_tokens(tenant: str) -> int | None:
            place = firsts.get(tenant) or queue.first(tenant, fits)
            if place is None:
                return None
            firsts[tenant] = place
            return place.cost_tokens

        tenant = queue.shares.take_turn(cost_tokens)
        if tenant is None:
            return None
        place = firsts[tenant]
        self._remove(place)
        self._rate.add(place.cost_tokens, now_s)
        return place

    def cancel(self, place: Place) -> bool:
        """Remove the request; return whether it still waited."""
        if place.arrival not in self._waiting:
            return False
        self._remove(place)
        return True

    def tick(self, now_s: float) -> list[tuple[Place, Refusal]]:
        """Remove and return the requests that have waited for `wait_s`, with their refusals."""
        overdue = []
        for place in self._waiting.values():
            if now_s - place.arrived_s < self._limits.wait_s:
                break
            overdue.append(place)
        return self._dismiss(overdue, "timeout", now_s)

    def stop(self, now_s: float) -> list[tuple[Place, Refusal]]:
        """Remove and return all requests, with their refusals."""
        return self._dismiss(list(self._waiting.values()), "stopping", now_s)

    def _dismiss(self, dismissals: Sequence[Place], reason: RefusalReason, now_s: float) -> list[tuple[Place, Refusal]]:
        dismissed = [(place, self._refusal(reason, place.tenant, place.cost_tokens, now_s)) for place in dismissals]
        for place in dismissals:
            self._remove(place)
        return dismissed

    def _remove(self, place: Place) -> None:
        del self._waiting[place.arrival]
        model = place.request.model
        self._models[model].remove(place)
        self._kinds[model, place.placing] -= 1
        if not self._kinds[model, place.placing]:
            del self._kinds[model, place.placing]
        if not self._models[model].shares:
            del self._models[model]
        for total in (self._all, self._tenants[place.tenant]):
            total.add(-1, -place.cost_tokens)
        if not self._tenants[place.tenant].requests:
            del self._tenants[place.tenant]

    # ---------------------------------------------------------------- what is said

    def _refusal(self, reason: RefusalReason, tenant: str, tokens: int, now_s: float) -> Refusal:
        total = self._tenants[tenant] if reason == "tenant_full" else self._all
        message = _message(reason, total, tokens, self._limits)
        again_s = self._rate.seconds_for(total.tokens, now_s, min(_RATE_RETRY_S_MAX, self._limits.wait_s))
        if reason == "tenant_full":
            return Refusal(429, message, "rate_limit_error", code=reason, retry_after_s=again_s)
        return Refusal(503, message, "server_error", code=reason, retry_after_s=again_s, outcome="failed")

    @property
    def tokens(self) -> int:
        """Uncached tokens of the requests that wait."""
        return self._all.tokens

    def tenants(self) -> dict[str, int]:
        """Return how many requests of each tenant wait."""
        return {tenant: own.requests for tenant, own in self._tenants.items()}


def _message(reason: RefusalReason, total: _Sum, tokens: int, limits: QueueLimits) -> str:
    found = f"{total.requests} requests with {total.tokens} tokens wait, and {tokens} tokens came"
    match reason:
        case "tenant_full":
            return f"queue.tenant_requests_max: {found}; allowed {limits.tenant_requests_max} requests of one tenant"
        case "queue_full":
            bounds = f"{limits.requests_max} requests, {limits.tokens_max} tokens"
            return f"queue.requests_max: {found}; allowed {bounds}"
        case "timeout":
            return f"queue.wait_s: no worker had room for the request within {limits.wait_s:g} s"
        case "stopping":
            return "the router stops; the request had not begun"
