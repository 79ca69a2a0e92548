"""A decision in words: they say what the numbers say."""

import re

import pytest

from kv_protocol.decision import CostTerms, Exclusion
from router.decision.policy import Policy
from router.decision.report import (
    DecisionReport,
    Misses,
    Outcome,
    RequestReport,
    explanation,
    misses,
    report_lines,
    sentence,
    table,
)
from tests.support.decide import decide
from tests.unit.router.samples import Row, candidate, decision, route, row, view

NEAR = CostTerms(cost=62.0, wait_ms=2.0, prefill_ms=10.0, decode_ms=14.0, overlap_credit_blocks=4.0)
FAR = CostTerms(cost=150.0, prefill_ms=34.0, decode_ms=14.0)
IN_MS = decision(
    candidate("w1/0", overlap_blocks=(4, 4, 4, 4), terms=NEAR, predicted_ttft_s=0.03, predicted_itl_s=0.01),
    candidate("w0/0", terms=FAR),
    reason="overlap",
    excluded=(Exclusion(worker_id="w2", dp_rank=1, reason="draining"),),
)
KV = Policy()
OK = Outcome(outcome="ok", cached_tokens=64, ttft_s=0.041, duration_s=0.5, output_tokens=8)


def test_the_sentence_says_which_term_decided_what_the_next_costs_and_that_the_prediction_held() -> None:
    assert sentence(RequestReport(decision=IN_MS, outcome=OK)) == (
        "Request r-1, 81 tokens for m, went to w1/0 because its prefill counts 96.0 ms less than at w0/0, "
        "the next best; "
        "w0/0 would have cost 88.0 ms more in all, 150.0 against 62.0 ms; "
        "the prediction held, 64 cached tokens predicted, 64 reported."
    )


def test_a_weight_below_1_is_read_from_a_rank_that_has_a_time_to_the_first_token() -> None:
    free, far = CostTerms(cost=14.0, decode_ms=14.0), CostTerms(cost=31.0, prefill_ms=34.0, decode_ms=14.0)
    told = decision(candidate("w1/0", terms=free), candidate("w0/0", terms=far), reason="overlap")
    assert "its prefill counts 17.0 ms less than at w0/0" in sentence(RequestReport(decision=told))


def test_costs_of_a_users_mode_have_no_unit_and_no_terms() -> None:
    rows = [candidate(f"w{at}/0", terms=CostTerms(cost=cost)) for at, cost in enumerate((3.0, 9.0))]
    told = decision(*rows, reason="user", cost_unit="own")
    assert "w1/0 would have cost 6.0 more in all, 9.0 against 3.0;" in sentence(RequestReport(decision=told))
    assert table(told)[0].split() == ["rank", "cost", "gpu", "blocks", "expected", "blocks", "trust"]


def test_where_the_terms_are_the_same_the_constraints_decided() -> None:
    costs = CostTerms(cost=3.0, decode_ms=3.0), CostTerms(cost=6.0, decode_ms=3.0, constraint_multiplier=2.0)
    told = decision(candidate("w0/0", terms=costs[0]), candidate("w1/0", terms=costs[1]), reason="load")
    assert "because the factor for its constraints is smaller than at w1/0" in sentence(RequestReport(decision=told))


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (None, "its outcome is not known."),
        (Outcome(outcome="ok"), "there is no count of cached tokens to compare the prediction with."),
        (Outcome(outcome="ok", cached_tokens=0), "the prediction was 64 tokens too high, 64 cached tokens predicted"),
        (Outcome(outcome="ok", cached_tokens=80), "the prediction was 16 tokens too low, 64 cached tokens predicted"),
        (Outcome(outcome="ok", cached_tokens=79), "the prediction held, 64 cached tokens predicted, 79 reported."),
        (Outcome(outcome="failed", error="failed body cut"), "it ended as failed, failed body cut."),
    ],
)
def test_the_sentence_ends_with_what_came_of_it(outcome: Outcome | None, words: str) -> None:
    assert words in sentence(RequestReport(decision=IN_MS, outcome=outcome))


@pytest.mark.parametrize(
    ("reason", "margin", "words"),
    [
        ("turn", None, "because it was this rank's turn;"),
        ("pinned", None, "because the caller named it;"),
        ("draw", None, "because seed 3 drew it;"),
        ("load", None, "because it had the fewest active requests;"),
        ("draw", 0.0, "because seed 3 broke the tie with w1/0;"),
        ("draw", -2.0, "passed over w1/0; w1/0 would have cost 2.0 ms less in all"),
    ],
)
def test_where_costs_did_not_decide_the_sentence_says_what_did(reason: str, margin: float | None, words: str) -> None:
    costs = CostTerms(cost=3.0), CostTerms(cost=3.0 + (margin or 0.0))
    rows = [candidate(f"w{at}/0", terms=terms, is_weighed=margin is not None) for at, terms in enumerate(costs)]
    told = decision(*rows, reason=reason, margin=margin, runner_up=None if margin is None else 1)
    assert words in sentence(RequestReport(decision=told))


