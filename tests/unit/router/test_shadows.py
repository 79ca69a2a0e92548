"""Shadow policies: they choose what a replay would, they change nothing, and they take no more time than they may."""

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bench.placement.regimes import REGIMES, Sizing
from bench.routing.virtual_fleet import VirtualFleet
from bench.routing.virtual_router import TEXT
from kv_protocol.journal import JournalBegan, decode_journal
from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from router.decision.policies import MODES, Choice, Mode, rule_of
from router.decision.policy import Policy
from router.decision.routing import DecisionLog
from router.decision.state import RouterState, StateSettings
from router.decision.verdict import Verdict
from router.journal.encoder import JournalEncoder
from router.shadows.comparison import BATCHES, Pairs, SeriesMean, ShadowReport, Tally, compared, pooled
from router.shadows.service import KEPT_REQUESTS, WAITING_MAX, Shadows, ShadowSection, pooled_page
from tests.support.replayed import replay
from tests.support.watched_routing import Told, WatchedRouting, tell
from tests.unit.router.samples import registered, route
from tests.unit.router.test_routing import Bench

OTHERS: dict[str, dict[str, Any]] = {
    "same": {"mode": "kv"},
    "soonest": {"mode": "predicted-ttft"},
    "loaded": {"mode": "least-loaded"},
    "turns": {"mode": "round-robin"},
    "drawn": {"mode": "kv", "temperature": 0.3},
    "patient": {"ttft_weight": 0.5},
    "blind": {"predict_on_route": False},
}
LIVE = Policy(mode="kv")


def section(**changed: Any) -> ShadowSection:
    policies = [{"name": name, "policy": fields} for name, fields in OTHERS.items()]
    return ShadowSection(**{"policies": policies, "budget_us": 10_000, **changed})


class Recording:
    """Keeps the journal of a router, and lets its shadows see each decision when the next one comes."""

    def __init__(self, state: RouterState, clock: Clock, watched: ShadowSection) -> None:
        self._encoder = JournalEncoder(1)
        self._decided = DecisionLog(1)
        self._listeners = defaultdict[type, list[Any]](list)
        routing: Any = SimpleNamespace(state=state, clock=clock, decisions=self._decided, listeners=self._listeners)
        self.shadows = Shadows(routing, watched, timer=lambda: 0.0)
        settings = msgspec.to_builtins(StateSettings(text=TEXT))
        self.messages = list[bytes]()
        self.record(JournalBegan(now_s=0.0, router="r", started_ns=1, settings=settings))

    def record(self, what: Told) -> None:
        tell(self._encoder, what)
        self.messages.append(self._encoder.cut().data)
        if not isinstance(what, Verdict):
            for listener in self._listeners[type(what)]:
                listener(what)
            return
        self.shadows.evaluate_slice()
        lease: Any = SimpleNamespace(verdict=what, number=self._decided.added_total + 1, ended=b"1")
        self._decided.add(lease)

    def records(self) -> Iterator[Any]:
        for data in self.messages:
            yield from decode_journal(data).records


@cache
def lived(regime: str = "chat") -> Recording:
    """Return a run with all shadows."""
    return recorded(section(), regime=regime)


def recorded(watched: ShadowSection, regime: str = "chat") -> Recording:
    found = list[Recording]()

    def recording(state: RouterState, index: Any, clock: Clock, *given: Any, **named: Any) -> WatchedRouting:
        found.append(Recording(state, clock, watched))
        watch = [found[-1].record]
        kept = named | {"decisions_max": 2}  # the shadows see a decision when the next one is taken
        return WatchedRouting(state, index, clock, *given, recorders=watch, watch=watch, **kept)

    of, workload = REGIMES[regime], REGIMES[regime].make(Sizing(seed=1, load=1.0, scale=0.1))
    fleet = VirtualFleet(
        of.fleet("small", workload),
        LIVE,
        workload.requests,
        seed=1,
        follow_ups=workload.follow_ups,
        new_routing=recording,
    )
    fleet.run()
    found[0].shadows.evaluate_slice()
    return found[0]


def reports(shadows: Shadows) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in shadows.page()["shadows"]}


# ------------------------------------------------------------------------------------------------- choices


def test_shadows_choose_what_a_replay_of_the_journal_has_the_same_policies_choose() -> None:
    run = lived()
    policies = section().resolved(LIVE, MODES)
    differ = dict.fromkeys(policies, 0)
    decisions = 0
    for found in replay(run.records(), policies=list(policies.values())):
        assert found.equal, found.difference
        decisions += 1
        for name, other in zip(policies, found.otherwise, strict=True):
            assert not isinstance(other, str)
            differ[name] += other.rank != found.recorded
    seen = reports(run.shadows)
    assert decisions > 50
    assert {name: each["decisions"] for name, each in seen.items()} == dict.fromkeys(policies, decisions)
    assert {name: each["differ"] for name, each in seen.items()} == differ
    assert differ["same"] == 0 < differ["loaded"]


