"""Decisions in motion: seeds, promises and leases."""

from collections.abc import Sequence
from typing import cast

import pytest

from indexer.embedded import EmbeddedIndex, RankView
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, WorkerHeard
from kv_runtime.clock import ManualClock
from router.core.decide import Policy
from router.core.ledger import RankLoad
from router.core.view import RouteRequest
from router.routing import Lease, Routing
from tests.unit.router.samples import rank, registered, route, state

LEASE_S = 8.0


class FakeIndex:
    """Every rank holds `depth` blocks."""

    def __init__(self, depth: int, stale: str = "") -> None:
        self._depth, self._stale = depth, stale

    def overlap(self, hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> list[RankView]:
        """Return the same for every rank, no more than was asked for."""
        depth = min(self._depth, len(hashes))
        return [RankView((depth, depth, depth, depth), 1, 1, self._stale) for _ in ranks]


class Bench:
    """A `Routing`, its clock and its state."""

    def __init__(self, *workers: WorkerRegistered, holds: int = 0, seed: int = 1, stale: str = "") -> None:
        self.clock = ManualClock(now_s=100.0)
        self.state = state(LEASE_S)
        for each in workers or (registered(),):
            self.state.apply(FleetApplied(now_s=100.0, event=each))
            self.state.apply(WorkerHeard(now_s=100.0, worker_id=each.worker_id, instance=each.instance))
        index = cast("EmbeddedIndex", FakeIndex(holds, stale))
        self.routing = Routing(self.state, index, self.clock, Policy(), seed=seed, lease_s=LEASE_S, decisions_max=100)

    def take(self, request: RouteRequest) -> Lease:
        return self.routing.take(request, self.routing.decide(request))

    @property
    def load(self) -> RankLoad:
        return self.state.ledger.load_of(rank())


@pytest.mark.parametrize(
    ("isl_tokens", "holds", "blocks", "uncached"),
    [(40, 0, 3, 40), (40, 1, 3, 24), (40, 2, 3, 8), (32, 2, 2, 16), (32, 9, 2, 16), (16, 1, 1, 16), (1, 0, 1, 1)],
)
def test_what_is_promised_is_the_whole_prompt_and_what_is_not_held_of_it(
    isl_tokens: int, holds: int, blocks: int, uncached: int
) -> None:
    bench = Bench(holds=holds)
    bench.take(route(isl_tokens))
    assert (bench.load.active_blocks, bench.load.prefill_tokens_queued) == (blocks, uncached)


def test_deciding_promises_nothing_and_repeats_itself() -> None:
    bench = Bench(*[registered(f"w{number}") for number in range(8)])
    assert bench.routing.decide(route()) == bench.routing.decide(route())
    assert bench.state.ledger.loads() == {}
    assert bench.routing.decisions.newest(9) == []


def test_every_decision_that_counts_has_a_seed_of_its_own() -> None:
    bench = Bench()
    seeds = []
    for number in range(50):
        request = route(decision_id=f"d{number}")
        seeds.append(bench.routing.decide(request).seed)
        bench.take(request).end("ok")
    assert len(set(seeds)) == 50


def test_routers_with_the_same_seed_decide_alike_and_with_others_not() -> None:
    def winners(seed: int) -> list[str]:
        bench = Bench(*[registered(f"w{number}") for number in range(8)], seed=seed)
        found = []
        for number in range(20):
            request = route(decision_id=f"d{number}")
            decision = bench.routing.decide(request)
            found.append(decision.chosen.worker_id)
            bench.routing.take(request, decision).end("ok")
        return found

    assert winners(1) == winners(1)
    assert winners(1) != winners(2)


@pytest.mark.asyncio
async def test_the_first_bytes_end_the_prefill_and_say_how_long_it_took() -> None:
    bench = Bench()
    lease = bench.take(route(40))
    before = lease.ttft_s
    await bench.clock.advance(0.5)
    lease.on_bytes()
    await bench.clock.advance(0.5)
    lease.on_bytes()
    assert (before, lease.ttft_s) == (None, 0.5)
    assert (bench.load.prefill_tokens_queued, bench.load.active_blocks) == (0, 3)


@pytest.mark.asyncio
async def test_while_bytes_flow_a_lease_lives_on_and_without_them_it_ends() -> None:
    bench = Bench()
    lease = bench.take(route())
    for _ in range(30):
        await bench.clock.advance(1.0)
        lease.on_bytes()
        assert bench.state.tick(bench.clock.now()) == []
    await bench.clock.advance(LEASE_S)
    assert len(bench.state.tick(bench.clock.now())) == 1


@pytest.mark.asyncio
async def test_a_lease_is_not_renewed_for_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    lease = bench.take(route())
    told: list[object] = []
    monkeypatch.setattr(bench.routing, "tell", told.append)
    for _ in range(100):
        await bench.clock.advance(0.05)
        lease.on_bytes()
    assert len(told) == 3, "the first token, and two renewals in five seconds of a lease of eight"


@pytest.mark.parametrize("outcome", ["ok", "refused", "failed", "cancelled"])
def test_however_it_ends_nothing_is_promised_and_the_outcome_is_kept(outcome: str) -> None:
    bench = Bench()
    lease = bench.take(route(decision_id="d"))
    lease.end(outcome, cached_tokens=16)  # type: ignore[arg-type]
    lease.end("failed", cached_tokens=99)
    record = bench.routing.decisions.find("d")
    assert record is not None
    assert record.outcome is not None
    assert (record.outcome.outcome, record.outcome.cached_tokens) == (outcome, 16)
    assert (bench.load.active_requests, bench.load.active_blocks, bench.load.prefill_tokens_queued) == (0, 0, 0)


@pytest.mark.asyncio
async def test_a_lease_that_expired_may_still_go_on_and_end() -> None:
    bench = Bench()
    lease = bench.take(route())
    await bench.clock.advance(LEASE_S)
    for record in bench.state.tick(bench.clock.now()):
        bench.state.apply(record)
    lease.on_bytes()
    lease.end("ok")
    assert bench.load == RankLoad()


@pytest.mark.asyncio
async def test_a_breaker_is_open_for_its_time() -> None:
    bench = Bench()
    worker = bench.state.fleet.worker("w0")
    assert worker is not None
    bench.routing.open_breaker("w0", "connect: refused", 3.0)
    assert bench.routing.unready() == ["no worker is fit"]
    await bench.clock.advance(3.0)
    assert bench.routing.unready() == []


@pytest.mark.parametrize("stale", ["never_heard", "refused", "resyncing", "source", "behind"])
def test_a_rank_that_is_routed_to_blindly_makes_the_router_unready(stale: str) -> None:
    assert Bench(stale=stale).routing.unready() == [f"w0/0: {stale}"]


def test_a_full_index_does_not_make_the_router_unready() -> None:
    assert Bench(stale="overfull").routing.unready() == []
