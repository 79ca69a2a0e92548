"""What each mode chooses, what it reads, and what sessions and newcomers make of it."""

from collections import Counter
from typing import Any

import pytest

from kv_protocol.decided import RouteRequest
from kv_protocol.splitmix import splitmix64
from router.decision.eligibility import WorkerNotNamed
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.verdict import SHARE_IS_SPENT, Verdict
from tests.support.amount import examples
from tests.support.decide import decide
from tests.unit.router.samples import Row, rank, route, row, view

SEEDS = examples(4000)
HELD = (2, 2, 2, 2)


def chosen(moment: Any, seed: int = 1, request: RouteRequest | None = None, **policy: Any) -> Verdict:
    return decide(moment, request or route(40), Policy(**policy), seed)


def winners(moment: Any, **policy: Any) -> Counter[str]:
    """Return how often each wins, over many seeds made as a router makes them."""
    return Counter(str(chosen(moment, splitmix64(seed), **policy).winner) for seed in range(SEEDS))


# ---------------------------------------------------------------- by load, by chance, by name


def test_least_loaded_takes_the_fewest_requests_and_the_seed_breaks_ties() -> None:
    ranks = [row(f"w{at}/0", active_requests=requests) for at, requests in enumerate((3, 1, 2, 1))]
    assert set(winners(view(*ranks), mode="least-loaded")) == {"w1/0", "w3/0"}
    found = chosen(view(*ranks[:3]), mode="least-loaded")
    assert (str(found.winner), found.runner_up, found.reason) == ("w1/0", 2, "load")
    assert chosen(view(*ranks), mode="least-loaded").reason == "draw"


def test_of_two_that_are_drawn_the_less_loaded_wins_and_the_busiest_of_all_never() -> None:
    ranks = [row(f"w{at}/0", active_requests=at) for at in range(4)]
    found = winners(view(*ranks), mode="power-of-two")
    # of 6 pairs, w0 is in 3 and wins them, w1 wins 2, w2 wins 1
    assert found["w3/0"] == 0
    for name, share in (("w0/0", 3 / 6), ("w1/0", 2 / 6), ("w2/0", 1 / 6)):
        assert abs(found[name] - SEEDS * share) < 5 * (SEEDS * share * (1 - share)) ** 0.5, found


def test_direct_goes_where_the_caller_says_and_to_the_workers_ranks_in_turn() -> None:
    request = route(40, pinned_worker="w1")
    ranks = [row("w0/0"), row("w1/0"), row("w1/1")]
    found = [chosen(view(*ranks, turn=turn), request=request, mode="direct") for turn in range(3)]
    assert [str(each.winner) for each in found] == ["w1/0", "w1/1", "w1/0"]
    assert {each.reason for each in found} == {"pinned"}


def test_direct_chooses_no_worker_itself_and_says_so() -> None:
    with pytest.raises(WorkerNotNamed, match=r"^x-worker-instance-id: found none, .* allowed w0, w1$"):
        chosen(view(row("w0/0"), row("w1/0"), row("w1/1")), mode="direct")


# ---------------------------------------------------------------- why kv chose


@pytest.mark.parametrize(
    ("ranks", "reason", "regret"),
    [
        ((row("w0/0", overlap_blocks=HELD), row("w1/0")), "overlap", 0),
        ((row("w0/0"), row("w1/0", active_blocks=3)), "load", 0),
        ((row("w0/0"), row("w1/0", active_blocks=60, overlap_blocks=HELD)), "load", 2),
        ((row("w0/0"), row("w1/0")), "draw", 0),
        ((row("w0/0"),), "only", 0),
        ((row("w0/0", predicted_blocks=2), row("w1/0")), "overlap", 0),
    ],
)
def test_the_reason_of_kv(ranks: tuple[Row, ...], reason: str, regret: int) -> None:
    found = chosen(view(*ranks))
    assert (found.reason, found.regret_blocks) == (reason, regret)


def test_a_prompt_that_was_not_encoded_goes_by_load_alone() -> None:
    moment = view(row("w0/0", prefill_tokens_queued=100), row("w1/0"))
    found = chosen(moment, request=route(0))
    assert (str(found.winner), found.overlap_blocks, found.reason) == ("w1/0", 0, "load")


# ---------------------------------------------------------------- predicted time to the first token