def test_the_policy_in_force_as_a_shadow_has_no_gain_and_agrees() -> None:
    same = reports(lived().shadows)["same"]
    assert same["differ_ratio"] == 0.0
    means = [same["ttft_gain_s"], same["cached_blocks_gain"], same["own_cost_gain_ms"], same["live_cost_gain_ms"]]
    assert [each["mean"] for each in means] == [0.0] * 4
    assert means[0]["interval_95"] == (0.0, 0.0)


def test_each_policy_is_best_by_its_own_cost() -> None:
    seen = reports(lived().shadows)
    assert seen["patient"]["own_cost_gain_ms"]["mean"] > 0 > seen["patient"]["live_cost_gain_ms"]["mean"]
    assert seen["turns"]["own_cost_gain_ms"]["count"] == 0


def test_a_round_robin_shadow_of_a_chat_is_predicted_to_reuse_less_and_to_be_late() -> None:
    turns = reports(lived().shadows)["turns"]
    assert turns["ttft_gain_s"]["interval_95"][1] < 0
    assert turns["cached_blocks_gain"]["interval_95"][1] < 0


def test_shadows_change_no_decision() -> None:
    decided = [
        [record for record in recorded(section(policies=policies)).records() if type(record).__name__ == "Decided"]
        for policies in ([], [{"name": "turns", "policy": {"mode": "round-robin"}}])
    ]
    assert decided[0] == decided[1]


@pytest.mark.parametrize(
    ("live", "shadow"),
    [
        (Policy(mode="round-robin"), Policy()),
        (Policy(mode="round-robin"), Policy(mode="least-loaded")),
        (Policy(), Policy(affinity="soft")),
        (Policy(predict_on_route=False), Policy()),
    ],
)
def test_what_the_live_view_lacks_is_not_guessed(live: Policy, shadow: Policy) -> None:
    bench = Bench(registered("w0"), registered("w1"), policy=live)
    verdict = bench.routing.decide(route(session_id="s"))
    assert compared(bench.state, verdict, live, shadow) == "unreadable"
    assert compared(bench.state, verdict, live, live) != "unreadable"


def test_what_the_shadow_chooses_is_compared_at_both_ranks() -> None:
    live = Policy()
    bench = Bench(registered("w0"), registered("w1"), policy=live)
    for number in range(5):
        bench.take(route(400, decision_id=f"d{number}", pinned_worker="w0")).first_token()
    verdict = bench.routing.decide(route(400))
    found = compared(bench.state, verdict, live, Policy(mode="least-loaded"))
    assert not isinstance(found, str)
    assert (str(found.rank), found.agrees, found.cached_blocks) == ("w1/0", False, (24, 0))
    assert found.own_cost_ms is None
    assert found.live_cost_ms is not None
    assert found.live_cost_ms[0] < found.live_cost_ms[1]
    assert found.ttft_s is not None
    assert found.ttft_s[0] < found.ttft_s[1]


# ------------------------------------------------------------------------------------------------- bounds


class Watched:
    """A router with one shadow, each decision of which takes so many seconds of the budget, or raises an error."""

    def __init__(self, takes_s: float = 0.0, *, raises: bool = False, **changed: Any) -> None:
        self.bench = Bench(registered("w0"), registered("w1"))
        state, self._timer_s, self.takes_s = self.bench.state, 0.0, takes_s

        def choose(*_: object) -> Choice:
            self._timer_s += self.takes_s
            if raises:
                raise ZeroDivisionError
            return Choice(1, "user")

        state.modes = {**MODES, "slow": Mode(choose)}
        state.rule = lru_cache(partial(rule_of, state.modes))
        watched = section(**{"policies": [{"name": "turns", "policy": {"mode": "slow"}}], **changed})
        self.shadows = Shadows(self.bench.routing, watched, timer=lambda: self._timer_s)

    def take(self, requests: int = 1) -> None:
        for number in range(requests):
            self.bench.take(route(decision_id=f"d{number}"))

    def settle(self) -> dict[str, Any]:
        while self.shadows.evaluate_slice():
            pass
        return reports(self.shadows)["turns"]


def test_shadows_take_no_more_time_than_their_budget_and_count_what_they_skip() -> None:
    watched = Watched(takes_s=1e-3, budget_us=100)
    watched.take(100)
    found = watched.settle()
    assert found["decisions"] in {10, 11}
    assert found["skipped"]["budget"] == 100 - found["decisions"]
    assert watched.shadows.page()["spent_us"] <= (100 + 1000 / 100) * (1 + 1e-9)


