"""A decision as a journal record: small, and enough to make it again and compare the result.

    request    as routing read it, with its packed sequence hashes
    best       the columns of at most eight candidates: the winner, then the others, cheapest first. A column is the
               index of a worker rank in the order of the view
    terms      the cost terms of these candidates; a term is left out if all of them have its default
    costs      the costs of all other candidates, in the order of the columns; their terms are not recorded
    overlap    for each tier t, each rank's overlap with the request on tiers 0..t: from the index; for ranks without
               events, from the approximate index

In little-endian bytes:

    best     a u16 for each column
    terms    a mask (bit i: term i of `TERMS` is recorded) in bytes of 7 bits, lowest first; bit 7 is set in all bytes
             but the last | for each recorded term: an f64 for each of `best`
    costs    an f32 for each candidate
    overlap  flags u8 (bit t: tier t adds overlap to the tiers below it; bit 7: numbers are u32, else u16)
             | for each of these tiers: a bit for each column, lowest first, set if the tier adds overlap there | the
             added overlap of each of these columns
             empty if no rank has overlap
"""

import struct
from typing import Annotated, Literal

import msgspec

from kv_protocol.decision import CostTerms, CostUnit
from kv_protocol.errors import LimitExceeded
from kv_protocol.hashing import HASH_SCHEME, TEXT_SCHEME
from kv_protocol.ids import U64, DpRank, WorkerId, WorkerRank
from kv_protocol.ledger import Routed

