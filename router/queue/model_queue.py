"""The waiting requests of one model: by tenant, by kind, in order.

Requests of one kind (`placing_of`: the same constraints and targets) find the same room, so only the first of each
kind is ever looked at. The rules: `admission.py`.
"""

from collections.abc import Callable

from sortedcontainers import SortedDict

from router.queue.fair_share import FairShare
from router.queue.waiting import Order, Place, Placing, QueueLimits

KINDS_MAX = 32
"""Kinds that are kept apart for a tenant; requests of further kinds share one."""
_OTHER_KINDS: Placing = ("others",)


class _TenantQueue:
    """One tenant's waiting requests for one model, by kind, each kind in its order."""

    def __init__(self) -> None:
        self.kinds: dict[Placing, SortedDict[Order, Place]] = {}

    def kind_of(self, placing: Placing) -> Placing:
        """Return the kind under which a request waits; beyond `KINDS_MAX` all share one."""
        return placing if placing in self.kinds or len(self.kinds) < KINDS_MAX - 1 else _OTHER_KINDS

    def add(self, place: Place) -> None:
        self.kinds.setdefault(place.kind, SortedDict())[place.order] = place

    def remove(self, place: Place) -> None:
        del self.kinds[place.kind][place.order]
        if not self.kinds[place.kind]:
            del self.kinds[place.kind]

    def first(self, has_headroom: Callable[[Place], bool]) -> Place | None:
        """Return the first request that fits, among the first of each kind."""
        if len(self.kinds) == 1:
            (only,) = self.kinds.values()
            place: Place = only.peekitem(0)[1]
            return place if has_headroom(place) else None
        firsts = sorted((each.peekitem(0) for each in self.kinds.values()), key=_order_of)
        return next((place for _, place in firsts if has_headroom(place)), None)


def _order_of(item: tuple[Order, Place]) -> Order:
    return item[0]


class ModelQueue:
    """The waiting requests of one model."""

    def __init__(self, limits: QueueLimits) -> None:
        self.shares = FairShare(limits.fair_share)
        self._of_tenant: dict[str, _TenantQueue] = {}

    def kind_of(self, tenant: str, placing: Placing) -> Placing:
        """Return the kind under which a request of the tenant waits."""
        queue = self._of_tenant.get(tenant)
        return placing if queue is None else queue.kind_of(placing)

    def add(self, place: Place) -> None:
        """Add a waiting request."""
        self._of_tenant.setdefault(place.tenant, _TenantQueue()).add(place)
        self.shares.waits(place.tenant)

    def remove(self, place: Place) -> None:
        """Remove a request."""
        queue = self._of_tenant[place.tenant]
        queue.remove(place)
        if not queue.kinds:
            del self._of_tenant[place.tenant]
            self.shares.waits_no_more(place.tenant)

    def first(self, tenant: str, has_headroom: Callable[[Place], bool]) -> Place | None:
        """Return the tenant's first waiting request that has headroom; None if there is none."""
        return self._of_tenant[tenant].first(has_headroom)
