"""Workers, requests, rows and decisions, of which a test names only what it is about."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from indexer.embedded import OverlapColumns, RankView
from kv_protocol.codec import pack_u64
from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Candidate, CostTerms, Decision, TrustState
from kv_protocol.fleet import Role, WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, LedgerApplied, LoadApplied, WorkerHeard
from kv_protocol.ledger import LedgerEvent
from kv_protocol.load import LoadReport
from router.decision.state import ApproximateLimits, RouterState, StateSettings
from router.decision.view import TRUST_FACTOR, RateColumns
from router.fleet.registry import TextDigests
from router.fleet.trust import Trust
from tests.support.decide import View

MODEL = "m"
BLOCK_SIZE = 16
TEXT = TextDigests("tokenizer-1", "template-1")


def rank(name: str = "w0/0") -> WorkerRank:
    """Return the rank that is written `worker/dp_rank`."""
    worker_id, _, dp_rank = name.partition("/")
    return WorkerRank(worker_id, int(dp_rank or 0))


def registered(worker_id: str = "w0", **changed: Any) -> WorkerRegistered:
    """Return the registration of a worker that agrees with `TEXT` in everything."""
    block_size = changed.get("block_size", BLOCK_SIZE)
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "instance": f"{worker_id}-1",
        "model": MODEL,
        "served_names": (MODEL,),
        "base_url": "http://127.0.0.1:1",
        "block_size": block_size,
        "hash_scheme": HASH_SCHEME,
        "tokenizer_digest": TEXT.tokenizer,
        "template_digest": TEXT.template,
        "canary": canary(block_size),
        "kv_cache_dtype": "bfloat16",
    }
    return WorkerRegistered(**fields | changed)


def state(lease_s: float = 300.0, approximate: ApproximateLimits | None = None) -> RouterState:
    """Return the state of a router that knows no worker."""
    limits = approximate or ApproximateLimits()
    return RouterState(StateSettings(text=TEXT, lease_s=lease_s, approximate=limits))


def joined(*registrations: WorkerRegistered, lease_s: float = 10.0, **settings: Any) -> RouterState:
    """Return the state after these workers joined and were heard, at time 0."""
    folded = RouterState(StateSettings(text=TEXT, lease_s=lease_s, **settings))
    for each in registrations:
        folded.apply(FleetApplied(now_s=0.0, event=each))
        folded.apply(WorkerHeard(now_s=0.0, worker_id=each.worker_id, instance=each.instance))
    return folded


def tell(folded: RouterState, *events: LedgerEvent, now_s: float = 0.0, router: str = "") -> None:
    """Apply events of leases; of those of another `router`, if there is one."""
    for event in events:
        folded.apply(LedgerApplied(now_s=now_s, event=event, router=router))


def load(at: WorkerRank, running: int, waiting: int, used: int, now_s: float = 0.0) -> LoadApplied:
    """Return what the engine of a rank's first instance reports."""
    report = LoadReport(
        instance=f"{at.worker_id}-1",
        iteration=1,
        running_requests=running,
        waiting_requests=waiting,
        used_blocks=used,
        total_blocks=1000,
    )
    return LoadApplied(now_s=now_s, worker_id=at.worker_id, dp_rank=at.dp_rank, report=report)


def chain(*hashes: int) -> bytes:
    """Return these sequence hashes packed."""
    return pack_u64(hashes)


def chain_of(path: Sequence[int]) -> bytes:
    """Return sequence hashes of which each names its whole path of digits below 8, as real ones do."""
    return pack_u64([int("".join(map(str, path[: at + 1])), 8) for at in range(len(path))])


