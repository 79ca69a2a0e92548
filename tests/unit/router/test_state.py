"""The fold: what each record changes, and what a decision reads of it."""

from typing import Any

import msgspec
import pytest

from indexer.embedded import OverlapColumns
from kv_protocol.fleet import WorkerDraining
from kv_protocol.hashing import HASH_SCHEME, Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.images import FixedTokens, ImageRule
from kv_protocol.journal import (
    AttemptEnded,
    FleetApplied,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    PolicyChanged,
    WorkerHeard,
)
from kv_protocol.ledger import Routed
from kv_protocol.load import LoadReport
from router.decision.eligibility import NoEligibleWorker
from router.decision.policy import CostParameters, Policy
from router.decision.state import RouterState
from router.decision.verdict import Verdict
from router.decision.view import View
from tests.unit.router.samples import BLOCK_SIZE, MODEL, Held, answer, chain, joined, rank, registered, route

HELD: Held = ((2, 2, 2, 2), 7, 9, "")


def promise(folded: RouterState, lease_id: str = "l", name: str = "w0/0", now_s: float = 0.0, **changed: Any) -> None:
    at = rank(name)
    fields: dict[str, Any] = {"blocks": chain(100, 101), "uncached_tokens": 40, "extra_blocks": 1}
    routed = Routed(lease_id=lease_id, worker_id=at.worker_id, dp_rank=at.dp_rank, **fields | changed)
    folded.apply(LedgerApplied(now_s=now_s, event=routed))


def report(instance: str = "w0-1", name: str = "w0/0", running: int = 3) -> LoadApplied:
    at = rank(name)
    told = LoadReport(
        instance=instance, iteration=1, running_requests=running, waiting_requests=4, used_blocks=5, total_blocks=9
    )
    return LoadApplied(now_s=1.0, worker_id=at.worker_id, dp_rank=at.dp_rank, report=told)


def decided(
    folded: RouterState, now_s: float = 0.0, held: Held = HELD, isl_tokens: int = 40, **request: Any
) -> Verdict:
    return folded.decide(route(isl_tokens, **request), lambda _, ranks: answer([held] * len(ranks)), now_s, 1)


def seen(folded: RouterState, now_s: float = 0.0, held: Held = HELD, isl_tokens: int = 40, **request: Any) -> View:
    return decided(folded, now_s, held, isl_tokens, **request).view()


def unfit(folded: RouterState, now_s: float = 0.0) -> tuple[str, ...]:
    return folded.model_view(MODEL, BLOCK_SIZE, HASH_SCHEME, now_s).unfit


# ---------------------------------------------------------------- the view


def test_every_rank_of_every_worker_that_serves_the_model_has_a_row_eldest_first() -> None:
    folded = joined(
        registered("w2", dp_ranks=(0, 3)), registered("w0", served_names=("other",)), registered("w1", dp_ranks=(1,))
    )
    assert [str(each) for each in seen(folded).ranks] == ["w2/0", "w2/3", "w1/1"]
    assert [str(each) for each in seen(folded, model="other").ranks] == ["w0/0"]
    with pytest.raises(NoEligibleWorker, match="none is registered"):
        seen(folded, model="unheard-of")


