"""The queue of requests before the fleet: limits, refusals, order. Pure. It is off until a threshold is set.

    asked          no request of its kind waits and there is headroom: admitted at once. Else it waits, or is refused
    headroom       some eligible rank has no more uncached tokens queued than threshold x max_num_batched_tokens of its
                   worker (`Headroom`)
    order          by fair share of uncached tokens between tenants; within a tenant: strict priority, the higher
                   first; the policy's key, the smaller first; the order of arrival

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

Strict priority is strict within a tenant only. Between tenants it is deficit round robin: none can starve another.

    quantum        of a key = `quantum_tokens` x its weight: tokens that it may be served per round
    round          each key whose head may go now gets its quantum; while its deficit covers its head, it is served
    served         the head's cost is subtracted from its deficit
    nothing waits  the key is forgotten, with its deficit: idle keys save nothing up
    head may not go now    the key is skipped; its deficit does not change

So while two keys always have a request that may go, their shares differ from the ratio of their weights by no more than
a quantum and the largest request of each. A head of cost c goes after at most ceil(c / quantum) rounds, whatever others
send.

Rounds that would serve no key are not simulated: all keys get the smallest number of quanta after which a head is
covered at once, so that a turn checks every waiting key once, however large the requests. Source: Shreedhar and
Varghese, "Efficient fair queuing using deficit round robin", SIGCOMM 1995.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Literal

import msgspec
from sortedcontainers import SortedDict

from kv_protocol.decided import RouteRequest
from router.http.refusals import Refusal

QueuePolicy = Literal["fcfs", "wspt", "edf"]
RefusalReason = Literal["tenant_full", "queue_full", "timeout", "stopping"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = ("tenant_full", "queue_full", "timeout", "stopping")
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
_UNBOUNDED = 1 << 62


@dataclass(slots=True)
class _Share:
    quantum_tokens: float
    deficit_tokens: float = 0.0
    is_at_its_turn: bool = False  # it has this round's quantum, and is first in the ring

    def rounds(self, cost_tokens: int) -> int:
        """Return how many quanta it needs, at least one, to cover the cost."""
        return max(1, math.ceil((cost_tokens - self.deficit_tokens) / self.quantum_tokens))


class FairShare:
    """The ring of keys with waiting requests; the caller keeps the requests."""

    def __init__(self, quantum_tokens: int, weights: Mapping[str, float]) -> None:
        """`weights` of keys that have another than 1, each above 0."""
        self._quantum_tokens, self._weights = quantum_tokens, weights
        self._ring: OrderedDict[str, _Share] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ring)

    def waits(self, key: str) -> None:
        """A request of the key waits; a new key comes last in the ring."""
        if key not in self._ring:
            self._ring[key] = _Share(self._quantum_tokens * self._weights.get(key, 1.0))

    def waits_no_more(self, key: str) -> None:
        """No request of the key waits any more; an unknown key is ignored."""
        self._ring.pop(key, None)

    def take_turn(self, cost_tokens: Callable[[str], int | None]) -> str | None:
        """Charge and return the key whose turn it is; None if no head may go now.

        `cost_tokens(key)` is the cost of the key's head, 1 or more, or None if it may not go now.
        """
        turn = self._same_turn(cost_tokens)
        if turn is not None:
            return turn
        able = [(key, share, cost) for key, share in self._ring.items() if (cost := cost_tokens(key)) is not None]
        if not able:
            return None
        needed = [share.rounds(cost) for _, share, cost in able]
        rounds = min(needed)
        first = needed.index(rounds)
        for place, (_, share, _) in enumerate(able):
            share.deficit_tokens += share.quantum_tokens * (rounds if place <= first else rounds - 1)
        key, share, cost = able[first]
        share.is_at_its_turn = True
        share.deficit_tokens -= cost
        while (passed := next(iter(self._ring))) != key:
            self._ring.move_to_end(passed)
        return key

    def _same_turn(self, cost_tokens: Callable[[str], int | None]) -> str | None:
        """Return the ring's first, where it is its turn still; else its turn is over."""
        for key, share in self._ring.items():
            if not share.is_at_its_turn:
                return None
            cost = cost_tokens(key)
            if cost is not None and cost <= share.deficit_tokens:
                share.deficit_tokens -= cost
                return key
            share.is_at_its_turn = False
            self._ring.move_to_end(key)
            return None
        return None


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
    quantum_tokens: int = 2048
    """What a tenant of weight 1 may have served in a round."""
    fair_share_weights: Mapping[str, float] = {}
    """Of tenants that have another weight than 1."""


def order_of(request: RouteRequest, cost_tokens: int, limits: QueueLimits, now_s: float, arrival: int) -> Order:
    """Return the key of a request in the order of its tenant's; `arrival` is its number among all that ever waited."""
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
    cost_tokens: int
    """What it costs its tenant: the prompt without the longest prefix that a rank holds, at least 1."""
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


class ModelQueue:
    """The waiting requests of one model: by tenant, by kind, each kind in its order."""

    def __init__(self, limits: QueueLimits) -> None:
        self.shares = FairShare(limits.quantum_tokens, limits.fair_share_weights)
        self._tenants: dict[str, dict[Placing, SortedDict[Order, Place]]] = {}

    def kind_of(self, tenant: str, placing: Placing) -> Placing:
        """Return the kind under which a request of the tenant waits; beyond `KINDS_MAX` all share one."""
        kinds = self._tenants.get(tenant, {})
        return placing if placing in kinds or len(kinds) < KINDS_MAX - 1 else _OTHER_KINDS

    def add(self, place: Place) -> None:
        """Add a waiting request."""
        kinds = self._tenants.setdefault(place.tenant, {})
        kinds.setdefault(place.kind, SortedDict())[place.order] = place
        self.shares.waits(place.tenant)

    def remove(self, place: Place) -> None:
        """Remove a request."""
        kinds = self._tenants[place.tenant]
        del kinds[place.kind][place.order]
        if not kinds[place.kind]:
            del kinds[place.kind]
        if not kinds:
            del self._tenants[place.tenant]
            self.shares.waits_no_more(place.tenant)

    def first(self, tenant: str, has_headroom: Callable[[Place], bool]) -> Place | None:
        """Return the tenant's first waiting request that has headroom, among the first of each kind."""
        firsts = sorted((each.peekitem(0) for each in self._tenants[tenant].values()), key=itemgetter(0))
        return next((place for _, place in firsts if has_headroom(place)), None)


@dataclass(slots=True)
class _Sum:
    """Waiting requests and tokens of one tenant, or of all."""

    requests: int = 0
    tokens: int = 0

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
        rate = self._left(now_s) * math.log(2) / RATE_HALF_LIFE_S
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
            order=order_of(request, cost_tokens, limits, now_s, self._arrivals),
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