def route(isl_tokens: int = 40, **changed: Any) -> RouteRequest:
    """Return a request whose full blocks have the hashes 100, 101, ..."""
    block_size = changed.get("block_size", BLOCK_SIZE)
    fields: dict[str, Any] = {
        "decision_id": "d-1",
        "request_id": "r-1",
        "model": MODEL,
        "isl_tokens": isl_tokens,
        "block_size": block_size,
        "sequence_hashes": pack_u64(range(100, 100 + isl_tokens // block_size)),
    }
    return RouteRequest(**fields | changed)


class Row(NamedTuple):
    """One rank of a view: an idle, fit one that holds nothing, but for what a test says."""

    rank: WorkerRank
    unfit: str = ""
    role: Role = "aggregated"
    max_seq_len: int = 0
    max_prompt_tokens: int = 0
    total_kv_blocks: int = 0
    loras: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()
    overlap_blocks: tuple[int, int, int, int] = (0, 0, 0, 0)
    predicted_blocks: int = 0
    epoch: int = 7
    seq: int = 9
    trust: TrustState = "EXACT"
    trust_reason: str = ""
    prefill_tokens_queued: int = 0
    active_requests: int = 0
    active_blocks: int = 0
    shared_blocks: int = 0
    newcomer: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    """Of prefill and decode, as learnt."""

    @property
    def registrations(self) -> WorkerRegistered:
        """What its worker registered."""
        names = ("role", "max_seq_len", "max_prompt_tokens", "total_kv_blocks", "loras", "taints")
        return registered(self.rank.worker_id, **{name: getattr(self, name) for name in names})


def row(name: str = "w0/0", **changed: Any) -> Row:
    """Return an idle, fit rank that holds nothing."""
    return Row(rank(name), **changed)


Held = tuple[tuple[int, int, int, int], int, int, str]
"""Of one rank, as an index says: overlap blocks by tier, epoch, seq, and why they may be wrong."""


def answer(held: Sequence[Held]) -> OverlapColumns:
    """Return what an index says of ranks of which it knows this."""
    depths = np.array([each[0] for each in held], dtype=np.int32).reshape(len(held), 4).T.copy()
    epochs, seqs, doubts = zip(*(each[1:] for each in held), strict=True) if held else ((), (), ())
    return OverlapColumns(depths, epochs, seqs, doubts)


class FakeIndex:
    """What `Routing` asks of an index: every rank holds `depth` blocks of each prompt, or as many as `held` says."""

    def __init__(self, depth: int = 0, doubt: str = "") -> None:
        self._depth, self.doubt, self.progress = depth, doubt, ""
        self.held: dict[WorkerRank, int] = {}
        self.stale: dict[WorkerRank, str] = {}
        """The doubt in some ranks; that in all others is `doubt`."""

    def columns(self, chain: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return every rank's columns, no more than was asked for."""
        return answer([(each.overlap_blocks, 1, 1, each.stale) for each in self.overlap(range(len(chain) // 8), ranks)])

    def overlap(self, hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> list[RankView]:
        """Return the same rank by rank."""
        depths = [min(self.held.get(each, self._depth), len(hashes)) for each in ranks]
        return [
            RankView((at,) * 4, 1, 1, self.stale.get(each, self.doubt)) for each, at in zip(ranks, depths, strict=True)
        ]

    def catching_up(self) -> str:
        """Return how far it is."""
        return self.progress


def ask(_: object, ranks: Sequence[WorkerRank]) -> OverlapColumns:
    """Return what an index says of ranks that hold nothing."""
    return answer([((0, 0, 0, 0), 7, 9, "")] * len(ranks))


def view(
    *rows: Row, turn: int = 0, now_s: float = 5.0, bound: WorkerRank | None = None, output_tokens: float = 128.0
) -> Any:
    """Return a moment with these rows: a `View`, also where the product takes other views."""

    def ints(field: str) -> Any:
        return np.array([getattr(each, field) for each in rows], dtype=np.int64)

    prefill, decode = np.array([each.factors for each in rows], dtype=np.float64).reshape(len(rows), 2).T.copy()
    return View(
        now_s=now_s,
        turn=turn,
        ranks=tuple(each.rank for each in rows),
        registrations=tuple(each.registrations for each in rows),
        unfit=tuple(each.unfit for each in rows),
        trust=tuple(Trust(each.trust, each.trust_reason) for each in rows),
        overlap=np.array([each.overlap_blocks for each in rows], dtype=np.int32).reshape(len(rows), 4).T.copy(),
        predicted=ints("predicted_blocks"),
        epochs=tuple(each.epoch for each in rows),
        seqs=tuple(each.seq for each in rows),
        queued_tokens=ints("prefill_tokens_queued"),
        active_requests=ints("active_requests"),
        active_blocks=ints("active_blocks"),
        shared_blocks=ints("shared_blocks"),
        newcomer=tuple(each.newcomer for each in rows),
        bound=bound,
        trust_factor=np.array([TRUST_FACTOR[each.trust] for each in rows], dtype=np.float64),
        rates=RateColumns(prefill, decode, output_tokens),
    )


def candidate(name: str = "w0/0", **changed: Any) -> Candidate:
    """Return a candidate without costs."""
    at = rank(name)
    fields: dict[str, Any] = {
        "worker_id": at.worker_id,
        "dp_rank": at.dp_rank,
        "overlap_blocks": (0, 0, 0, 0),
        "trust": "EXACT",
        "trust_reason": "",
        "epoch": 7,
        "seq": 9,
        "terms": CostTerms(),
    }
    return Candidate(**fields | changed)


def decision(*candidates: Candidate, **changed: Any) -> Decision:
    """Return a decision for the first of the candidates."""
    fields: dict[str, Any] = {
        "decision_id": "d-1",
        "request_id": "r-1",
        "model": MODEL,
        "policy": "kv",
        "seed": 3,
        "now_s": 5.0,
        "block_size": BLOCK_SIZE,
        "isl_tokens": 81,
        "reusable_blocks": 5,
        "winner": 0,
        "runner_up": 1 if len(candidates) > 1 else None,
        "margin": candidates[1].terms.cost - candidates[0].terms.cost if len(candidates) > 1 else None,
        "candidates": candidates or (candidate(),),
    }
    return Decision(**fields | changed)