def test_what_is_not_spent_is_kept_for_a_bounded_number_of_requests() -> None:
    watched = Watched(budget_us=100)
    watched.take(2 * KEPT_REQUESTS)
    watched.settle()
    watched.takes_s = 1e-3
    watched.take(100)
    taken = 100 - watched.settle()["skipped"]["budget"]
    assert abs(taken - (KEPT_REQUESTS + 100) / 10) < 1, "each takes the allowance of ten requests"


def test_a_full_queue_takes_no_more_decisions_and_counts_them() -> None:
    watched = Watched()
    watched.take(WAITING_MAX + 7)
    found = watched.settle()
    assert (found["decisions"], found["skipped"]["full"]) == (WAITING_MAX, 7)


def test_a_slice_lets_the_event_loop_have_its_turn() -> None:
    watched = Watched(takes_s=1.0)
    watched.take(300)
    assert watched.shadows.evaluate_slice()


def test_a_mode_that_raises_is_the_shadows_failure_alone() -> None:
    watched = Watched(raises=True)
    watched.take()
    assert watched.settle()["skipped"]["failed"] == 1


def test_a_changed_policy_begins_the_comparison_anew() -> None:
    watched = Watched()
    watched.take(5)
    assert watched.settle()["decisions"] == 5
    watched.bench.routing.set_policy(Policy(temperature=0.5))
    assert watched.settle()["decisions"] == 0
    assert watched.shadows.page()["live"]["temperature"] == 0.5


@pytest.mark.parametrize(
    ("policies", "found"),
    [
        ([{"name": "a", "policy": {"no_field": 1}}], "shadow.policies: a: policy.no_field"),
        ([{"name": "a", "policy": {"ttft_weight": -1}}], "shadow.policies: a: policy.ttft_weight: found -1"),
        ([{"name": "a", "policy": {"mode": "x"}}], "shadow.policies: a: policy.mode: found"),
    ],
)
def test_a_shadow_that_is_no_policy_is_named(policies: list[dict[str, Any]], found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        section(policies=policies).resolved(LIVE, MODES)


def test_two_shadows_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="each name once"):
        section(policies=2 * [{"name": "a", "policy": {"mode": "kv"}}])


def test_another_routers_report_has_only_names_that_a_terminal_may_show() -> None:
    page = json.loads(msgspec.json.encode(Tally("turns", {"mode": "round-robin"}).report()))
    assert msgspec.convert(page, ShadowReport).name == "turns"
    with pytest.raises(msgspec.ValidationError, match=r"name"):
        msgspec.convert({**page, "name": "\x1b[2J"}, ShadowReport)


# ------------------------------------------------------------------------------------------------- figures


def test_the_interval_of_a_mean_has_the_mean_of_independent_values() -> None:
    draw, pairs = random.Random(1), Pairs()
    for _ in range(20_000):
        pairs.add((draw.gauss(3.0, 1.0), 0.0))
    found = pairs.gain()
    assert found.standard_error is not None
    assert found.standard_error == pytest.approx(1 / 20_000**0.5, rel=0.5)
    assert abs(found.mean - 3.0) < 4 * found.standard_error


def test_values_that_hang_together_have_a_wider_interval_than_their_number_says() -> None:
    draw, pairs = random.Random(1), Pairs()
    for _ in range(200):
        level = draw.gauss(0.0, 1.0)
        for _ in range(100):
            pairs.add((level, 0.0))
    found = pairs.gain().standard_error
    assert found is not None
    assert found > 5 / 20_000**0.5


def test_few_values_have_no_interval() -> None:
    pairs = Pairs()
    for _ in range(BATCHES - 1):
        pairs.add((1.0, 0.0))
    assert pairs.gain().interval_95 is None
    pairs.add((1.0, 0.0))
    assert pairs.gain().interval_95 == (1.0, 1.0)


def test_means_of_processes_are_pooled_by_their_counts() -> None:
    found = pooled([SeriesMean(100, 1.0, 0.1), SeriesMean(300, 3.0, 0.2), SeriesMean(0, 0.0, None)])
    assert (found.count, found.mean) == (400, 2.5)
    assert found.standard_error == pytest.approx((0.025**2 + 0.15**2) ** 0.5)
    assert pooled([SeriesMean(1, 1.0, 0.1), SeriesMean(1, 1.0, None)]).standard_error is None


def test_pages_of_processes_become_one() -> None:
    pages = []
    for requests in (40, 60):
        watched = Watched()
        watched.take(requests)
        watched.settle()
        pages.append(json.loads(json.dumps(watched.shadows.page())))
    page = pooled_page(pages)
    (turns,) = page["shadows"]
    assert (page["requests"], turns["decisions"]) == (100, 100)
    assert turns["differ"] == sum(each["shadows"][0]["differ"] for each in pages)
