"""Metrics of predicted and actual cached tokens, of failures and of first tokens, by worker.

error = predicted - actual: above 0 the index promised too much (evicted meanwhile), below 0 too little (in flight)
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from kv_runtime.telemetry import Distribution, Family, by_name, counter, histogram
from router.fleet.registry import Fleet

PHASES = ("connect", "first_byte", "body")
_ERROR_TOKENS = (-8192.0, -2048.0, -512.0, -128.0, -32.0, -1.0, 0.0, 32.0, 128.0, 512.0, 2048.0, 8192.0)
_FIRST_TOKEN_SECONDS = (0.016, 0.04, 0.1, 0.25, 0.6, 1.6, 4.0, 10.0, 60.0)
"""Fewer than those of all workers together: every worker has these."""


class _OfWorker:
    """The counters of one worker."""

    __slots__ = ("actual", "error", "failures", "predicted", "ttft")

    def __init__(self) -> None:
        self.predicted = 0
        self.actual = 0
        self.error = Distribution(_ERROR_TOKENS)
        self.ttft = Distribution(_FIRST_TOKEN_SECONDS)
        self.failures = Counter(dict.fromkeys(PHASES, 0))


class WorkerMetrics:
    """Counters by worker; those of workers outside the fleet are dropped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._workers: dict[str, _OfWorker] = {}

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """Distributions with observations to be settled."""
        return tuple(seen for worker in self._workers.values() for seen in (worker.error, worker.ttft))

    def settled(self, worker_id: str, predicted_tokens: int, actual_tokens: int) -> None:
        """A worker answered, and stated how many tokens of the prompt it reused."""
        worker = self._workers.get(worker_id) or self._known(worker_id)
        if worker is not None:
            worker.predicted += predicted_tokens
            worker.actual += actual_tokens
            worker.error.observe(predicted_tokens - actual_tokens)

    def first_token(self, worker_id: str, ttft_s: float) -> None:
        """A worker sent the first token of an answer."""
        worker = self._workers.get(worker_id) or self._known(worker_id)
        if worker is not None:
            worker.ttft.observe(ttft_s)

    def worker_failed(self, worker_id: str, phase: str) -> None:
        """A worker failed a request."""
        worker = self._workers.get(worker_id) or self._known(worker_id)
        if worker is not None:
            worker.failures[phase] += 1

    def _known(self, worker_id: str) -> _OfWorker | None:
        self._follow_the_fleet()
        return self._workers.get(worker_id)

    def _follow_the_fleet(self) -> None:
        """Keep counters for exactly the workers of the fleet."""
        present = {worker.registration.worker_id for worker in self._fleet.workers()}
        for worker_id in self._workers.keys() - present:
            del self._workers[worker_id]
        for worker_id in present - self._workers.keys():
            self._workers[worker_id] = _OfWorker()

    def families(self) -> Iterator[Family]:
        """Yield the counters of the present workers."""
        self._follow_the_fleet()
        workers = [((worker_id,), seen) for worker_id, seen in sorted(self._workers.items())]
        for name, meaning, field in (
            ("predicted_cached_tokens", "Prompt tokens that the index predicted to be reused", "predicted"),
            ("actual_cached_tokens", "Prompt tokens that workers reported as reused", "actual"),
        ):
            yield counter(name, meaning, ("worker",), [(at, getattr(seen, field)) for at, seen in workers])
        for name, meaning, field in (
            ("prediction_error_tokens", "Predicted minus actual reused tokens of a request", "error"),
            (
                "worker_time_to_first_token_seconds",
                "Time from the routing of a request to its first token, where known, by the worker that sent the token",
                "ttft",
            ),
        ):
            yield histogram(name, meaning, ("worker",), [(at, getattr(seen, field)) for at, seen in workers])
        failures = chain(*(by_name(at, seen.failures) for at, seen in workers))
        yield counter("worker_failures", "Attempts that failed at a worker, by phase", ("worker", "phase"), failures)