RANKS_MAX = 0xFFFF
TERMS: tuple[str, ...] = CostTerms.__struct_fields__
TIERS = 4
WIDE = 0x80
"""The flag of an overlap with u32 numbers."""
_MASK_BITS, _MORE = 7, 0x80
_MASK_BYTES_MAX = -(-len(TERMS) // _MASK_BITS)
_TIMED = sum(1 << at for at, name in enumerate(TERMS) if name.endswith("_ms"))
_HASH_BYTES = 8

Depths = tuple[int, int, int, int]
RequestPhase = Literal["whole", "prefill", "decode", "alone"]
"""What a worker computes: prompt and generation (`whole`); only the prompt (`prefill`); only the generation, with the
prompt's KV from the prefill worker (`decode`); or both on a decode worker (`alone`)."""


class RouteRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A request as routing reads it, and as the journal has it.

    decision_id         unique, a new one for every attempt; `request_id` is the client's, and may repeat
    isl_tokens          the prompt's length. 0: the prompt was not encoded, because the mode reads no overlap.
                        A lower bound if images are unseen; an estimate if only the worker can encode the prompt
    sequence_hashes     the hashes of all known full blocks of the prompt, packed (`router/prompt/chains.py`)
    lora                the requested adapter; empty: the base model
    session_id          the session, whose requests prefer one rank; empty: no session
    pinned_*            the only worker or rank allowed; None: any
    tried               ranks that already failed this phase of the request
    phase               what the worker computes
    transfer_domain     decode: the domain in which the prompt's KV lies; None: any, or there is no KV
    prefill_worker      decode: the worker that computed the prompt, empty if unknown; prefill: empty. None: no KV is
                        transferred. Older versions always wrote None: they did not check that the workers fit
    endpoint            the OpenAI endpoint that the worker must serve
    allowed_workers     the workers that a gateway can reach and wants to choose from; None: any
    """

    decision_id: str
    request_id: str
    model: str
    isl_tokens: Annotated[int, msgspec.Meta(ge=0)]
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    hash_scheme: str = HASH_SCHEME
    sequence_hashes: bytes = b""
    max_tokens: int = 0
    lora: str = ""
    session_id: str = ""
    priority: int = 0
    strict_priority: int = 0
    tenant: str = ""
    expected_osl: int = 0
    required_taints: tuple[str, ...] = ()
    preferred_taints: tuple[tuple[str, float], ...] = ()
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    pinned_worker: str | None = None
    pinned_dp_rank: int | None = None
    tried: tuple[WorkerRank, ...] = ()
    phase: RequestPhase = "whole"
    transfer_domain: str | None = None
    endpoint: str = "chat"
    prefill_worker: str | None = None
    allowed_workers: frozenset[str] | None = None

    @property
    def known_tokens(self) -> int:
        """`isl_tokens`, or 0 if it is an estimate."""
        return 0 if self.hash_scheme == TEXT_SCHEME else self.isl_tokens

    @property
    def reusable_blocks(self) -> int:
        """How many of the prompt's blocks a cache could provide: the last token is always computed."""
        return max(0, self.isl_tokens - 1) // self.block_size


class Decided(msgspec.Struct, frozen=True, tag="decided", array_like=True, kw_only=True, gc=False):
    """A decision. It begins a lease with the request's blocks and `uncached_tokens`, under its `decision_id`.

    `now_s` is the view's time. The view has `ranks` columns; `winner` and `runner_up` are two of these. `epoch` is of
    the winner's stream, `kv_seq` the index's place in `KV_EVENTS`; `turn` counts earlier decisions for the model.
    `best`, `terms` and `costs` are empty for a mode without costs, `overlap` for a mode that reads no overlap. A router
    writes the record with `router/native/decision_bytes.cpp`. Decoding does not compare the bytes with `ranks`: the
    functions below may raise `struct.error` or `ValueError` for a forged record.
    """

    now_s: float
    request: RouteRequest
    policy: str
    seed: U64
    kv_seq: U64
    turn: U64
    ranks: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
    winner: U64
    worker_id: WorkerId
    dp_rank: DpRank
    runner_up: int | None
    margin: float | None
    reason: str
    uncached_tokens: U64 = 0
    epoch: U64 = 0
    action: str = "admit"
    ttft_s: float | None = None
    """The predicted time to the first token at the winner; `itl_s`: between tokens. None: no prediction."""
    itl_s: float | None = None
    best: bytes = b""
    terms: bytes = b""
    costs: bytes = b""
    overlap: bytes = b""

    def __post_init__(self) -> None:
        hashes = self.request.sequence_hashes
        if len(hashes) % _HASH_BYTES:
            raise LimitExceeded("sequence_hashes", f"{len(hashes)} bytes", "8 bytes a block")

    @property
    def rank(self) -> WorkerRank:
        """The rank that takes the request."""
        return WorkerRank(self.worker_id, self.dp_rank)

    @property
    def promise(self) -> Routed:
        """The lease that the decision began."""
        return promise(self.request, self.rank, self.uncached_tokens, self.epoch)


def promise(request: RouteRequest, rank: WorkerRank, uncached_tokens: int, epoch: int) -> Routed:
    """Return the lease that a decision for `rank` begins.

    A rank that only decodes gets the prompt's KV from elsewhere and computes none of the prompt.
    """
    return Routed(
        lease_id=request.decision_id,
        worker_id=rank.worker_id,
        dp_rank=rank.dp_rank,
        blocks=request.sequence_hashes,
        uncached_tokens=0 if request.phase == "decode" else uncached_tokens,
        extra_blocks=max(0, -(-request.isl_tokens // request.block_size) - len(request.sequence_hashes) // _HASH_BYTES),
        epoch=epoch,
        session_id=request.session_id,
    )


def best_columns(best: bytes) -> tuple[int, ...]:
    """Return the columns of the best candidates, the winner's first."""
    return struct.unpack(f"<{len(best) // 2}H", best)


def terms_mask(terms: bytes) -> tuple[int, int]:
    """Return the mask of the recorded terms, and its size in bytes; if it is cut off, a mask with no known term."""
    mask = 0
    for at, byte in enumerate(terms[:_MASK_BYTES_MAX]):
        mask |= (byte & (_MORE - 1)) << at * _MASK_BITS
        if byte < _MORE:
            return mask, at + 1
    return 1 << len(TERMS), _MASK_BYTES_MAX


def best_terms(decided: Decided) -> list[CostTerms]:
    """Return the terms of the best candidates."""
    count = len(decided.best) // 2
    if not count:
        return []
    mask, size = terms_mask(decided.terms)
    names = [name for at, name in enumerate(TERMS) if mask >> at & 1]
    values = struct.unpack_from(f"<{count * len(names)}d", decided.terms, size)
    return [CostTerms(**{name: values[at * count + row] for at, name in enumerate(names)}) for row in range(count)]


def cost_unit(decided: Decided) -> CostUnit:
    """Return the unit of the costs."""
    return "ms" if decided.terms and terms_mask(decided.terms)[0] & _TIMED else "own"


def other_costs(decided: Decided) -> tuple[float, ...]:
    """Return the costs of the candidates that are not among the best, rounded to f32."""
    return struct.unpack(f"<{len(decided.costs) // 4}f", decided.costs)


def overlap_tiers(decided: Decided) -> list[list[int]]:
    """Return for each tier t the overlap of every column on tiers 0..t."""
    depths, data = [0] * decided.ranks, decided.overlap or b"\0"
    at, size, kind = 1, (decided.ranks + 7) // 8, "I" if data[0] & WIDE else "H"
    tiers = []
    for tier in range(TIERS):
        if data[0] >> tier & 1:
            holders = int.from_bytes(data[at : at + size], "little")
            columns = [column for column in range(decided.ranks) if holders >> column & 1]
            added = struct.Struct(f"<{len(columns)}{kind}")
            depths = depths.copy()
            for column, more in zip(columns, added.unpack_from(data, at + size), strict=True):
                depths[column] += more
            at += size + added.size
        tiers.append(depths)
    return tiers


def overlap_depths(decided: Decided) -> list[Depths]:
    """Return for each column its overlap on tiers 0..0, 0..1, 0..2 and 0..3."""
    return list(zip(*overlap_tiers(decided), strict=True))