def test_a_single_candidate_needs_no_cause() -> None:
    assert "because there was no other candidate;" in sentence(RequestReport(decision=decision(reason="only")))


def test_the_table_has_every_candidate_with_every_term_and_its_unit_and_who_was_refused() -> None:
    header, chosen, other, legend, refused = table(IN_MS)
    names = "rank cost ms wait ms prefill ms decode ms credit blocks"
    assert header.split() == f"{names} gpu blocks expected blocks ttft ms itl ms trust".split()
    assert " ".join(chosen.split()) == "* w1/0 62.0 8.0 40.0 14.0 4.0 4 4 30.0 10.0 EXACT"
    assert " ".join(other.split()) == "w0/0 150.0 0.0 136.0 14.0 0.0 0 0 - - EXACT"
    assert len(header) == len(chosen) == len(other)
    counted = "wait, prefill counted 4 times"
    assert legend == f"cost: the sum of the terms behind it ({counted}); the lowest wins"
    assert refused == "w2/1  refused: draining"


def explained(*rows: Row, policy: Policy = KV, seed: int = 1, isl_tokens: int = 81) -> list[str]:
    """Return the lines about a decision for the first row or another."""
    return explanation(decide(view(*rows), route(isl_tokens), policy, seed).decision()).splitlines()


def test_an_explanation_is_why_and_the_table() -> None:
    assert explanation(IN_MS).splitlines() == [
        (
            "Request r-1, 81 tokens for m, went to w1/0 because its prefill counts 96.0 ms less than at w0/0, "
            "the next best; w0/0 would have cost 88.0 ms more in all, 150.0 against 62.0 ms."
        ),
        *table(IN_MS),
    ]
    asked = explanation(decision(phase="prefill"), is_hypothetical=True)
    assert asked.startswith("Request r-1 (prefill), 81 tokens for m, would go to w0/0 because ")
    assert "went" not in asked


@pytest.mark.parametrize(
    ("winner", "runner_up", "cause"),
    [
        # holds a block more and is far less busy: it is the work that decides
        (row("w0/0", overlap_blocks=(1, 1, 1, 1)), row("w1/0", active_blocks=500), "its decode counts 35.5 ms"),
        # equal on the GPU, but the host tier has more: the runner-up is not busier
        (
            row("w0/0", overlap_blocks=(1, 5, 5, 5)),
            row("w1/0", overlap_blocks=(1, 1, 1, 1)),
            "its prefill counts 4.4 ms",
        ),
        # the same blocks, of which the runner-up's are half believed
        (
            row("w0/0", overlap_blocks=(4, 4, 4, 4)),
            row("w1/0", overlap_blocks=(4, 4, 4, 4), trust="DEGRADED", trust_reason="behind"),
            "its prefill counts 2.9 ms",
        ),
        # nothing is held anywhere
        (row("w0/0"), row("w1/0", prefill_tokens_queued=64), "its wait counts 5.8 ms"),
        (row("w0/0"), row("w1/0", active_requests=2), "its slowdown counts 4.1 ms"),
    ],
)
def test_the_cause_is_the_term_that_makes_most_of_the_difference(winner: Row, runner_up: Row, cause: str) -> None:
    assert f" went to w0/0 because {cause} less than at w1/0, the next best;" in explained(runner_up, winner)[0]


def test_candidates_are_listed_cheapest_first() -> None:
    told = explained(*[row(f"w{at}/0", active_blocks=blocks) for at, blocks in enumerate((300, 100, 200))])
    assert [re.findall(r"(w\d)/0", line) for line in told[2:5]] == [["w1"], ["w2"], ["w0"]]


@pytest.mark.parametrize(("trust", "reason"), [("DEGRADED", "behind"), ("FALLBACK", "no KV events heard; approximate")])
def test_a_rank_that_is_not_fully_trusted_is_named_with_its_reason(trust: str, reason: str) -> None:
    told = explained(row("w0/0", trust=trust, trust_reason=reason), row("w1/0"))
    assert told[-1] == f"w0/0  {trust}: {reason}"


def test_what_befalls_a_candidate_is_said_behind_the_table() -> None:
    told = explained(row("w0/0", overlap_blocks=(4, 4, 4, 4), total_kv_blocks=8, active_blocks=5))
    assert told[-1] == "w0/0  lacks room, and will evict 3 blocks before it computes the prompt"


