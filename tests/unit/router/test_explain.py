"""The words say what the numbers say."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_protocol.decision import CostTerms, Exclusion
from router.decision.explain import explain
from router.decision.policy import CostParameters, Policy
from router.decision.view import RateColumns
from tests.support.decide import decide
from tests.unit.router.samples import Row, candidate, decision, rank, route, row, view

PLAIN = Policy(parameters=CostParameters(prefill_scale=1.0, history_weight=0.5))
"""Prefill and decode count alike, so that the costs are blocks; and history counts."""


def explained(*rows: Row, policy: Policy | None = None, seed: int = 1, isl_tokens: int = 81) -> str:
    return explain(decide(view(*rows), route(isl_tokens), policy or PLAIN, seed).decision())


def test_it_names_the_winner_its_blocks_every_cost_and_the_margin() -> None:
    rows = (
        row("w0/0", overlap_blocks=(0, 0, 0, 0), active_blocks=2),
        row("w1/2", overlap_blocks=(4, 4, 4, 4), active_blocks=3, history_blocks=2.0),
        row("w2/0", unfit="draining"),
    )
    assert explained(*rows) == (
        "Request r-1: 81 tokens for m, policy kv. It went to w1/2, which holds 4 of 5 reusable blocks (80%).\n"
        "  w1/2: cost 11.1 = prefill 1.1 + decode 9.0 + history 1.0 blocks, after 4.0 blocks credited\n"
        "  w0/0: cost 13.1 = prefill 5.1 + decode 8.0 blocks, after 0.0 blocks credited\n"
        "  w2/0: not eligible, draining\n"
        "The runner-up, w0/0, costs 2.0 blocks more: mostly prefill, +4.0, its credit 0.0 against 4.0."
    )


def test_a_cost_in_ms_is_told_by_its_terms_and_by_the_one_that_decided() -> None:
    rows = (row("w0/0", overlap_blocks=(4, 4, 4, 4), active_requests=9), row("w1/2"))
    factors = np.ones(len(rows))
    moment = view(*rows)._replace(rates=RateColumns(factors, factors, output_tokens=10.0))
    text = explain(decide(moment, route(81), Policy.current(), 1).decision())
    assert text == (
        "Request r-1: 81 tokens for m, policy kv. It went to w1/2, which holds 0 of 5 reusable blocks (0%).\n"
        "  w1/2: cost 62.8 = 4.0 x (prefill 1.8 + lateness 0.0) + decode 55.4 ms, with 0.0 blocks credited\n"
        "  w0/0: cost 63.0 = 4.0 x (prefill 0.4 + lateness 0.0) + stall 3.5 + decode 56.5 + slowdown 1.4 ms"
        ", with 4.0 blocks credited\n"
        "The runner-up, w0/0, costs 0.2 ms more: mostly stall, +3.5 ms."
    )


def test_a_rank_that_lacks_room_is_said_to_lose_what_it_holds() -> None:
    moment = view(row("w0/0", overlap_blocks=(4, 4, 4, 4), total_kv_blocks=8, active_blocks=5))
    moment = moment._replace(rates=RateColumns(np.ones(1), np.ones(1), 10.0))
    text = explain(decide(moment, route(81), Policy.current(), 1).decision())
    assert "1.0 blocks credited; it lacks room, and will evict 3 more before it computes the prompt" in text


def test_candidates_are_listed_cheapest_first() -> None:
    text = explained(*[row(f"w{at}/0", active_blocks=blocks) for at, blocks in enumerate((30, 10, 20))])
    assert re.findall(r"^  (w\d)/0: cost ([\d.]+)", text, re.MULTILINE) == [
        ("w1", "21.1"),
        ("w2", "31.1"),
        ("w0", "41.1"),
    ]


@pytest.mark.parametrize(
    ("winner", "runner_up", "cause"),
    [
        # holds a block more and is far less busy: it is the work that decides
        (
            row("w0/0", overlap_blocks=(1, 1, 1, 1)),
            row("w1/0", active_blocks=50),
            "costs 51.0 blocks more: mostly decode, +50.0.",
        ),
        # equal on the GPU, but the host tier has more: the runner-up is not busier
        (
            row("w0/0", overlap_blocks=(1, 5, 5, 5)),
            row("w1/0", overlap_blocks=(1, 1, 1, 1)),
            "costs 3.0 blocks more: mostly prefill, +3.0, its credit 1.0 against 4.0.",
        ),
        # the same blocks, of which the runner-up's are half believed
        (
            row("w0/0", overlap_blocks=(4, 4, 4, 4)),
            row("w1/0", overlap_blocks=(4, 4, 4, 4), trust="DEGRADED", trust_reason="behind"),
            "costs 2.0 blocks more: mostly prefill, +2.0, its credit 2.0 against 4.0.",
        ),
        # nothing is held anywhere
        (
            row("w0/0"),
            row("w1/0", history_blocks=8.0),
            "costs 4.0 blocks more: mostly history, +4.0.",
        ),
        # the same blocks, of which the runner-up's are only on their way
        (
            row("w0/0", overlap_blocks=(4, 4, 4, 4)),
            row("w1/0", predicted_blocks=4, prefill_tokens_queued=64),
            "costs 4.0 blocks more: mostly prefill, +4.0, its credit 4.0 against 4.0.",
        ),
        (
            row("w0/0"),
            row("w1/0", prefill_tokens_queued=64),
            "costs 4.0 blocks more: mostly prefill, +4.0, its credit 0.0 against 0.0.",
        ),
    ],
)
def test_the_cause_is_the_term_that_makes_most_of_the_difference(winner: Row, runner_up: Row, cause: str) -> None:
    assert explained(runner_up, winner).endswith(cause)


def test_active_requests_are_a_cause_too() -> None:
    weighed = Policy(parameters=msgspec.structs.replace(PLAIN.parameters, request_weight=3.0))
    text = explained(row("w0/0"), row("w1/0", active_requests=2), policy=weighed)
    assert text.endswith("The runner-up, w1/0, costs 6.0 blocks more: mostly request, +6.0.")


def test_a_tie_names_the_seed() -> None:
    text = explained(row("w0/0"), row("w1/0"), seed=42)
    assert re.search(r"^w[01]/0 costs the same; seed 42 broke the tie\.$", text, re.MULTILINE)


def test_one_alone_has_no_runner_up() -> None:
    assert explained(row("w0/0")).endswith("\nThere was no other candidate.")


def test_a_draw_that_passed_the_cheapest_over_is_told_as_such() -> None:
    decided = decision(
        candidate("w0/0", terms=CostTerms(cost=9.5)),
        candidate("w1/0", terms=CostTerms(cost=7.0)),
        reason="draw",
    )
    assert explain(decided).endswith("w1/0 was cheaper by 2.5 blocks; the temperature's draw passed it over.")


def test_in_turn_the_costs_had_no_say() -> None:
    text = explained(row("w0/0", active_blocks=90), row("w1/0"), policy=Policy(mode="round-robin"))
    assert "policy round-robin. It went to w0/0.\n  w0/0 was a candidate\n  w1/0 was a candidate\n" in text
    assert text.endswith("It was this rank's turn; costs had no say.")


@pytest.mark.parametrize(("trust", "reason"), [("DEGRADED", "behind"), ("FALLBACK", "no KV events heard")])
def test_a_rank_that_is_not_fully_trusted_is_named_with_its_reason(trust: str, reason: str) -> None:
    text = explained(row("w0/0", trust=trust, trust_reason=reason), row("w1/0"))
    assert f" blocks credited; {trust} ({reason})" in text
    assert text.count("EXACT") == 0


def test_it_says_where_the_overlap_of_a_rank_without_events_comes_from() -> None:
    trust: dict[str, Any] = {"trust": "FALLBACK", "trust_reason": "no KV events heard; approximate"}
    text = explained(row("w0/0", overlap_blocks=(4, 4, 4, 4), **trust))
    assert "It went to w0/0, which by what was routed to it holds 4 of 5 reusable blocks (80%).\n" in text
    assert " blocks, after 4.0 blocks credited; FALLBACK (no KV events heard; approximate)\n" in text


def test_it_says_what_is_on_its_way_beyond_what_is_held() -> None:
    rows = (
        row("w0/0", overlap_blocks=(1, 1, 1, 1), predicted_blocks=4),
        row("w1/0", overlap_blocks=(2, 2, 2, 2), predicted_blocks=2),
    )
    text = explained(*rows)
    assert "It went to w0/0, which holds 1 of 5 reusable blocks (20%); 3 more are on their way there.\n" in text
    assert "\n  w0/0: cost 7.1 = prefill 1.1 + decode 6.0" in text
    assert " blocks credited; 3 more are on their way there\n  w1/0: " in text
    assert text.count("on their way") == 2, "of w1/0 nothing is on its way that it does not hold"


def test_a_prompt_with_nothing_to_reuse_divides_by_nothing() -> None:
    assert "which holds 0 of 0 reusable blocks (nothing to reuse)." in explained(row("w0/0"), isl_tokens=16)


def test_every_excluded_rank_is_named() -> None:
    excluded = tuple(Exclusion(worker_id=f"w{at}", dp_rank=at, reason=f"reason {at}") for at in (1, 2))
    text = explain(decision(excluded=excluded))
    assert "  w1/1: not eligible, reason 1\n  w2/2: not eligible, reason 2\n" in text


def test_it_says_that_the_spill_gate_took_the_credit() -> None:
    policy = Policy(parameters=PLAIN.parameters, spill_tokens=100)
    text = explained(row("w0/0", prefill_tokens_queued=900), row("w1/0"), policy=policy)
    assert "  w0/0: cost 67.3 = prefill 61.3 + " in text
    assert text.count("; no credit, since too much is queued there\n") == 1


def test_it_says_that_the_session_is_at_home_there_and_what_that_costs() -> None:
    moment = view(row("w0/0", active_blocks=5), row("w1/0"), bound=rank("w0/0"))
    text = explain(decide(moment, route(81), Policy(affinity="hard"), 1).decision())
    assert text.endswith("The request's session is at home there.\nw1/0 would have cost 5.0 blocks less.")


def test_it_says_what_the_constraints_made_of_the_cost() -> None:
    text = explained(row("w0/0", taints=("slow",)), row("w1/0"))
    assert "times" not in text
    moment, request = view(row("w0/0", taints=("slow",)), row("w1/0")), route(81, preferred_taints=(("slow", -9.0),))
    assert ", times 2.72 for its constraints" in explain(decide(moment, request, Policy(), 1).decision())


def test_it_says_what_was_predicted_and_that_the_targets_are_not_met() -> None:
    moment = view(row("w0/0", ttft_s=0.25, itl_s=0.0125), row("w1/0", ttft_s=0.5, itl_s=0.01), is_forecast=True)
    policy = Policy(mode="predicted-ttft", itl_target_s=0.005, unmet="queue")
    text = explain(decide(moment, route(81), policy, 1).decision())
    assert "; predicted 250 ms to the first token and 12.5 ms between tokens\n" in text
    assert "It is predicted to answer first.\n" in text
    assert text.endswith("It is not predicted to meet its targets there: queue.")


def test_a_choice_that_weighed_nothing_says_how_it_was_made() -> None:
    both = (row("w0/0"), row("w1/0"))
    assert explained(*both, policy=Policy(mode="random"), seed=7).endswith("\nSeed 7 drew it; costs had no say.")
    fewest = "It had the fewest active requests of those that were compared; costs had no say."
    uneven = (row("w0/0", active_requests=3), row("w1/0"))
    assert explained(*uneven, policy=Policy(mode="least-loaded")).endswith(f"\n{fewest}")
    assert "a prompt that was not encoded, for m" in explained(*both, policy=Policy(mode="random"), isl_tokens=0)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("whole", "It would go to w0/0"),
        ("prefill", "Its prompt would go to w0/0"),
        ("decode", "What another worker prefilled would go to w0/0"),
        ("alone", "It would go, prompt and all, to w0/0"),
    ],
)
def test_of_a_decision_that_was_only_asked_for_it_says_where_the_request_would_go(phase: str, words: str) -> None:
    text = explain(decision(phase=phase), is_hypothetical=True)
    assert words in text
    assert "went" not in text
