"""The rows of a checkpoint's tables, by component.

Apart from the components because those are compiled in a wheel (`router/compiled`): mypyc keeps no types of a class's
fields that msgspec could decode by.
"""

from typing import NamedTuple

from kv_protocol.ids import WorkerRank


class FleetTotals(NamedTuple):
    """Fleet state besides the workers."""

    is_log_connected: bool
    refused_total: int


class HistoryMoment(NamedTuple):
    """The reference time of all sums; None: no request was routed yet."""

    as_of_s: float | None


class HistoryRow(NamedTuple):
    """A rank's sum."""

    rank: WorkerRank
    blocks: float


class ReportedRow(NamedTuple):
    """One rank's reports."""

    generation: int
    young: list[int]
    newest: tuple[int, int, int]
    foreign: int
    excess: int
    reported: list[int]
    surpluses: list[int]
    reported_at_s: float | None


class LedgerTotals(NamedTuple):
    """Leases that ended without their request's end."""

    expired_total: int
    corrected_total: int


class LedgerRow(NamedTuple):
    """A rank; its sums are those of its leases."""

    rank: WorkerRank
    is_gone: bool
    reported: ReportedRow


class LeaseRow(NamedTuple):
    """A lease."""

    lease_id: str
    rank: WorkerRank
    origin: str
    blocks: bytes
    uncached_tokens: int
    extra_blocks: int
    generation: int
    expires_at_s: float


class ApproximateTotals(NamedTuple):
    """Routed requests, and dropped blocks."""

    requests: int
    expired_blocks: int
    evicted_blocks: int
    left_blocks: int


class StretchRow(NamedTuple):
    """One stretch of a rank. `parent` is the index of another among the rank's rows; -1: none.

    A rank's rows follow each other, parents before their children.
    """

    rank: WorkerRank
    parent: int
    blocks: bytes
    expires_at_s: float
    request: int


class AffinityTotals(NamedTuple):
    """Evicted bindings, and bindings that changed their rank."""

    evicted_total: int
    moved_total: int


class BoundRow(NamedTuple):
    """A session in flight."""

    name: str
    rank: WorkerRank


class IdleRow(NamedTuple):
    """A session without a lease."""

    name: str
    rank: WorkerRank
    until_s: float


class SessionLeaseRow(NamedTuple):
    """A lease of a session; None: its session is not bound any more."""

    lease_id: str
    name: str | None


class BreakerRow(NamedTuple):
    """The breaker of a rank; if `dp_rank` is None, the breaker of a worker's HTTP server, which all its ranks share."""

    worker_id: str
    dp_rank: int | None
    failed_at_s: list[float]
    open_until_s: float | None
    busy_until_s: float
    busy_reason: str
    openings: int
    probe: str
    last_probe: str
    is_probation: bool
    reason: str


class LifeRow(NamedTuple):
    """One epoch of a rank's stream; `is_current`: the epoch of the last routed request."""

    rank: WorkerRank
    epoch: int
    is_current: bool


class PredictionRow(NamedTuple):
    """Expected blocks in the epoch of row `life`."""

    lease_id: str
    life: int
    blocks: bytes
    is_seen: bool


class SeenRow(NamedTuple):
    """When a prediction expires after its request had its first token."""

    over_at_s: float
    lease_id: str


class NewcomerRow(NamedTuple):
    """A rank of the fleet, newcomer or not."""

    rank: WorkerRank
    model: str
    joined_s: float
    settled_blocks: int
    is_newcomer: bool
    is_settled: bool
    promised_blocks: float
    misses: int


class FitRow(NamedTuple):
    """The fit of one rank, for the scaled features."""

    rank: WorkerRank
    weights: list[float]
    covariance: list[list[float]]


class Features(NamedTuple):
    """The features that a decision's latencies are learnt with."""

    rank: WorkerRank
    uncached_tokens: float
    queued_tokens: float
    running_requests: float
    active_blocks: float


class ForecastTotals(NamedTuple):
    """Measurements of each model that were rejected."""

    ttft_refused_total: int
    itl_refused_total: int


class PendingRow(NamedTuple):
    """A decision without an outcome yet, and its features."""

    decision_id: str
    features: Features


class RatesTotals(NamedTuple):
    """Latencies that were refused as impossible."""

    refused_total: int


class ModelRatesRow(NamedTuple):
    """A model's factors, and its expected tokens of an answer, after so many answers.

    Of a factor: what all ranks share, after so many measurements; the sum of the ranks' own times their weights, and of
    the weights.
    """

    model: str
    prefill: float
    prefills: int
    prefill_weighted: float
    prefill_weights: int
    decode: float
    decodes: int
    decode_weighted: float
    decode_weights: int
    output_tokens: float
    answers: int


class RankRatesRow(NamedTuple):
    """The factors of a rank beside its model's, after so many measurements; the last was at `measured_s`."""

    rank: WorkerRank
    model: str
    prefill: float
    decode: float
    prefills: int
    decodes: int
    measured_s: float


class ExpectedRow(NamedTuple):
    """A decision without an outcome yet: the TTFT and the ITL of the reference engine in its place."""

    decision_id: str
    model: str
    rank: WorkerRank
    ttft_s: float
    itl_s: float
