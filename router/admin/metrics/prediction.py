"""Metrics of predicted and actual cached tokens, by worker.

error = predicted - actual: above 0 the index promised too much (evicted meanwhile), below 0 too little (in flight)
"""

from collections import Counter
from collections.abc import Iterator

from kv_runtime.telemetry import Distribution, Family, counter, histogram
from router.fleet.registry import Fleet

PHASES = ("connect", "first_byte", "body")
_ERROR_TOKENS = (-8192.0, -2048.0, -512.0, -128.0, -32.0, -1.0, 0.0, 32.0, 128.0, 512.0, 2048.0, 8192.0)


class _OfWorker:
    """The counters of one worker."""

    __slots__ = ("actual", "error", "failures", "predicted")

    def __init__(self) -> None:
        self.predicted = 0
        self.actual = 0
        self.error = Distribution(_ERROR_TOKENS)
        self.failures = Counter(dict.fromkeys(PHASES, 0))


class WorkerMetrics:
    """Counters by worker; those of workers outside the fleet are dropped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._workers: dict[str, _OfWorker] = {}

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """Distributions with observations to be settled."""
        return tuple(worker.error for worker in self._workers.values())

    def settled(self, worker_id: str, predicted_tokens: int, actual_tokens: int) -> None:
        """A worker answered, and stated how many tokens of the prompt it reused."""
        worker = self._workers.get(worker_id) or self._known(worker_id)
        if worker is not None:
            worker.predicted += predicted_tokens
            worker.actual += actual_tokens
            worker.error.observe(predicted_tokens - actual_tokens)

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
        meaning = "Prompt tokens that the index predicted to be reused"
        predicted = [(at, float(seen.predicted)) for at, seen in workers]
        yield counter("predicted_cached_tokens", meaning, ("worker",), predicted)
        actual = [(at, float(seen.actual)) for at, seen in workers]
        yield counter("actual_cached_tokens", "Prompt tokens that workers reported as reused", ("worker",), actual)
        errors = [(at, seen.error) for at, seen in workers]
        yield histogram(
            "prediction_error_tokens", "Predicted minus actual reused tokens of a request", ("worker",), errors
        )
        failures = [((*at, phase), float(count)) for at, seen in workers for phase, count in seen.failures.items()]
        yield counter("worker_failures", "Attempts that failed at a worker, by phase", ("worker", "phase"), failures)
