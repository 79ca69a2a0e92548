"""Metrics of an engine in this process, made at scrape time."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, by_name, counter, gauge
from worker_agent.attached.watch import labelled
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.fleet.canary import CanaryWatch


def served_families(
    worker: str, engine: SimulatedEngine | TensorRTLLMEngine, canary: CanaryWatch | None
) -> Iterator[Family]:
    """Yield all families but those of requests, events and load; families of missing parts have no samples."""
    at = (worker,)
    trtllm = engine if isinstance(engine, TensorRTLLMEngine) else None
    load_s = [] if trtllm is None or trtllm.load_s is None else [(at, trtllm.load_s)]
    yield gauge("engine_load_seconds", "Time that loading the engine took", ("worker",), load_s)
    is_dead = [] if trtllm is None else [(at, trtllm.fault is not None)]
    yield gauge("engine_dead", "1 once TensorRT-LLM is known to be dead", ("worker",), is_dead)
    failed = [] if trtllm is None else [(at, trtllm.failed_requests_total)]
    meaning = "Requests that TensorRT-LLM itself refused or failed"
    yield counter("engine_failed_requests", meaning, ("worker",), failed)
    errors = [] if trtllm is None else by_name(at, trtllm.logits_errors_total)
    meaning = "Failed calls of a logits processor; the logits stayed unchanged"
    yield counter("logits_processor_errors", meaning, ("worker", "processor"), errors)
    if isinstance(engine, TensorRTLLMEngine):
        if engine.own_metrics is not None:
            yield from labelled(engine.own_metrics.families(), {"worker": worker})
    else:
        yield from _context_families(worker, engine)
    fetches = engine.fetches  # TensorRT-LLM counts those that failed, and of the others those that it measured
    yield counter("kv_transfers", "Fetches of KV, by outcome", ("worker", "outcome"), by_name(at, fetches.by_outcome))
    yield counter("kv_transfer_bytes", "Bytes of KV fetched", ("worker",), [(at, fetches.fetched_bytes)])
    meaning = "Duration of complete fetches, summed; of a simulated engine in simulated time"
    yield counter("kv_transfer_seconds", meaning, ("worker",), [(at, fetches.seconds)])
    outcomes = [] if canary is None else by_name(at, canary.requests_total)
    meaning = "Canary requests to the idle engine, by outcome"
    yield counter("engine_canaries", meaning, ("worker", "outcome"), outcomes)


def _context_families(worker: str, engine: SimulatedEngine) -> Iterator[Family]:
    """Yield a simulated engine's contexts held for others, and its requests that wait for theirs."""
    contexts, at = engine.contexts, (worker,)
    for name, meaning, value in (
        ("kv_contexts_held", "Computed prompts held for decode workers", len(contexts)),
        ("kv_contexts_held_tokens", "Tokens of the prompts held for decode workers", contexts.tokens),
        ("kv_transfers_waiting", "Requests of a decode engine that wait for their KV", engine.fetching),
    ):
        yield gauge(name, meaning, ("worker",), [(at, value)])
    ended = by_name(at, {"handed_over": contexts.handed_over_total, "expired": contexts.expired_total})
    yield counter("kv_contexts", "Held prompts that were released: fetched, or expired", ("worker", "outcome"), ended)
