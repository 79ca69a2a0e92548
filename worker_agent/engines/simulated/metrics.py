"""Metrics of a simulated engine's KV transfers. Seconds are the engine's."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.engines.simulated.engine import SimulatedEngine


def transfer_families(worker: str, engine: SimulatedEngine) -> Iterator[Family]:
    """Yield the contexts held for other engines, the fetches from them, and their outcomes; zeros in other roles."""
    statistics, label = engine.transfer_statistics(), (worker,)
    yield gauge(
        "kv_contexts_held", "Computed prompts held for decode workers", ("worker",), [(label, float(statistics.held))]
    )
    meaning = "Tokens of the prompts held for decode workers"
    yield gauge("kv_contexts_held_tokens", meaning, ("worker",), [(label, float(statistics.held_tokens))])
    ended = {"handed_over": statistics.handed_over_total, "expired": statistics.expired_total}
    samples = [((worker, outcome), float(count)) for outcome, count in ended.items()]
    yield counter("kv_contexts", "Held prompts that were released: fetched, or expired", ("worker", "outcome"), samples)
    meaning = "Requests of a decode engine that wait for their KV"
    yield gauge("kv_transfers_waiting", meaning, ("worker",), [(label, float(statistics.fetching))])
    samples = [((worker, str(outcome)), float(count)) for outcome, count in statistics.fetches_total.items()]
    yield counter("kv_transfers", "Fetches of KV, by outcome", ("worker", "outcome"), samples)
    meaning = "Bytes of KV fetched"
    yield counter("kv_transfer_bytes", meaning, ("worker",), [(label, float(statistics.fetched_bytes_total))])
    meaning = "Duration of complete fetches, summed; of a simulated engine in simulated time"
    yield counter("kv_transfer_seconds", meaning, ("worker",), [(label, statistics.fetch_seconds_total)])
