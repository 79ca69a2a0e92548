"""Workers, requests, rows and decisions, of which a test names only what it is about."""

from typing import Any

from kv_protocol.decision import Candidate, CostTerms, Decision
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from router.core.approximate import ApproximateIndex, ApproximateLimits
from router.core.fleet import Fleet, TextDigests
from router.core.ledger import Ledger
from router.core.state import RouterState
from router.core.view import RankRow, RouteRequest, View

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
    }
    return WorkerRegistered(**fields | changed)


def state(lease_s: float = 300.0, approximate: ApproximateLimits | None = None) -> RouterState:
    """Return the state of a router that knows nobody."""
    return RouterState(Fleet(TEXT), Ledger(lease_s), ApproximateIndex(approximate))


def route(isl_tokens: int = 40, **changed: Any) -> RouteRequest:
    """Return a request whose full blocks have the hashes 100, 101, ..."""
    block_size = changed.get("block_size", BLOCK_SIZE)
    fields: dict[str, Any] = {
        "decision_id": "d-1",
        "request_id": "r-1",
        "model": MODEL,
        "isl_tokens": isl_tokens,
        "block_size": block_size,
        "sequence_hashes": tuple(range(100, 100 + isl_tokens // block_size)),
    }
    return RouteRequest(**fields | changed)


def row(name: str = "w0/0", **changed: Any) -> RankRow:
    """Return an idle, fit rank that holds nothing."""
    fields: dict[str, Any] = {
        "rank": rank(name),
        "unfit": "",
        "role": "aggregated",
        "max_seq_len": 0,
        "overlap_blocks": (0, 0, 0, 0),
        "overlap_source": "index",
        "predicted_blocks": 0,
        "epoch": 7,
        "seq": 9,
        "trust": "EXACT",
        "trust_reason": "",
        "prefill_tokens_queued": 0,
        "active_requests": 0,
        "active_blocks": 0,
        "shared_blocks": 0,
        "history_blocks": 0.0,
    }
    return RankRow(**fields | changed)


def view(*rows: RankRow, turn: int = 0, now_s: float = 5.0) -> View:
    """Return a moment with these rows."""
    return View(now_s=now_s, turn=turn, rows=rows)


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
        "margin_blocks": candidates[1].terms.cost - candidates[0].terms.cost if len(candidates) > 1 else None,
        "candidates": candidates or (candidate(),),
    }
    return Decision(**fields | changed)
