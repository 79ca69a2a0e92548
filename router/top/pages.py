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
    role: str = "aggregated"
    block_size: int = 0


class Rank(msgspec.Struct, frozen=True):
    """A rank's trust."""

    trust: str


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
    """How a decision ended; None: unknown."""

    outcome: str
    cached_tokens: int | None = None
    ttft_s: float | None = None


class Decision(msgspec.Struct, frozen=True):
    """One of `/v1/decisions`."""

    age_s: float
    decision_id: str
    worker_id: str
    dp_rank: int
    isl_tokens: int
    overlap_blocks: int
    margin: float | None = None
    cost_unit: str = "blocks"
    outcome: Outcome | None = None

    def reused_tokens(self, block_size: int) -> int:
        """Return how much of the prompt was reused, or held if the worker did not say."""
        if self.outcome is not None and self.outcome.cached_tokens is not None:
            return self.outcome.cached_tokens
        return min(self.overlap_blocks * block_size, self.isl_tokens)


class _Workers(msgspec.Struct, frozen=True):
    workers: list[Worker]


class _Decisions(msgspec.Struct, frozen=True):
    decisions: list[Decision]


workers_of = msgspec.json.Decoder(_Workers).decode
decisions_of = msgspec.json.Decoder(_Decisions).decode

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
    """What is known of the fleet; `before` are the metrics `passed_s` seconds before, None: none are known."""

    url: str
    workers: tuple[Worker, ...] = ()
    decisions: tuple[Decision, ...] = ()
    metrics: Metrics = Metrics()
    before: Metrics | None = None
    passed_s: float = 0.0

    def rate(self, name: str, **labels: str) -> float | None:
        """Return by how much a counter grew a second; None if unknown. A restarted router begins anew."""
        if self.before is None or self.passed_s <= 0:
            return None
        return max(0.0, self.metrics.total(name, **labels) - self.before.total(name, **labels)) / self.passed_s

    def hit_ratio(self, worker_id: str) -> float | None:
        """Return the share of prompt tokens that the worker reused, of the newest decisions; None without any.

        Where a worker did not say how many it reused, those count that it held when it was chosen.
        """
        block_size = next((each.registration.block_size for each in self.workers if each.worker_id == worker_id), 0)
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
