"""Waiting requests: limits, fair shares between tenants, the queue of each model. The rules: `admission.py`.

Requests of one kind (`placing_of`: the same constraints and targets) find the same room, so only the first of each
kind is ever looked at. Between tenants it is deficit round robin: none can starve another.

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
from collections import OrderedDict
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Literal

import msgspec
from sortedcontainers import SortedDict

from kv_protocol.decided import RouteRequest

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


class _Share:
    __slots__ = ("deficit_tokens", "is_at_its_turn", "quantum_tokens")

    def __init__(self, quantum_tokens: float) -> None:
        self.quantum_tokens = quantum_tokens
        self.deficit_tokens = 0.0
        self.is_at_its_turn = False  # it has this round's quantum, and is first in the ring

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


def order_of(
    request: RouteRequest, cost_tokens: int, policy: QueuePolicy, ttft_default_s: float, now_s: float, arrival: int
) -> Order:
    """Return the key of a request in the order of its tenant's; `arrival` is its number among all that ever waited."""
    priority = max(0, request.priority)
    match policy:
        case "fcfs":
            key = now_s - priority
        case "wspt":
            key = cost_tokens / (1 + priority)
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
