"""The input of a decision beside the request: every rank that serves its model, at one moment.

The core (`router/native/core.hpp`) has the same columns; a `View` is made for users' modes and for people. Element i of
each column belongs to `ranks[i]`; arrays are read-only. `only` reduces the columns to some ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.decision import TrustState
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.images import ImageRule
from kv_protocol.openai.endpoints import serves_default
from router.fleet.breakers import Breakers
from router.fleet.registry import Fleet, Worker
from router.fleet.trust import Disparity, Trust, trust_of
from router.native import built

Ints = NDArray[np.int64]
Depths = NDArray[np.int32]
Floats = NDArray[np.float64]


OverlapAnswer = tuple[Depths | bytes, tuple[int, ...], tuple[int, ...], tuple[str, ...]]
"""What the index answers (`OverlapColumns`). Depths: an array, or packed as in a journal's record."""


class RateColumns(NamedTuple):
    """The factors of some ranks, in their order, and the expected tokens of an answer."""

    prefill: Floats
    decode: Floats
    output_tokens: float
    is_learnt: bool = False
    """Whether the prefill factors are of measurements, of these ranks or of a former router's; else they are 1."""


class View(NamedTuple):
    """The ranks that serve a model at one moment, eldest worker first. `turn` counts the decisions before."""

    now_s: float
    turn: int
    ranks: tuple[WorkerRank, ...]
    registrations: tuple[WorkerRegistered, ...]
    """The registration of each rank's worker."""
    unfit: tuple[str, ...]
    """Why the rank takes no new work; empty if it does."""
    trust: tuple[Trust, ...]
    overlap: Depths
    """(4, n): leading blocks held on the tiers 0..t; the approximate index's where trust is FALLBACK."""
    predicted: Ints
    """Leading blocks that requests routed before will bring to the rank."""
    epochs: tuple[int, ...]
    seqs: tuple[int, ...]
    queued_tokens: Ints
    """Uncached tokens promised to the rank, of requests before their first token."""
    active_requests: Ints
    active_blocks: Ints
    shared_blocks: Ints
    """How many of the request's full blocks active requests of the rank already use."""
    newcomer: tuple[bool, ...]
    """Whether the rank joined lately, and its share of full misses is spent."""
    bound: WorkerRank | None = None
    """The rank that the request's session is bound to; None: no rank."""
    trust_factor: Floats | None = None
    """Share of the rank's overlap that is credited; None: all of it, at every rank."""
    rates: RateColumns | None = None
    """None: the policy does not read them."""
    is_uniform: bool = False
    """Every rank is known to be fit, aggregated, and to serve chats and completions; False: check each rank."""
    seq_len_min: int = 0
    """The smallest `max_seq_len` or `max_prompt_tokens` that a worker states; 0: none. Valid if `is_uniform`."""
    is_blank: bool = False
    """The index was not asked: the overlap columns are zeroes."""
    misfits: Mapping[str, Mapping[str, str]] = {}
    """Prefill worker id, decode worker id: why the latter cannot take the former's KV blocks (`Pairs`)."""

    @property
    def expected(self) -> Ints:
        """Leading blocks that each rank is expected to have on its GPU."""
        expected: Ints = np.maximum(self.overlap[0], self.predicted)
        return expected

    def only(self, rank_indices: Sequence[int]) -> "View":
        """Return the view of these ranks only."""
        at = np.asarray(rank_indices, dtype=np.intp)
        rates = self.rates
        return self._replace(
            ranks=tuple(self.ranks[index] for index in rank_indices),
            registrations=tuple(self.registrations[index] for index in rank_indices),
            unfit=tuple(self.unfit[index] for index in rank_indices),
            trust=tuple(self.trust[index] for index in rank_indices),
            overlap=self.overlap.take(at, 1),
            predicted=self.predicted[at],
            epochs=tuple(self.epochs[index] for index in rank_indices),
            seqs=tuple(self.seqs[index] for index in rank_indices),
            queued_tokens=self.queued_tokens[at],
            active_requests=self.active_requests[at],
            active_blocks=self.active_blocks[at],
            shared_blocks=self.shared_blocks[at],
            newcomer=tuple(self.newcomer[index] for index in rank_indices),
            trust_factor=None if self.trust_factor is None else self.trust_factor[at],
            rates=None if rates is None else rates._replace(prefill=rates.prefill[at], decode=rates.decode[at]),
        )


