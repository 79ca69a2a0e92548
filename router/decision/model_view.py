"""The part of a view that stays the same between decisions: the ranks of a model, their fitness and trust.

It holds until something that it was made of is applied, and no longer than `valid_until_s`, when time alone changes it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kv_protocol.decision import TrustState
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.images import ImageRule
from kv_protocol.openai.endpoints import serves_default
from router.fleet.breakers import Breakers
from router.fleet.registry import Fleet, Worker
from router.fleet.trust import Disparity, Trust, trust_of
from router.native import built

TRUST_FACTOR: dict[TrustState, float] = {"EXACT": 1.0, "DEGRADED": 0.5, "FALLBACK": 1.0}
"""Share of a rank's overlap that is credited; a FALLBACK rank's overlap comes from the approximate index."""


class Trusted(NamedTuple):
    """Trust of each rank, and what the core reads of it: the factors, and the ranks without events."""

    trust: tuple[Trust, ...]
    native: Any


class ModelView:
    """The ranks that serve a model, for prompts that are hashed in one way."""

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
