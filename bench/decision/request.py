"""What one request costs the decision core, from its decision to the journal's bytes, without sockets or prompts.

decide   view, choice and verdict       first    the answer's first byte
take     the promise and its record     end      the outcome and its record
journal  encoding of the request's records, in batches as the journal's writer does
trace    what tracing adds to a request that is not sampled; not in the CPU time of the others
"""

from collections import deque
from time import perf_counter, perf_counter_ns, thread_time_ns
from typing import NamedTuple

from bench.decision.fleet import DecisionFleet, DecisionShape
from bench.report import percentile
from kv_runtime.tracing.sampling import Sampling
from router.decision.recorders import Applied
from router.decision.routing import Lease
from router.journal.encoder import JournalEncoder
from router.request.attempt import RankAttempt
from router.request.tracer import Tracer

REQUEST_STAGES = ("decide", "take", "first", "end", "journal", "trace")
_BATCH = 64
_HEADERS = {b"host": b"router", b"content-type": b"application/json", b"content-length": b"300", b"accept": b"*/*"}
_IN_FLIGHT = 16
"""Requests of the measurement in flight at a time, beside the fleet's own."""


class RequestCost(NamedTuple):
    """The median of each stage, and the mean CPU time of a request with all stages but `trace`, in us."""

    p50_us: dict[str, float]
    cpu_us: float


class _Records:
    def __init__(self) -> None:
        self.waiting: deque[Applied] = deque()

    def record(self, what: Applied) -> None:
        self.waiting.append(what)


def request_cost(shape: DecisionShape, requests: int, seed: int = 1) -> RequestCost:
    """Serve `requests` requests in a busy fleet of this shape; return what each cost."""
    records, encoder = _Records(), JournalEncoder(1)
    fleet = DecisionFleet(shape, seed, records)
    _encode(records, encoder)
    times: dict[str, list[float]] = {stage: [] for stage in REQUEST_STAGES}
    routing, clock, leases, cpu_ns = fleet.routing, fleet.clock, deque[Lease](), 0
    tracer = Tracer(Sampling(follows_parent=True, ratio=0.0), lambda _: None)
    for number, request in enumerate(fleet.requests(requests)):
        ran_ns = thread_time_ns()
        at = perf_counter_ns()
        verdict = routing.decide(request)
        decided = perf_counter_ns()
        lease = routing.take(verdict)
        took = perf_counter_ns()
        lease.first_token()
        begun = perf_counter_ns()
        leases.append(lease)
        clock.now_s += 1e-3
        times["decide"].append((decided - at) / 1e3)
        times["take"].append((took - decided) / 1e3)
        times["first"].append((begun - took) / 1e3)
        if len(leases) > _IN_FLIGHT:
            ending = leases.popleft()
            at = perf_counter_ns()
            ending.end("ok", 0, 16)
            times["end"].append((perf_counter_ns() - at) / 1e3)
        if number % _BATCH == _BATCH - 1:
            at = perf_counter_ns()
            _encode(records, encoder)
            times["journal"].append((perf_counter_ns() - at) / 1e3 / _BATCH)
        cpu_ns += thread_time_ns() - ran_ns
        attempt = RankAttempt(verdict, lease)
        at = perf_counter_ns()
        _trace(tracer, attempt)
        times["trace"].append((perf_counter_ns() - at) / 1e3)
    medians = {stage: percentile(seen, 0.5) if seen else 0.0 for stage, seen in times.items()}
    return RequestCost(medians, cpu_ns / 1e3 / requests)


def _trace(tracer: Tracer, attempt: RankAttempt) -> None:
    """Do with the tracer what the data plane does for a request that is answered and not sampled."""
    trace = tracer.begin(_HEADERS, perf_counter())
    trace.prompted(1e-5)
    trace.deciding()
    trace.decided(attempt.verdict)
    trace.sending(_HEADERS)
    trace.began()
    trace.attempt_over(attempt, "ok")
    trace.is_wanted(has_failed=False)


def _encode(records: _Records, encoder: JournalEncoder) -> None:
    while records.waiting:
        encoder.add(records.waiting.popleft(), 1, 0.0)
    while len(encoder):
        encoder.cut()
