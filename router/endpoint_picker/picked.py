"""A client's request that a gateway sends to the worker which this router chose.

It is read, queued, decided, booked and settled as any other request (`router/request/served.py`). It differs in this:

* Only workers that the gateway can reach, and offers, are eligible.
* It is sent once. No prefill worker is asked, and its stream does not resume on another worker.
* The gateway gets a list: the chosen worker, then up to `picker.fallbacks` others, cheapest first, that take the same
  call. If the gateway reports that another one answered, the attempt at the chosen worker has failed, and the work is
  booked at the one that answered.
"""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from kv_protocol.decided import RouteRequest
from router.endpoint_picker.addresses import FleetAddresses, addresses_of, endpoint_of
from router.fleet.registry import Fleet
from router.prompt import EncodedPrompt
from router.request.events import Send, ServedElsewhere
from router.request.plan import RequestPlan
from router.request.rank_attempt import of_rank
from router.request.served import Served
from router.request.serving import Serving
from router.server.exchange import Exchange, OutboundCall
from router.server.stream_replay import StreamReplayBuffer

if TYPE_CHECKING:
    from kv_protocol.fleet import WorkerRegistered
    from router.decision.verdict import Verdict


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


class PickedRequest(Served):
    """One request of a gateway. `begin` starts it."""

    __slots__ = ("_addresses", "_fallbacks", "_served_by", "_subset")

    def __init__(
        self,
        exchange: Exchange,
        serving: Serving,
        addresses: Addresses,
        subset: tuple[str, ...] | None,
        fallbacks: int,
    ) -> None:
        """`subset` are the endpoints that the gateway offers, None: all; `fallbacks` others are named at most."""
        super().__init__(exchange, serving)
        self._addresses, self._subset, self._fallbacks = addresses, subset, fallbacks
        self._served_by: str | None = None

    def served_by(self, endpoint: str) -> bool:
        """The gateway says which endpoint answered; return whether it is another one than the chosen worker's."""
        worker_id = self._addresses.now().workers.get(endpoint)
        attempt = self._machine.attempt
        if worker_id is None or attempt is None or worker_id == of_rank(attempt).rank.worker_id:
            return False
        self._served_by = worker_id
        self._feed_or_refuse(ServedElsewhere())
        return True

    def _routed(self, prompt: EncodedPrompt | None) -> RouteRequest:
        route = super()._routed(prompt)
        allowed = self._addresses.now().allowed(self._subset)
        return route if allowed is None else replace(route, allowed_workers=allowed)

    def _planned(self, route: RouteRequest) -> RequestPlan:
        return self.serving.plan(route, self.inbound, is_sent_here=False)

    def _make_route(self) -> None:
        super()._make_route()
        if self._served_by is not None:
            self.route = replace(self.route, pinned_worker=self._served_by)

    def _call(self, send: Send, buffer: StreamReplayBuffer | None) -> OutboundCall | None:
        call = super()._call(send, buffer)
        if call is None or not self._fallbacks or self._served_by is not None:
            return call
        return call._replace(alternatives=alternatives(of_rank(send.attempt).verdict, self._fallbacks))


def alternatives(verdict: "Verdict", count: int) -> tuple[str, ...]:
    """Return the URLs of at most `count` other workers that take the winner's call as it is, cheapest first.

    They take token ids or not as the winner does, have a rank of the same number, and can be reached by a gateway.
    """
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


def _takes_same(other: "WorkerRegistered", like: "WorkerRegistered") -> bool:
    return other.accepts_token_ids == like.accepts_token_ids and other.role == like.role