def predicting(*each: tuple[float, float]) -> Any:
    """Return ranks of which this is predicted, roughly: seconds to the first token, and between tokens."""
    rows = [
        row(f"w{at}/0", prefill_tokens_queued=int((ttft_s - 0.018) / 22.8e-6), factors=(1.0, itl_s / 5.54e-3))
        for at, (ttft_s, itl_s) in enumerate(each)
    ]
    return view(*rows)


FAST_BUT_BUSY = predicting((0.099, 0.049), (0.399, 0.009), (0.299, 0.019))


@pytest.mark.parametrize(
    ("policy", "request_targets", "winner", "action"),
    [
        ({}, {}, "w0/0", "admit"),
        ({"itl_target_s": 0.03}, {}, "w2/0", "admit"),
        ({"itl_target_s": 0.03}, {"itl_target_s": 0.015}, "w1/0", "admit"),
        ({"itl_target_s": 0.001}, {"itl_target_s": 0.03}, "w2/0", "admit"),
        ({"itl_target_s": 0.001, "unmet": "admit"}, {}, "w0/0", "admit"),
        ({"itl_target_s": 0.001, "unmet": "queue"}, {}, "w0/0", "queue"),
        ({"itl_target_s": 0.001, "unmet": "reject"}, {}, "w0/0", "reject"),
        ({"itl_target_s": 0.03, "ttft_target_s": 0.2, "unmet": "reject"}, {}, "w0/0", "reject"),
        ({"ttft_target_s": 0.05, "unmet": "queue"}, {}, "w0/0", "queue"),
        ({"unmet": "queue"}, {"ttft_target_s": 0.1}, "w0/0", "admit"),
    ],
)
def test_the_first_to_answer_wins_among_those_that_meet_the_targets(
    policy: dict[str, Any], request_targets: dict[str, float], winner: str, action: str
) -> None:
    found = chosen(FAST_BUT_BUSY, request=route(40, **request_targets), mode="predicted-ttft", **policy)
    assert (str(found.winner), found.action, found.reason) == (winner, action, "predicted_ttft")


# ---------------------------------------------------------------- sessions

AT_HOME = (row("w0/0", active_blocks=6), row("w1/0"))


@pytest.mark.parametrize("mode", [name for name in MODES if name != "direct"])
def test_hard_affinity_leaves_no_choice_while_the_rank_is_eligible(mode: str) -> None:
    for seed in range(20):
        found = chosen(view(*AT_HOME, bound=rank("w0/0")), seed, mode=mode, affinity="hard")
        assert (str(found.winner), found.reason) == ("w0/0", "affinity")
    away = view(AT_HOME[0]._replace(unfit="draining"), AT_HOME[1], bound=rank("w0/0"))
    assert str(chosen(away, mode=mode, affinity="hard").winner) == "w1/0"
    elsewhere = view(*AT_HOME, bound=rank("w9/0"))
    assert chosen(elsewhere, mode=mode, affinity="hard").reason != "affinity"


@pytest.mark.parametrize(("busy_blocks", "winner", "reason"), [(9_000, "w0/0", "affinity"), (11_000, "w1/0", "load")])
def test_soft_affinity_is_a_discount(busy_blocks: int, winner: str, reason: str) -> None:
    # 712 ms at the idle one; at home half of 712 ms and 71 us for each busy block
    moment = view(row("w0/0", active_blocks=busy_blocks), row("w1/0"), bound=rank("w0/0"))
    found = chosen(moment, affinity="soft")
    assert (str(found.winner), found.reason) == (winner, reason)
    assert [each.terms.constraint_multiplier for each in found.decision().candidates] == [0.5, 1.0]


# ---------------------------------------------------------------- newcomers

NEW = row("w1/0", newcomer=True)


def test_a_newcomer_that_had_its_share_is_left_out_of_a_full_miss_and_named() -> None:
    found = chosen(view(row("w0/0", active_blocks=50), NEW))
    assert (str(found.winner), found.reason, found.exclusions) == ("w0/0", "newcomer", ("", SHARE_IS_SPENT))


def test_a_prompt_of_which_a_cache_can_give_nothing_is_no_miss() -> None:
    assert str(chosen(view(row("w0/0", active_blocks=50), NEW), request=route(10)).winner) == "w1/0"
