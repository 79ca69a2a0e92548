"""Two routers on a real broker: what one promises, the other counts, whatever befell the connection."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kv_protocol.codec import pack_u64
from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Finished, FirstToken, LeaseEvent, Routed
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from kv_runtime.telemetry import Projection, new_registry
from router.decision.policy import Policy
from router.decision.routing import Lease, Routing
from router.decision.state import LEASE_S, RankLoad
from router.replicas.service import Replicas
from tests.support.parts import at_work
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import connected
from tests.unit.properties.replica_network import apply
from tests.unit.router.samples import ask, joined, registered, route

MODEL = "m"
W0, W1 = WorkerRank("w0", 0), WorkerRank("w1", 0)
CHAIN = pack_u64(range(1, 101))


class Router:
    """A router's leases and replicas, and nothing else of it."""

    def __init__(self, name: str, log: EventLog) -> None:
        self.name, self.log = name, log
        self.state = joined(registered("w0"), registered("w1"))
        index: Any = None  # it is asked for nothing
        self.routing = Routing(self.state, index, Clock(), Policy(), seed=1, lease_s=LEASE_S, decisions_max=9)
        self.replicas = Replicas(self.routing, log, name)

    def does(self, *events: LeaseEvent) -> None:
        for event in events:
            apply(self.state, event, Clock().now())
            self.replicas.replication.on_lease_event(event)

    def takes(self, decision_id: str) -> Lease:
        return self.routing.take(self.state.decide(route(10, decision_id=decision_id, pinned_worker="w0"), ask, 0.0, 0))

    def sums(self) -> tuple[dict[WorkerRank, RankLoad], int]:
        loads = {rank: load for rank, load in self.state.loads().items() if load != RankLoad()}
        return loads, self.state.core.open_leases


@asynccontextmanager
async def router(url: str, name: str) -> AsyncIterator[Router]:
    async with connected(url) as log:
        running = Router(name, log)
        await running.replicas.start()
        async with at_work(Part("log", log.run, 1), Part("replicas", running.replicas.run)):
            yield running


def routed(lease_id: str, blocks: int = 100, at: WorkerRank = W0) -> Routed:
    return Routed(
        lease_id=lease_id,
        worker_id=at.worker_id,
        dp_rank=at.dp_rank,
        blocks=CHAIN[: 8 * blocks],
        uncached_tokens=10,
        extra_blocks=1,
    )


async def agreed(one: Router, other: Router, leases: int) -> None:
    """Wait until both ledgers say the same, of so many leases."""
    await eventually(
        lambda: one.sums() == other.sums() and one.sums()[1] == leases, f"{one.sums()} is not {other.sums()}"
    )


async def test_what_either_promises_both_count_until_it_ends(broker: Broker) -> None:
    async with router(broker.url, "r1") as one, router(broker.url, "r2") as other:
        registry = new_registry()
        Projection(registry, other.replicas.families)
        one.does(routed("a"), routed("b", 50), routed("c", at=W1), FirstToken(lease_id="a"))
        other.does(routed("d", 20), FirstToken(lease_id="d"))
        await agreed(one, other, 4)
        assert other.state.load_of(W0) == RankLoad(active_requests=3, active_blocks=103, prefill_tokens_queued=10)
        skew = functools.partial(registry.get_sample_value, "kvrouter_replica_skew_requests", {"router": "r1"})
        await eventually(lambda: skew() == 0, "a beat says that nothing differs")
        assert (registry.get_sample_value("kvrouter_replica_messages_total", {"outcome": "heard"}) or 0) >= 2
        one.does(Finished(lease_id="a"), Cancelled(lease_id="b"), Finished(lease_id="c"))
        other.does(Finished(lease_id="d"))
        await agreed(one, other, 0)
        assert one.state.core.is_ledger_empty
        assert other.state.core.is_ledger_empty


async def test_a_lease_whose_prefill_was_over_before_it_was_told_is_told_so(broker: Broker) -> None:
    async with router(broker.url, "r1") as one, router(broker.url, "r2") as other:
        leases = [one.takes(lease_id) for lease_id in ("a", "b", "c")]
        for lease in leases[:2]:
            lease.first_token()
        leases[1].end("ok")
        await agreed(one, other, 2)
        assert other.state.load_of(W0).prefill_tokens_queued == 10


async def test_a_router_that_comes_later_learns_of_all_that_runs(broker: Broker) -> None:
    async with router(broker.url, "r1") as one:
        one.does(*(routed(f"l{number}", number % 100) for number in range(5000)))
        async with router(broker.url, "r2") as other:
            await agreed(one, other, 5000)
            assert one.replicas.replication.counts["given"] >= 1


async def test_what_happened_while_the_log_was_away_is_known_once_it_is_back(broker: Broker) -> None:
    async with router(broker.url, "r1") as one, router(broker.url, "r2") as other:
        one.does(routed("a"), routed("b"))
        await agreed(one, other, 2)
        await broker.kill()
        await eventually(lambda: not one.log.is_connected and not other.log.is_connected)
        one.does(Finished(lease_id="a"), FirstToken(lease_id="b"), routed("c", 30))
        other.does(routed("d", 60, W1))
        await eventually(lambda: one.replicas.replication.counts["unsent"] > 0)
        await broker.start()
        await agreed(one, other, 3)
