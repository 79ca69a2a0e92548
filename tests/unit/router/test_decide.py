"""Which ranks may take a request, what a decision has, and the newest decisions by either id."""

from struct import unpack
from typing import Any

import pytest

from kv_protocol.decided import Decided, RouteRequest, best_columns
from kv_protocol.decision import Decision, Exclusion
from kv_protocol.journal import decode_record
from router.decision.eligibility import NoEligibleWorker
from router.decision.policy import Policy
from router.decision.routing import DecisionLog, Lease
from tests.support import decide as decisions
from tests.unit.router.samples import registered, route, row, state, view
from tests.unit.router.test_routing import Bench


def log(decisions_max: int, *ids: tuple[str, str]) -> DecisionLog:
    """Return a log with decisions of these (decision id, request id)."""
    kept = DecisionLog(decisions_max)
    for each in ids:
        kept.add(made(*each))
    return kept


def made(decision_id: str, request_id: str) -> Lease:
    return Bench().take(route(decision_id=decision_id, request_id=request_id))


def found(kept: DecisionLog, any_id: str) -> str | None:
    record = kept.find(any_id)
    return record.verdict.decision_id if record else None


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (log(9, ("d1", "r1"), ("d2", "r2")), {"d1": "d1", "r1": "d1", "r2": "d2", "": None, "d3": None, "r3": None}),
        (log(9, ("d1", "r"), ("d2", "r")), {"r": "d2", "d1": "d1", "d2": "d2"}),
        (log(2, ("d1", "r1"), ("d2", "r2"), ("d3", "r3")), {"d1": None, "r1": None, "d2": "d2", "r3": "d3"}),
        (log(2, ("d1", "r"), ("d2", "r"), ("d3", "x")), {"d1": None, "r": "d2"}),
        (log(2, ("d1", "r"), ("d2", "r"), ("d3", "x"), ("d4", "y")), {"r": None}),
        (log(9, ("d1", "r1"), ("d2", "d1")), {"d1": "d1", "d2": "d2"}),
    ],
    ids=["by both ids", "the request's last", "the oldest gives way", "its request stays", "and goes", "a name twice"],
)
def test_a_decision_is_found_by_its_id_and_the_last_of_a_request_by_that(
    kept: DecisionLog, expected: dict[str, str | None]
) -> None:
    assert {any_id: found(kept, any_id) for any_id in expected} == expected


def test_the_newest_come_first_and_those_of_a_request_eldest_first() -> None:
    kept = log(9, ("d1", "r"), ("d2", "r"), ("d3", "x"), ("d4", "r"))
    assert [record.verdict.decision_id for record in kept.newest(2)] == ["d4", "d3"]
    assert [record.verdict.decision_id for record in kept.newest(99)] == ["d4", "d3", "d2", "d1"]
    assert log(9).newest(5) == []
    assert [each.verdict.decision_id for each in kept.of_request("r", 2)] == ["d2", "d4"]


def test_of_a_running_request_that_gives_way_to_newer_ones_what_is_known_of_its_winner_stays() -> None:
    bench = Bench(registered("w0"), registered("w1"), holds=1)
    bench.routing.decisions = DecisionLog(1)
    taken = bench.routing.decide(route(40))

    def known() -> list[object]:
        at = taken.winner_at
        return [
            taken.brief(),
            taken.terms(at),
            taken.predicted_s(at),
            taken.promise,
            taken.ttft_s,
            taken.most_blocks,
            taken.candidate_count,
        ]

    before = known()
    bench.routing.take(taken)
    assert len(taken.rank_indices) == 2
    bench.take(route(40, decision_id="d-2"))
    assert known() == before
    assert len(taken.rank_indices) == len(taken.numbers) == 1


KV, ROUND_ROBIN = Policy(), Policy(mode="round-robin")


def decide(moment: Any, request: RouteRequest, policy: Policy, seed: int) -> Decision:
    """Return the verdict, rendered."""
    return decisions.decide(moment, request, policy, seed).decision()


# ---------------------------------------------------------------- eligibility


def test_without_an_eligible_rank_every_rank_is_listed_with_its_reason() -> None:
    ranks = view(row("w0/0", unfit="draining"), row("w0/1", role="prefill"), row("w1/0", max_seq_len=9))
    with pytest.raises(NoEligibleWorker) as raised:
        decide(ranks, route(40), KV, 1)
    assert [(each.worker_id, each.dp_rank) for each in raised.value.exclusions] == [("w0", 0), ("w0", 1), ("w1", 0)]
    assert str(raised.value) == (
        "no worker for model 'm': w0/0: draining; w0/1: role prefill: whole is asked of workers that are aggregated; "
        "w1/0: max_seq_len: 40 + 1 tokens, at most 9"
    )


