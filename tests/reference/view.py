"""The input of a decision: every rank that serves the request's model, at one moment, eldest worker first.

A rank is one row. Trust says how far the index's answer about it is believed (`router/fleet/trust.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank

AskIndex = Callable[[bytes, tuple[WorkerRank, ...]], Any]
"""Returns the index's answer about a chain at some ranks, in their order: `depths`, of each of four tiers t the leading
blocks that each rank holds on the tiers 0..t; `epochs` of their streams; `doubts`, why the answer may be wrong."""


class Row(NamedTuple):
    """One rank. What the policy's mode does not read is 0."""

    rank: WorkerRank
    registration: WorkerRegistered
    unfit: str
    """Why the rank takes no new work; empty if it does."""
    depths: tuple[int, ...] = (0, 0, 0, 0)
    """Leading blocks held on the tiers 0..t; the approximate index's where trust is FALLBACK."""
    predicted: int = 0
    """Leading blocks that requests routed before will bring to the rank."""
    epoch: int = 0
    trust_factor: float = 1.0
    """Share of the rank's overlap that is credited."""
    queued_tokens: int = 0
    """Uncached tokens promised to the rank, of requests before their first token."""
    active_requests: int = 0
    active_blocks: int = 0
    shared_blocks: int = 0
    """How many of the request's full blocks active requests of the rank already use."""
    is_newcomer: bool = False
    """Whether the rank joined lately, and its share of full misses is spent."""
    factors: tuple[float, float] = (1.0, 1.0)
    """Of prefill and decode, as learnt."""

    @property
    def expected(self) -> int:
        """Leading blocks that the rank is expected to have on its GPU."""
        return max(self.depths[0], self.predicted)


class View(NamedTuple):
    """The ranks. `turn` counts the decisions for the model before this one."""

    now_s: float
    turn: int
    rows: tuple[Row, ...]
    has_misfits: bool
    """Whether a decode worker cannot take the KV blocks of a prefill worker."""
    apart: dict[str | None, dict[str, str]]
    bound: WorkerRank | None = None
    """The rank that the request's session is bound to; None: no rank."""
    is_blank: bool = True
    """The index was not asked."""
    output_tokens: float | None = None
    """Expected tokens of an answer; None: the policy reads no learnt rates."""

    @property
    def ranks(self) -> tuple[WorkerRank, ...]:
        return tuple(row.rank for row in self.rows)

    @property
    def registrations(self) -> tuple[WorkerRegistered, ...]:
        return tuple(row.registration for row in self.rows)

    @property
    def unfit(self) -> tuple[str, ...]:
        return tuple(row.unfit for row in self.rows)
