"""Metrics of an engine in this process, made at scrape time."""

from collections.abc import Iterator

from kv_runtime.telemetry import Family, counter, gauge
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.trtllm.engine import TensorRTLLMEngine
from worker_agent.engines.trtllm.outputs import MeasuredTransfers
from worker_agent.fleet.canary import CanaryWatch


class ServedMetrics:
    """Reads the parts that exist; families of missing parts have no samples."""

    def __init__(
        self,
        worker: str,
        trtllm: TensorRTLLMEngine | None,
        simulated: SimulatedEngine | None,
        canary: CanaryWatch | None,
    ) -> None:
        self._worker, self._trtllm, self._simulated, self._canary = worker, trtllm, simulated, canary

    def families(self) -> Iterator[Family]:
        """Yield all families but those of requests, events and load."""
        at, engine = (self._worker,), self._trtllm
        load_s = None if engine is None else engine.load_s
        meaning = "Time that loading the engine took"
        yield gauge("engine_load_seconds", meaning, ("worker",), [] if load_s is None else [(at, load_s)])
        is_dead = [] if engine is None else [(at, float(engine.fault is not None))]
        yield gauge("engine_dead", "1 once TensorRT-LLM is known to be dead", ("worker",), is_dead)
        failed = [] if engine is None else [(at, float(engine.failed_requests_total))]
        yield counter(
            "engine_failed_requests", "Requests that TensorRT-LLM itself refused or failed", ("worker",), failed
        )
        errors = {} if engine is None else engine.logits_errors_total
        samples = [((self._worker, name), float(count)) for name, count in errors.items()]
        meaning = "Failed calls of a logits processor; the logits stayed unchanged"
        yield counter("logits_processor_errors", meaning, ("worker", "processor"), samples)
        canary_requests = {} if self._canary is None else self._canary.requests_total
        outcomes = [((self._worker, outcome), float(count)) for outcome, count in canary_requests.items()]
        if self._simulated is not None:
            yield from transfer_families(self._worker, self._simulated)
        if engine is not None:
            yield from _measured(self._worker, engine.transfers)
        yield counter(
            "engine_canaries", "Canary requests to the idle engine, by outcome", ("worker", "outcome"), outcomes
        )


def _measured(worker: str, transfers: MeasuredTransfers) -> Iterator[Family]:
    """Yield the failed transfers to TensorRT-LLM, and those that it measured; named as the simulated ones."""
    done = [((worker, "done"), float(transfers.count)), ((worker, "failed"), float(transfers.failed))]
    yield counter("kv_transfers", "Fetches of KV, by outcome", ("worker", "outcome"), done)
    fetched = [((worker,), float(transfers.transferred_bytes))]
    yield counter("kv_transfer_bytes", "Bytes of KV fetched", ("worker",), fetched)
    meaning = "Duration of complete fetches, summed; of a simulated engine in simulated time"
    yield counter("kv_transfer_seconds", meaning, ("worker",), [((worker,), transfers.seconds)])


def transfer_families(worker: str, engine: SimulatedEngine) -> Iterator[Family]:
    """Yield a simulated engine's contexts held for others, its fetches and their outcomes; seconds are the engine's."""
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
