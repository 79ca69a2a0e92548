from typing import Any

import msgspec
import pytest

from kv_protocol.decision import Candidate, CostTerms, Decision, Exclusion
from kv_protocol.errors import LimitExceeded

CANDIDATES = tuple(
    Candidate(
        worker_id=f"w-{index}",
        dp_rank=index,
        overlap_blocks=(1, 2, 3, 4),
        trust="EXACT",
        trust_reason="",
        epoch=2**64 - 1,
        seq=index,
        terms=CostTerms(cost=float(index)),
    )
    for index in range(3)
)
FIELDS: dict[str, Any] = {
    "decision_id": "d",
    "request_id": "r",
    "model": "m",
    "policy": "kv",
    "seed": 2**64 - 1,
    "now_s": 1.25,
    "block_size": 16,
    "isl_tokens": 100,
    "reusable_blocks": 6,
    "winner": 1,
    "runner_up": 0,
    "margin": 0.1,
    "candidates": CANDIDATES,
    "excluded": (Exclusion(worker_id="w-9", dp_rank=0, reason="draining"),),
}


@pytest.mark.parametrize("winner", [0, 1, 2])
def test_the_winner_is_the_candidate_that_is_chosen(winner: int) -> None:
    assert Decision(**FIELDS | {"winner": winner}).chosen is CANDIDATES[winner]


@pytest.mark.parametrize("field", ["winner", "runner_up"])
@pytest.mark.parametrize("index", [-1, 3])
def test_a_rank_that_was_no_candidate_is_neither_winner_nor_runner_up(field: str, index: int) -> None:
    with pytest.raises(LimitExceeded, match=f"^{field}: found {index}, allowed the index of one of 3 candidates"):
        Decision(**FIELDS | {field: index})


def test_a_decision_among_no_candidates_cannot_exist() -> None:
    with pytest.raises(LimitExceeded, match=r"^winner: found 0"):
        Decision(**FIELDS | {"candidates": (), "winner": 0, "runner_up": None})


@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json], ids=["msgpack", "json"])
def test_a_decision_survives_encoding_bit_for_bit(codec: Any) -> None:
    decision = Decision(**FIELDS)
    assert codec.decode(codec.encode(decision), type=Decision) == decision
