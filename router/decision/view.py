"""The ranks that serve a model: what the core (`router/native/core.hpp`) and users' modes read of them."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.decision import TrustState
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.openai.endpoints import serves_default
from router.fleet.breakers import Breakers
from router.fleet.registry import Fleet, kinds, misfit
from router.fleet.trust import Trust, trust_of
from router.native import built

Ints = NDArray[np.int64]
Depths = NDArray[np.int32]
Floats = NDArray[np.float64]


COUNTS = ("predicted", "queued_tokens", "active_requests", "active_blocks", "shared_blocks")
RANK_NUMBERS: Final = np.dtype(
    [("held", np.int32, 4), *((name, np.int64) for name in (*COUNTS, "capacity"))]
    + [(name, np.float64) for name in ("trust_factor", "prefill", "decode")]
)
"""`RankNumbers` of `router/native/costs.hpp`: `held` is by tiers 0..t, `capacity` 0 if unknown, others as in `View`."""
OverlapAnswer = tuple[Depths, tuple[int, ...], tuple[int, ...], tuple[str, ...]]
"""What the index answers (`OverlapColumns`)."""


class RateColumns(NamedTuple):
    """The rate factors of some ranks, in their order, and the expected length of an answer in tokens."""

    prefill: Floats
    decode: Floats
    output_tokens: float
    is_learnt: bool = False
    """Whether the prefill factors were measured, at these ranks or by a former router; else they are 1."""


class View(NamedTuple):
    """The numbers of some ranks at one moment, for a user's mode. Element i of each column belongs to `ranks[i]`."""

    now_s: float
    turn: int
    """How many decisions for the model there were before."""
    ranks: tuple[WorkerRank, ...]
    registrations: tuple[WorkerRegistered, ...]
    """The registration of each rank's worker."""
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
    """Whether the rank joined lately, and has had its share of the requests of which no rank holds a block."""
    bound: WorkerRank | None
    """The rank that the request's session is bound to; None: no rank."""
    trust_factor: Floats
    """Share of the rank's overlap that is credited."""
    rates: RateColumns | None
    """None: the mode does not read them."""
    is_blank: bool
    """The index was not asked: the overlap columns are zeroes."""

    @property
    def expected(self) -> Ints:
        """Leading blocks that each rank is expected to have on its GPU."""
        expected: Ints = np.maximum(self.overlap[0], self.predicted)
        return expected


TRUST_FACTOR: dict[TrustState, float] = {"EXACT": 1.0, "DEGRADED": 0.5, "FALLBACK": 1.0}
"""Share of a rank's overlap that is credited; a FALLBACK rank's overlap comes from the approximate index."""


class ModelView:
    """The ranks that serve a model, for prompts that are hashed in one way: what stays the same between decisions.

    It is valid until a record changes what it was made of, and no longer than `valid_until_s`, when the passing of
    time may change it.
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
        fit = (each for each, unfit in zip(self.registrations, self.unfit, strict=True) if not unfit)
        self.roles = frozenset(each.role for each in fit if serves_default(each.api_endpoints))
        bounds = [bound for each in self.registrations for bound in (each.max_seq_len, each.max_prompt_tokens)]
        self.seq_len_min = min(filter(None, bounds), default=0)
        prefills, decodes = kinds(self.registrations, "prefill"), kinds(self.registrations, "decode")
        self.has_misfits = any(misfit(prefill, decode) for prefill in prefills for decode in decodes)
        """Whether a decode worker cannot take the KV blocks of a prefill worker."""
        self.apart: dict[str | None, dict[str, str]] = {}
        """Filled on demand (`eligibility.py`): for a prefill worker, why each decode worker cannot take its blocks; for
        None, the prefill workers whose blocks no decode worker can take, and why."""
        domains = {registration.transfer_domain for registration in self.registrations}
        is_bounded = any(registration.transfer_buffer_tokens for registration in self.registrations)
        self.transfer_domain = None if self.has_misfits or is_bounded or len(domains) != 1 else domains.pop()
        """The one domain of all ranks, if KV can be transferred between any two of them; else None."""
        self.valid_until_s = min(
            fleet.valid_until_s((worker for _, worker in rows), now_s), breakers.valid_until_s(now_s)
        )
        images = fleet.images(model, now_s)
        of_worker = {id(worker): fleet.disparities(worker, hashing, images) for _, worker in rows}
        self._disparities = [of_worker[id(worker)] for _, worker in rows]
        self.standing: Any = core.standing(self.ranks, [each.total_kv_blocks for each in self.registrations])
        """The ranks, as the core reads them."""
        self.undoubted = ("",) * len(self.ranks)

    def trusted(self, doubts: tuple[str, ...]) -> tuple[tuple[Trust, ...], built.Trusts]:
        """Return the trust in each rank, given the doubts of their streams, and what the core reads of that trust."""
        trust = tuple(map(trust_of, self._disparities, doubts))
        factors = [TRUST_FACTOR[each.state] for each in trust]
        without_events = [place for place, each in enumerate(trust) if each.overlap_source == "approximate"]
        return trust, built.Trusts(factors, without_events)
