"""What the control plane answered, as `router top` reads it. Pure.

Answers are validated: what has another form is refused. Fields that are not shown are ignored. The formats are those of
`router/admin/control_plane.py` and of `/metrics`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

DECISIONS = 100
"""How many of the newest decisions are asked for: of these are latencies and hit rates."""


class Registration(msgspec.Struct, frozen=True):
    """Of a worker, what is shown."""

    worker_id: str
    model: str
    role: str = "aggregated"
    base_url: str = ""
    version: str = ""
    event_source: str = ""
    block_size: int = 0
    total_kv_blocks: int = 0
    max_num_seqs: int = 0


class Rank(msgspec.Struct, frozen=True):
    """A rank's trust, and why it takes no new work."""

    dp_rank: int
    trust: str
    trust_reason: str = ""
    unfit: str = ""


class Worker(msgspec.Struct, frozen=True):
    """One of `/v1/workers`."""

    registration: Registration
    ranks: list[Rank]
    unfit: str = ""
    draining: bool = False

    @property
    def worker_id(self) -> str:
        """Its id."""
        return self.registration.worker_id


class Outcome(msgspec.Struct, frozen=True):
    """How a decision ended; seconds, None if unknown."""

    outcome: str
    cached_tokens: int | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    duration_s: float | None = None
    output_tokens: int | None = None


class Decision(msgspec.Struct, frozen=True):
    """One of `/v1/decisions`."""

    age_s: float
    decision_id: str
    request_id: str
    worker_id: str
    dp_rank: int
    policy: str
    isl_tokens: int
    overlap_blocks: int
    trust: str
    margin: float | None = None
    cost_unit: str = "blocks"
    outcome: Outcome | None = None

    def reused_tokens(self, block_size: int) -> int:
        """Return how much of the prompt was reused, or held if the worker did not say."""
        if self.outcome is not None and self.outcome.cached_tokens is not None:
            return self.outcome.cached_tokens
        return min(self.overlap_blocks * block_size, self.isl_tokens)


class Explained(msgspec.Struct, frozen=True):
    """`/v1/decisions/{id}`; `decisions` are all of the same request."""

    explanation: str
    outcome: Outcome | None = None
    decisions: "list[Explained]" = []


class _Workers(msgspec.Struct, frozen=True):
    workers: list[Worker]


class _Decisions(msgspec.Struct, frozen=True):
    decisions: list[Decision]


workers_of = msgspec.json.Decoder(_Workers).decode
decisions_of = msgspec.json.Decoder(_Decisions).decode
explained_of = msgspec.json.Decoder(Explained).decode

Labels = tuple[tuple[str, str], ...]


class Metrics(NamedTuple):
    """Samples of `/metrics` by name, each with its labels, in order of their names."""

    samples: Mapping[str, Mapping[Labels, float]] = {}

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels, among others; 0 without any."""
        wanted = labels.items()
        return sum(
            value for at, value in self.samples.get(f"kvrouter_{name}", {}).items() if wanted <= dict(at).items()
        )

    def of(self, name: str, **labels: str) -> float | None:
        """Return the mean of the samples with these labels, among others; None without any."""
        found = self.samples.get(f"kvrouter_{name}", {}).items()
        values = [value for at, value in found if labels.items() <= dict(at).items()]
        return sum(values) / len(values) if values else None


class Snapshot(NamedTuple):
    """What is known of the fleet. `problem`: why the newest attempt failed; the rest is then that of the last one."""

    url: str
    problem: str = ""
    polls_failed: int = 0
    """Since the last one that succeeded."""
    is_known: bool = False
    """Whether any attempt has succeeded."""
    workers: tuple[Worker, ...] = ()
    decisions: tuple[Decision, ...] = ()
    metrics: Metrics = Metrics()
    before: Metrics | None = None
    """The metrics `passed_s` seconds before; None: none are known."""
    passed_s: float = 0.0
    explained: Explained | None = None
    """The decision that was asked for."""

    def rate(self, name: str, **labels: str) -> float | None:
        """Return by how much a counter grew a second; None if unknown. A restarted router begins anew."""
        if self.before is None or self.passed_s <= 0:
            return None
        return max(0.0, self.metrics.total(name, **labels) - self.before.total(name, **labels)) / self.passed_s

    def worker(self, worker_id: str) -> Worker | None:
        """Return the worker with this id."""
        return next((each for each in self.workers if each.worker_id == worker_id), None)

    def hit_ratio(self, worker_id: str) -> float | None:
        """Return the share of prompt tokens that the worker reused, of the newest decisions; None without any.

        Where a worker did not say how many it reused, those count that it held when it was chosen.
        """
        worker = self.worker(worker_id)
        block_size = 0 if worker is None else worker.registration.block_size
        found = [each for each in self.decisions if each.worker_id == worker_id]
        tokens = sum(each.isl_tokens for each in found)
        return sum(each.reused_tokens(block_size) for each in found) / tokens if tokens else None

    def ttft_s(self, quantile: float) -> float | None:
        """Return a quantile of the newest decisions' times to the first token; None if none is known."""
        found = sorted(
            each.outcome.ttft_s
            for each in self.decisions
            if each.outcome is not None and each.outcome.ttft_s is not None
        )
        return found[min(len(found) - 1, int(quantile * len(found)))] if found else None