TRUST_FACTOR: dict[TrustState, float] = {"EXACT": 1.0, "DEGRADED": 0.5, "FALLBACK": 1.0}
"""Share of a rank's overlap that is credited; a FALLBACK rank's overlap comes from the approximate index."""


class Trusted(NamedTuple):
    """Trust of each rank, and what the core reads of it: the factors, and the ranks without events."""

    trust: tuple[Trust, ...]
    native: Any


class ModelView:
    """The ranks that serve a model, for prompts that are hashed in one way: what stays the same between decisions.

    It holds until something that it was made of is applied, and no longer than `valid_until_s`, when time alone
    changes it.
    """

    def __init__(
        self, fleet: Fleet, model: str, hashing: Hashing, now_s: float, breakers: Breakers, core: built.Core
    ) -> None:
        rows = [(rank, worker) for worker in fleet.serving(model) for rank in worker.registration.ranks]
        self.ranks: tuple[WorkerRank, ...] = tuple(rank for rank, _ in rows)
        self.registrations = tuple(worker.registration for _, worker in rows)
        self.unfit: tuple[str, ...] = tuple(
            fleet.unfit(worker, now_s) or breakers.unfit(rank, now_s) for rank, worker in rows
        )
        generates = [serves_default(registration.api_endpoints) for registration in self.registrations]
        is_aggregated = all(registration.role == "aggregated" for registration in self.registrations)
        self.is_uniform = not any(self.unfit) and is_aggregated and all(generates)
        serving = zip(self.registrations, self.unfit, generates, strict=True)
        self.roles = frozenset(registration.role for registration, unfit, serves in serving if serves and not unfit)
        bounds = (
            bound
            for registration in self.registrations
            for bound in (registration.max_seq_len, registration.max_prompt_tokens)
            if bound
        )
        self.seq_len_min = min(bounds, default=0)
        self.misfits = fleet.pairs.misfits
        domains = {registration.transfer_domain for registration in self.registrations}
        is_bounded = any(registration.transfer_buffer_tokens for registration in self.registrations)
        self.transfer_domain = None if self.misfits or is_bounded or len(domains) != 1 else domains.pop()
        """Between all ranks of which KV can be transferred; None: not between all."""
        self.valid_until_s = min(
            fleet.valid_until_s((worker for _, worker in rows), now_s), breakers.valid_until_s(now_s)
        )
        self._disparities = _disparities(fleet, rows, hashing, fleet.images(model, now_s))
        self._doubts: tuple[str, ...] | None = None
        self._trusted = Trusted((), None)
        self.standing: Any = core.standing(self.ranks, [each.total_kv_blocks for each in self.registrations])
        """The ranks, as the core reads them."""
        self.undoubted = ("",) * len(self.ranks)

    def trusted(self, doubts: tuple[str, ...]) -> Trusted:
        """Return the trust of each rank, given the doubts of their streams."""
        if doubts is not self._doubts:
            self._doubts = doubts
            trust = tuple(map(trust_of, self._disparities, doubts))
            factors = [TRUST_FACTOR[each.state] for each in trust]
            without_events = [place for place, each in enumerate(trust) if each.overlap_source == "approximate"]
            is_any = any(factor != 1.0 for factor in factors)
            self._trusted = Trusted(trust, built.Trusts(factors if is_any else [], without_events))
        return self._trusted


def _disparities(
    fleet: Fleet, rows: Sequence[tuple[WorkerRank, Worker]], hashing: Hashing, images: ImageRule | None
) -> list[tuple[Disparity, ...]]:
    of_worker = {id(worker): fleet.disparities(worker, hashing, images) for _, worker in rows}
    return [of_worker[id(worker)] for _, worker in rows]
