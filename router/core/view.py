"""What a decision reads: the request, and every rank that serves its model, as they stood at one moment."""

import msgspec

from kv_protocol.decision import OverlapSource, TrustState
from kv_protocol.hashing import HASH_SCHEME, Hashing
from kv_protocol.ids import WorkerRank


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as far as routing reads it.

    `sequence_hashes` are those of all full blocks of the prompt (`isl_tokens` tokens); `reusable_blocks` of them can
    come from a cache, since the last token is always computed. Pins are None, or the only worker or rank allowed.
    """

    decision_id: str
    """Unique; a new one for every attempt. `request_id` is the client's word, and may repeat."""
    request_id: str
    model: str
    isl_tokens: int
    block_size: int
    hash_scheme: str = HASH_SCHEME
    sequence_hashes: tuple[int, ...]
    max_tokens: int = 0
    pinned_worker: str | None = None
    pinned_dp_rank: int | None = None
    tried: tuple[WorkerRank, ...] = ()
    """Ranks that failed this request already."""

    @property
    def hashing(self) -> Hashing:
        """How `sequence_hashes` were made."""
        return Hashing(self.block_size, self.hash_scheme)

    @property
    def reusable_blocks(self) -> int:
        """How many of the prompt's blocks a cache could give."""
        return max(0, self.isl_tokens - 1) // self.block_size

    @property
    def reusable_hashes(self) -> tuple[int, ...]:
        """The hashes to look for in the index."""
        return self.sequence_hashes[: self.reusable_blocks]


class RankRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank that serves the model. `unfit` says why it takes no new work; empty when it may."""

    rank: WorkerRank
    unfit: str
    role: str
    max_seq_len: int
    overlap_blocks: tuple[int, int, int, int]
    overlap_source: OverlapSource
    predicted_blocks: int
    """How much of the request's prefix is on its way there, with requests that were routed before."""
    epoch: int
    seq: int
    trust: TrustState
    trust_reason: str
    prefill_tokens_queued: int
    active_requests: int
    active_blocks: int
    shared_blocks: int
    """How many of the request's full blocks the rank already works on."""
    history_blocks: float


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. `turn` counts the decisions taken before for the same model."""

    now_s: float
    turn: int
    rows: tuple[RankRow, ...]
