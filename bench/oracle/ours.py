"""The flips of our decision: the grid's cells as views, decided as the router does, without what the peer lacks.

Off: history (weight 0), spill gate, predict on route, newcomer slice, affinity; both ranks are EXACT. What the ranks
hold is cut to what a cache could give of the prompt, as the index's answers are.
"""

import struct

import numpy as np

from bench.oracle.grid import BLOCK_SIZE, TAINT, Flip, Held, OracleCell, Outcome, Weights, flip
from kv_protocol.decided import RouteRequest
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from router.decision.decide import decide
from router.decision.policy import CostParameters, Policy
from router.decision.view import Ints, View
from router.fleet.trust import EXACT

_MODEL = "m"
_SEED = 1


def policy_of(weights: Weights) -> Policy:
    """Return the policy that weighs as the peer does with these weights."""
    parameters = CostParameters(
        overlap_credit=weights.overlap_credit,
        overlap_credit_decay=weights.decay,
        host_weight=weights.host,
        disk_weight=weights.disk,
        prefill_scale=weights.prefill_scale,
        request_weight=weights.request,
        history_weight=0.0,
    )
    return Policy(mode="kv-blocks", parameters=parameters, predict_on_route=False, spill_tokens=0, newcomers=False)


def our_flip(cell: OracleCell) -> Flip:
    """Return where our choice flips."""
    return flip(lambda load: our_outcome(cell, load))


def our_outcome(cell: OracleCell, load_blocks: int) -> Outcome:
    """Return the winner at one extra load, and both costs; in a tie both ranks may win."""
    view, request = _view(cell, load_blocks), _request(cell)
    verdict = decide(view, request, policy_of(cell.weights), _SEED)
    is_tie = verdict.margin == 0.0
    first_won = verdict.winner == view.ranks[0]
    first, second = (each.terms.cost for each in verdict.decision().candidates)
    return Outcome(first_won or is_tie, is_tie or not first_won, first, second)


def _request(cell: OracleCell) -> RouteRequest:
    prompt = cell.prompt
    return RouteRequest(
        decision_id="d",
        request_id="r",
        model=_MODEL,
        isl_tokens=prompt.tokens,
        block_size=BLOCK_SIZE,
        sequence_hashes=struct.pack(f"<{prompt.blocks}Q", *range(1, prompt.blocks + 1)),
        preferred_taints=((TAINT, prompt.preferred),) if prompt.preferred else (),
    )


def _view(cell: OracleCell, load_blocks: int) -> View:
    prompt, load = cell.prompt, cell.load
    reusable = max(0, prompt.tokens - 1) // BLOCK_SIZE
    blocks = (load_blocks, load.second_blocks)
    tails = (load.tail if load_blocks else 0, 0)
    tokens = [each * BLOCK_SIZE + tail for each, tail in zip(blocks, tails, strict=True)]
    return View(
        now_s=0.0,
        turn=0,
        ranks=(WorkerRank("first", 0), WorkerRank("second", 0)),
        registrations=(_worker("first", (TAINT,)), _worker("second", ())),
        unfit=("", ""),
        trust=(EXACT, EXACT),
        overlap=np.array([_depths(each, reusable) for each in (prompt.first, prompt.second)], dtype=np.int32).T,
        predicted=_ints(0, 0),
        epochs=(1, 1),
        seqs=(1, 1),
        queued_tokens=_ints(*(tokens if load.kind == "prefill" else (0, 0))),
        active_requests=_ints(*(int(each > 0) for each in blocks)),
        active_blocks=_ints(*(-(-each // BLOCK_SIZE) for each in tokens)),
        shared_blocks=_ints(min(load.shared, load_blocks), 0),
        history_blocks=np.zeros(2),
        newcomer=(False, False),
    )


def _depths(held: Held, reusable: int) -> list[int]:
    return [min(depth, reusable) for depth in held.depths]


def _ints(first: int, second: int) -> Ints:
    return np.array([first, second], dtype=np.int64)


def _worker(worker_id: str, taints: tuple[str, ...]) -> WorkerRegistered:
    return WorkerRegistered(
        worker_id=worker_id,
        instance="i",
        model=_MODEL,
        served_names=(_MODEL,),
        base_url="http://127.0.0.1:1",
        block_size=BLOCK_SIZE,
        hash_scheme=HASH_SCHEME,
        tokenizer_digest="t",
        template_digest="t",
        canary=canary(BLOCK_SIZE),
        taints=taints,
    )
