"""The input of a decision beside the request: every rank that serves its model, at one moment.

The core (`router/native/core.hpp`) has the same columns; a `View` is made for users' modes and for people. Element i of
each column belongs to `ranks[i]`; arrays are read-only. `only` reduces the columns to some ranks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from router.fleet.trust import Trust

Ints = NDArray[np.int64]
Depths = NDArray[np.int32]
Floats = NDArray[np.float64]


OverlapAnswer = tuple[Depths | bytes, tuple[int, ...], tuple[int, ...], tuple[str, ...]]
"""What the index answers (`OverlapColumns`). Depths: an array, or packed as in a journal's record."""


class Forecast(NamedTuple):
    """Predicted latency of a request at each rank: seconds to its first token, and between tokens."""

    ttft_s: Floats
    itl_s: Floats


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
    history_blocks: Floats
    newcomer: tuple[bool, ...]
    """Whether the rank joined lately, and its share of full misses is spent."""
    bound: WorkerRank | None = None
    """The rank that the request's session is bound to; None: no rank."""
    trust_factor: Floats | None = None
    """Share of the rank's overlap that is credited; None: all of it, at every rank."""
    forecast: Forecast | None = None
    """None: the mode does not read it."""
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
        forecast, rates = self.forecast, self.rates
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
            history_blocks=self.history_blocks[at],
            newcomer=tuple(self.newcomer[index] for index in rank_indices),
            trust_factor=None if self.trust_factor is None else self.trust_factor[at],
            forecast=None if forecast is None else Forecast(forecast.ttft_s[at], forecast.itl_s[at]),
            rates=None if rates is None else rates._replace(prefill=rates.prefill[at], decode=rates.decode[at]),
        )