def test_a_refusal_names_8_ranks_and_80_characters_of_a_pin() -> None:
    ranks = view(*(row(f"w{at}/0") for at in range(20)))
    with pytest.raises(NoEligibleWorker) as raised:
        decide(ranks, route(pinned_worker="x" * 30_000), KV, 1)
    assert len(raised.value.exclusions) == 20
    assert {each.reason for each in raised.value.exclusions} == {f"pinned to {'x' * 80}..."}
    assert str(raised.value).count("pinned to") == 8
    assert str(raised.value).endswith("... and 12 more")


def test_an_empty_fleet_is_named_in_the_error() -> None:
    with pytest.raises(NoEligibleWorker, match=r"^no worker for model 'm': none is registered$"):
        decide(view(), route(), KV, 1)


# ---------------------------------------------------------------- the decision


def test_a_record_has_the_costs_of_all_candidates_the_best_ones_with_their_terms() -> None:
    ranks = view(*(row(f"w{at}/0", prefill_tokens_queued=1000 * (12 - at)) for at in range(12)))
    made = decisions.decide(ranks, route(), KV, 1)
    record = decode_record(made.journal_record(0))
    assert isinstance(record, Decided)
    assert best_columns(record.best) == (11, 10, 9, 8, 7, 6, 5, 4)
    assert unpack("<4f", record.costs) == pytest.approx([made.terms(at).cost for at in range(4)])


def test_a_decision_has_all_that_was_weighed() -> None:
    doubted: dict[str, Any] = {"trust": "DEGRADED", "trust_reason": "behind", "epoch": 3, "seq": 4}
    busy = row("w0/0", active_blocks=9)
    holder = row("w2/1", overlap_blocks=(1, 2, 2, 2), predicted_blocks=2, **doubted)
    request = route(40, decision_id="d-7", request_id="r-7")
    decided = decide(view(busy, row("w1/0", unfit="draining"), holder, now_s=77.5), request, KV, 99)
    assert (decided.decision_id, decided.request_id, decided.model, decided.policy) == ("d-7", "r-7", "m", "kv")
    assert (decided.seed, decided.now_s, decided.block_size) == (99, 77.5, 16)
    assert (decided.isl_tokens, decided.reusable_blocks) == (40, 2)
    assert (decided.winner, decided.runner_up) == (1, 0)
    winner = decided.chosen
    assert (winner.worker_id, winner.dp_rank, winner.epoch, winner.seq) == ("w2", 1, 3, 4)
    assert (winner.trust, winner.trust_reason, winner.overlap_blocks) == ("DEGRADED", "behind", (1, 2, 2, 2))
    assert (winner.overlap_source, winner.predicted_blocks, winner.expected_blocks) == ("index", 2, 2)
    assert decided.margin == decided.candidates[0].terms.cost - winner.terms.cost
    alone = decide(view(busy, holder, now_s=77.5), request, KV, 99)
    assert [each.terms for each in decided.candidates] == [each.terms for each in alone.candidates]
    assert [each.terms.overlap_credit_blocks for each in decided.candidates] == [0.0, 1.0]
    assert (decided.reason, decided.regret_blocks, decided.action) == ("overlap", 0, "admit")
    assert decided.excluded == (Exclusion(worker_id="w1", dp_rank=0, reason="draining"),)


@pytest.mark.parametrize(("isl_tokens", "reusable"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_last_token_is_always_computed(isl_tokens: int, reusable: int) -> None:
    request = route(isl_tokens)
    assert request.reusable_blocks == reusable
    assert decide(view(row()), request, KV, 1).reusable_blocks == reusable


def test_no_more_of_a_prompt_is_promised_as_cached_than_a_cache_can_give() -> None:
    verdict = decisions.decide(view(row("w0/0", predicted_blocks=9)), route(32), KV, 1)
    assert (verdict.expected_blocks, verdict.promise.uncached_tokens) == (9, 16)


def test_what_another_state_decided_is_not_taken() -> None:
    verdict = decisions.decide(view(row("w0/0")), route(32), KV, 1)
    with pytest.raises(ValueError, match="of another core"):
        state().take(verdict)
