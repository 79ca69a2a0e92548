"""Which workers a gateway may send a request to, and which others may take the same call.

Only workers that the gateway can reach, and offers, are eligible. It gets a list: the chosen worker, then up to
`picker.fallbacks` others, cheapest first. It sends the request once: no prefill worker is asked, and its stream does
not resume on another worker.
"""

from kv_protocol.fleet import WorkerRegistered
from router.decision.verdict import Verdict
from router.endpoint_picker.addresses import FleetAddresses, addresses_of, endpoint_of
from router.fleet.registry import Fleet


class Addresses:
    """The endpoints of the fleet's workers."""

    __slots__ = ("_changes", "_fleet", "_known")

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._changes = -1
        self._known: FleetAddresses

    def now(self) -> FleetAddresses:
        """Return the present ones."""
        if self._changes != self._fleet.changes:
            self._changes = self._fleet.changes
            self._known = addresses_of([worker.registration for worker in self._fleet.workers()])
        return self._known


def alternatives(verdict: Verdict, count: int) -> tuple[str, ...]:
    """Return the URLs of at most `count` other workers that take the winner's call as it is, cheapest first.

    They take token ids or not as the winner does, have a rank of the same number, and can be reached by a gateway.
    """
    if not count:
        return ()
    registrations, winner = verdict.model_view.registrations, verdict.place
    like: WorkerRegistered = registrations[winner]
    order = list(range(len(verdict.rank_indices)))
    if verdict.has_costs:
        order.sort(key=verdict.cost_list().__getitem__)
    found = dict[str, None]()
    for at in order:
        place = verdict.rank_indices[at]
        other = registrations[place]
        if other.worker_id == like.worker_id or verdict.ranks[place].dp_rank != verdict.winner.dp_rank:
            continue
        if _takes_same(other, like) and endpoint_of(other.base_url) is not None:
            found[other.base_url] = None
        if len(found) == count:
            break
    return tuple(found)


def _takes_same(other: WorkerRegistered, like: WorkerRegistered) -> bool:
    return other.accepts_token_ids == like.accepts_token_ids and other.role == like.role
