"""The part of a view that stays the same between decisions: the ranks of a model, their fitness and trust.

It holds until something that it was made of is applied, and no longer than `valid_until_s`, when time alone changes it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.images import ImageRule
from kv_protocol.openai.endpoints import serves_default
from router.decision.cost import TRUST_FACTOR
from router.decision.view import Depths, Floats, Ints, View
from router.fleet.breakers import Breakers
from router.fleet.registry import Fleet, Worker
from router.fleet.trust import Disparity, Trust, trust_of

_TIERS = 4
_Number = TypeVar("_Number", np.int32, np.int64, np.float64)


class Trusted(NamedTuple):
    """Trust of each rank; the factors as a column (None: 1 for all); indices of the ranks without events."""

    trust: tuple[Trust, ...]
    factor: Floats | None
    without_events: tuple[int, ...]


class ModelView:
    """The ranks that serve a model, for prompts that are hashed in one way."""

    def __init__(self, fleet: Fleet, model: str, hashing: Hashing, now_s: float, breakers: Breakers) -> None:
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
        self.valid_until_s = min(
            fleet.valid_until_s((worker for _, worker in rows), now_s), breakers.valid_until_s(now_s)
        )
        self._disparities = _disparities(fleet, rows, hashing, fleet.images(model, now_s))
        self._doubts: tuple[str, ...] | None = None
        self._trusted = Trusted((), None, ())
        self.no_ints: Ints = _frozen(np.zeros(len(rows), dtype=np.int64))
        self.no_floats: Floats = _frozen(np.zeros(len(rows)))
        self.no_depths: Depths = _frozen(np.zeros((_TIERS, len(rows)), dtype=np.int32))
        self._blank = self._columns_of_nothing()

    def trusted(self, doubts: tuple[str, ...]) -> Trusted:
        """Return the trust of each rank, given the doubts of their streams."""
        if doubts is not self._doubts:
            self._doubts = doubts
            trust = tuple(map(trust_of, self._disparities, doubts))
            factors = [TRUST_FACTOR[each.state] for each in trust]
            self._trusted = Trusted(
                trust,
                _frozen(np.array(factors)) if any(factor != 1.0 for factor in factors) else None,
                tuple(place for place, each in enumerate(trust) if each.overlap_source == "approximate"),
            )
        return self._trusted

    def blank(self, now_s: float, turn: int) -> View:
        """Return a view in which no blocks are held, promised or expected, and no stream is in doubt."""
        return View(now_s, turn, *self._blank)

    def _columns_of_nothing(self) -> tuple[Any, ...]:
        trust = self.trusted(("",) * len(self.ranks)).trust
        zeros = (0,) * len(self.ranks)
        view = View(
            now_s=0.0,
            turn=0,
            ranks=self.ranks,
            registrations=self.registrations,
            unfit=self.unfit,
            trust=trust,
            overlap=self.no_depths,
            predicted=self.no_ints,
            epochs=zeros,
            seqs=zeros,
            queued_tokens=self.no_ints,
            active_requests=self.no_ints,
            active_blocks=self.no_ints,
            shared_blocks=self.no_ints,
            history_blocks=self.no_floats,
            newcomer=(False,) * len(self.ranks),
            is_uniform=self.is_uniform,
            seq_len_min=self.seq_len_min,
            is_blank=True,
            misfits=self.misfits,
        )
        return tuple(view)[2:]


def _disparities(
    fleet: Fleet, rows: Sequence[tuple[WorkerRank, Worker]], hashing: Hashing, images: ImageRule | None
) -> list[tuple[Disparity, ...]]:
    of_worker = {id(worker): fleet.disparities(worker, hashing, images) for _, worker in rows}
    return [of_worker[id(worker)] for _, worker in rows]


def _frozen(column: NDArray[_Number]) -> NDArray[_Number]:
    column.setflags(write=False)
    return column
