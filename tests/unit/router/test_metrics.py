"""Trust as a scrape shows it: every rank has one state, every worker every field."""

from prometheus_client import CollectorRegistry

from kv_protocol.codec import pack_u64
from kv_protocol.journal import FleetApplied, LedgerApplied
from kv_protocol.ledger import Routed
from kv_runtime.telemetry import Projection
from router.fleet.trust import PARITY_FIELDS
from router.metrics import rank_families
from tests.unit.router.samples import registered
from tests.unit.router.test_routing import Bench


class Scrape:
    """What one scrape shows of a router's trust."""

    def __init__(self, bench: Bench) -> None:
        self._registry = CollectorRegistry()
        Projection(self._registry, lambda: rank_families(bench.routing))

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"kvrouter_{name}", labels)

    def trust(self, worker_id: str, dp_rank: int = 0) -> dict[str, float | None]:
        states = ("EXACT", "DEGRADED", "FALLBACK")
        return {state: self("rank_trust", worker=worker_id, dp_rank=str(dp_rank), trust=state) for state in states}

    def parity(self, worker_id: str) -> dict[str, float | None]:
        return {field: self("worker_parity", worker=worker_id, field=field) for field in PARITY_FIELDS}


def test_every_rank_has_1_for_its_present_state_and_0_for_the_others() -> None:
    told = Scrape(Bench(registered(dp_ranks=(0, 1)), registered("w1", canary=1), stale="behind"))
    degraded = {"EXACT": 0.0, "DEGRADED": 1.0, "FALLBACK": 0.0}
    assert (told.trust("w0", 0), told.trust("w0", 1)) == (degraded, degraded)
    assert told.trust("w1") == {"EXACT": 0.0, "DEGRADED": 0.0, "FALLBACK": 1.0}


def test_every_worker_has_every_field_and_0_for_those_that_differ() -> None:
    told = Scrape(Bench(registered(), registered("w1", block_size=32, template_digest="x")))
    assert told.parity("w0") == dict.fromkeys(PARITY_FIELDS, 1.0)
    assert told.parity("w1") == dict.fromkeys(PARITY_FIELDS, 1.0) | {"block_size": 0.0, "template_digest": 0.0}


def test_what_was_routed_is_counted_and_what_of_it_went() -> None:
    bench = Bench(registered(total_kv_blocks=2))
    routed = Routed(lease_id="l", worker_id="w0", dp_rank=0, blocks=pack_u64([1, 2, 3]), uncached_tokens=1)
    bench.state.apply(LedgerApplied(now_s=100.0, event=routed))
    told = Scrape(bench)
    assert told("approximate_blocks", worker="w0", dp_rank="0") == 2
    assert told("approximate_forgotten_blocks_total", cause="evicted") == 1
    bench.state.tick(220.0)
    assert told("approximate_blocks", worker="w0", dp_rank="0") is None
    assert told("approximate_forgotten_blocks_total", cause="expired") == 2
    bench.state.apply(LedgerApplied(now_s=220.0, event=routed))
    bench.state.apply(FleetApplied(now_s=220.0, event=registered(instance="w0-2")))
    assert told("approximate_forgotten_blocks_total", cause="left") == 2