def test_the_index_is_asked_for_what_a_cache_can_give_and_for_these_ranks() -> None:
    asked = []

    def ask(blocks: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        asked.append((blocks, ranks))
        return answer([HELD] * len(ranks))

    joined(registered(dp_ranks=(0, 1))).decide(route(32), ask, 0.0, 1)
    assert asked == [(chain(100), (rank("w0/0"), rank("w0/1")))]


@pytest.mark.parametrize("mode", ["round-robin", "random", "power-of-two", "least-loaded", "direct"])
def test_for_a_mode_that_reads_no_overlap_the_index_is_not_asked(mode: str) -> None:
    folded = joined(registered())
    folded.apply(PolicyChanged(now_s=0.0, policy=msgspec.to_builtins(Policy(mode=mode))))
    promise(folded)

    def ask(blocks: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        raise AssertionError((blocks, ranks))

    found = folded.decide(route(pinned_worker="w0"), ask, 0.0, 1).view()
    assert (found.ranks, found.overlap.tolist()) == ((rank(),), [[0]] * 4)
    assert found.active_requests.tolist() == [int(mode in ("power-of-two", "least-loaded"))]


def test_a_worker_that_makes_something_else_of_images_differs_until_it_is_the_eldest_that_is_fit() -> None:
    images = ImageRule(placeholder="<image>", image_token_id=5, tokens=FixedTokens(576))
    folded = joined(registered(images=images), registered("w1"))
    assert [each.state for each in seen(folded).trust] == ["EXACT", "FALLBACK"]
    folded.apply(FleetApplied(now_s=1.0, event=WorkerDraining(worker_id="w0", instance="w0-1")))
    assert [each.state for each in seen(folded).trust] == ["FALLBACK", "EXACT"]


# ---------------------------------------------------------------- block size


def test_prompts_are_hashed_as_the_eldest_fit_worker_does_or_the_eldest_where_none_is_fit() -> None:
    folded = joined(registered(block_size=32), registered("w1"))
    assert folded.fleet.hashing("unheard-of", 0.0) is None
    assert (folded.fleet.hashing("m", 0.0), folded.fleet.hashing("m", 100.0)) == (Hashing(32), Hashing(32))
    folded.apply(WorkerHeard(now_s=100.0, worker_id="w1", instance="w1-1"))
    assert folded.fleet.hashing("m", 100.0) == Hashing(16)


# ---------------------------------------------------------------- turns


def test_a_turn_is_a_decision_for_the_same_model() -> None:
    folded = joined(registered(served_names=("m", "n")))
    turns = []
    for model in ("m", "n", "m", "n", "m"):
        verdict = decided(folded, model=model)
        turns.append(verdict.turn)
        folded.take(verdict)
    assert turns == [0, 0, 1, 1, 2]


# ---------------------------------------------------------------- reports


@pytest.mark.parametrize(
    "late",
    [report("w0-0"), report("w9-1", "w9/0"), report("w0-1", "w0/7")],
    ids=["former life", "unknown worker", "unknown rank"],
)
def test_a_report_of_a_former_instance_or_an_unknown_worker_or_rank_changes_nothing(late: LoadApplied) -> None:
    folded = joined(registered())
    folded.apply(report())
    before = folded.loads()
    folded.apply(late)
    assert folded.loads() == before


# ---------------------------------------------------------------- time and the rest


def test_the_log_is_folded() -> None:
    folded = joined(registered(), registered("w1"))
    folded.apply(LogConnection(now_s=1.0, heard=False))
    assert unfit(folded, 50.0)[0] == ""
    folded.apply(LogConnection(now_s=52.0, heard=True))
    folded.apply(WorkerHeard(now_s=54.0, worker_id="w1", instance="w1-1"))
    assert unfit(folded, 56.9)[0] == ""
    assert unfit(folded, 57.0)[0] == "silent for 5 s or longer"


# ---------------------------------------------------------------- the policy and what it reads


def test_the_whole_policy_is_part_of_the_state_with_its_weights_of_version_0_1() -> None:
    former = CostParameters(ttft_weight=1.0, host_weight=0.5)
    wanted = Policy(mode="least-loaded", temperature=0.25, affinity="soft", parameters=former)
    recorded, folded = msgspec.to_builtins(wanted), joined(registered())
    assert set(recorded["parameters"]) == set(CostParameters.__struct_fields__)
    assert folded.policy == Policy()
    folded.apply(PolicyChanged(now_s=0.0, policy=recorded))
    assert folded.policy == wanted


def test_a_failed_attempt_is_held_against_its_rank_for_a_time() -> None:
    folded = joined(registered(dp_ranks=(0, 1)))
    folded.apply(AttemptEnded(now_s=0.0, worker_id="w0", dp_rank=1, outcome="back_pressure", retry_after_s=2.0))
    assert [bool(each) for each in unfit(folded, 1.0)] == [False, True]
    assert [bool(each) for each in unfit(folded, 2.0)] == [False, False]