def test_the_factor_of_constraints_is_a_column_and_a_word_of_the_legend() -> None:
    moment, request = view(row("w0/0", taints=("slow",)), row("w1/0")), route(81, preferred_taints=(("slow", -9.0),))
    text = explanation(decide(moment, request, Policy(), 1).decision())
    assert " multiplier " in text
    assert "2.72" in text
    assert text.splitlines()[-1].endswith(", multiplied; the lowest wins")
    assert "multipli" not in "".join(explained(row("w0/0", taints=("slow",)), row("w1/0")))


def test_it_says_that_the_targets_are_not_met() -> None:
    moment = view(row("w0/0"), row("w1/0", prefill_tokens_queued=9000))
    policy = Policy(mode="predicted-ttft", itl_target_s=0.005, unmet="queue")
    text = explanation(decide(moment, route(81), policy, 1).decision())
    assert "because it is predicted to answer first" in text
    assert text.endswith("\nit is not predicted to meet its targets there: queue")


def test_a_choice_that_weighed_nothing_says_how_it_was_made_and_has_no_costs() -> None:
    told = explained(row("w0/0", active_blocks=90), row("w1/0"), policy=Policy(mode="round-robin"))
    assert told[0].endswith(" went to w0/0 because it was this rank's turn.")
    assert told[1].split() == ["rank", "gpu", "blocks", "expected", "blocks", "trust"]
    told = explained(row("w0/0"), row("w1/0"), policy=Policy(mode="random"), seed=7, isl_tokens=0)
    assert "r-1, a prompt that was not encoded, for m, went to" in told[0]
    assert told[0].endswith("because seed 7 drew it.")


@pytest.mark.parametrize(
    ("cached_tokens", "words"),
    [
        (48, "64 predicted, 48 reported, 16 fewer than predicted"),
        (79, "64 predicted, 79 reported, 15 more than predicted"),
        (None, "64 predicted, not reported"),
    ],
)
def test_a_report_says_how_far_a_prediction_is_off(cached_tokens: int | None, words: str) -> None:
    report = RequestReport(decision=IN_MS, outcome=Outcome(outcome="ok", cached_tokens=cached_tokens))
    assert f"cached tokens   {words}" in report_lines(report)


def test_a_report_has_the_outcome_beside_the_prediction_and_the_requests_other_decisions() -> None:
    first = RequestReport(decision=IN_MS, outcome=Outcome(outcome="failed", error="failed connect refused"))
    report = RequestReport(decision=IN_MS, outcome=OK, decisions=(first, RequestReport(decision=IN_MS, outcome=OK)))
    lines = report_lines(report)
    assert lines[-8:] == [
        "outcome         ok",
        "cached tokens   64 predicted, 64 reported",
        "first token     41.0 ms (11.0 ms later than predicted)",
        "whole answer    500.0 ms, 8 tokens",
        "",
        "all 2 decisions of request r-1, eldest first:",
        "  d-1: w1/0, chosen by overlap: failed, failed connect refused",
        "  d-1: w1/0, chosen by overlap: ok",
    ]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Misses(64, 0.041)),
        ({"ttft_target_s": 0.03}, Misses(64, 0.011)),
        ({"phase": "decode"}, Misses(None, 0.041)),
        ({"isl_tokens": 0}, Misses(None, 0.041)),
    ],
)
def test_a_miss_is_above_0_where_the_prediction_was_too_good(changed: dict[str, object], expected: Misses) -> None:
    told = decision(candidate(overlap_blocks=(4, 4, 4, 4), predicted_ttft_s=0.0), **changed)
    found = misses(told, Outcome(outcome="ok", cached_tokens=0, ttft_s=0.041))
    assert found.cached_tokens == expected.cached_tokens
    assert found.ttft_s == pytest.approx(expected.ttft_s)


def test_a_target_counts_from_the_first_decision_of_the_request_and_a_prediction_from_its_own() -> None:
    ok = Outcome(outcome="ok", ttft_s=0.5)
    retried = decision(candidate(predicted_ttft_s=0.1), ttft_target_s=1.0, now_s=13.0)
    assert misses(retried, ok, 10.0).ttft_s == pytest.approx(2.5)
    untargeted = decision(candidate(predicted_ttft_s=0.1), now_s=13.0)
    assert misses(untargeted, ok, 10.0).ttft_s == pytest.approx(0.4)
    first = decision(candidate(predicted_ttft_s=0.1), ttft_target_s=1.0, now_s=10.0)
    decisions = (DecisionReport(decision=first), DecisionReport(decision=retried, outcome=ok))
    lines = report_lines(RequestReport(decision=retried, outcome=ok, decisions=decisions))
    assert "first token     500.0 ms (2500.0 ms later than its target of 1 s)" in lines


def test_without_an_outcome_or_anything_to_compare_there_is_no_miss() -> None:
    assert misses(IN_MS, None) == Misses()
    assert misses(decision(candidate()), Outcome(outcome="failed")) == Misses()
