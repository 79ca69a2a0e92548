"""Random fleets of simulated prefill and decode engines, under deaths and cancellations, in virtual time.

Every request that a decode engine took ends once, with the tokens of an undisturbed engine, or with an error. In the
end nothing is held, used or waited for, whatever happened. Under- and overcount are told apart.
"""

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.amount import examples
from tests.unit.properties.transfer_fleet import ENGINE, Fleet, alone
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.transfer import TransferRules
from worker_agent.port.types import EngineRequest

ENGINES = 2
requests = st.tuples(
    st.just("ask"),
    st.integers(1, 60),
    st.integers(1, 12),
    st.integers(0, 3),
    st.integers(0, ENGINES - 1),
    st.sampled_from([0, 0, 1, None]),
)
cancels = st.tuples(st.just("cancel"), st.integers(0, 8))
kills = st.tuples(st.just("kill"), st.sampled_from(["prefill-1", "decode-1"]))
waits = st.tuples(st.just("wait"), st.sampled_from([0.001, 0.02, 0.1, 1.0, 12.0]))
plans = st.lists(st.one_of(requests, requests, requests, waits, waits, cancels, kills), max_size=25)
rules = st.builds(
    TransferRules,
    token_bytes=st.just(1000),
    bandwidth_bytes_s=st.sampled_from([1e5, 1e6, 1e9]),
    latency_s=st.sampled_from([0.0, 0.05, 0.99]),  # the last: the sender gives up just before the receiver would
    timeout_s=st.sampled_from([1.0, 10.0]),
)


class Run:
    """A fleet, its requests, those that were cancelled, and the engines that died."""

    def __init__(self, transfers: TransferRules, kind: type[Simulator]) -> None:
        self.fleet = Fleet(transfers, prefill=ENGINES, decode=ENGINES, kind=kind)
        self.asked: dict[str, tuple[EngineRequest, str, str | None]] = {}
        self.given_up: set[str] = set()
        self.dead: set[str] = set()

    def ask(self, isl: int, osl: int, family: int, prefill: int, decode: int | None) -> None:
        name = str(len(self.asked))
        request = EngineRequest(request_id=name, prompt=tuple(range(family, family + isl)), max_tokens=osl)
        names = f"prefill-{prefill}", None if decode is None else f"decode-{decode}"
        if names[0] not in self.dead:
            self.asked[name] = (request, *names)
            self.fleet.ask(request, *names)

    def cancel(self, which: int) -> None:
        name = str(which)
        if name in self.asked:
            self.given_up.add(name)
            for engine in self.fleet.engines.values():
                engine.cancel(name)

    def kill(self, name: str) -> None:
        if name not in self.dead:
            self.dead.add(name)
            self.fleet.kill(name)

    def wait(self, seconds: float) -> None:
        self.fleet.run(until_s=self.fleet.now_s + seconds)
        self.fleet.now_s += seconds

    def check(self) -> None:
        self.fleet.run()
        assert set(self.fleet.used_blocks().values()) <= {0}
        for engine in self.fleet.engines.values():
            told = engine.transfer_statistics()
            assert (told.held, told.fetching, engine.has_requests) == (0, 0, False)
        self._check_answers()
        if not self.dead:
            self._check_counts()

    def _check_answers(self) -> None:
        for name, (request, prefill, decode) in self.asked.items():
            answer, is_dead = self.fleet.answers[name], {prefill, decode} & self.dead
            assert len(answer.prefill) <= 1, "a prefill engine answers once"
            assert len(answer.reasons) <= 1, "a decode engine answers once"
            whole = alone(request)
            assert answer.tokens == whole[: len(answer.tokens)]
            if answer.reasons == ["length"]:
                assert answer.tokens == whole
            elif answer.prefill and decode and name not in self.given_up and not is_dead:
                assert answer.reasons == ["error"]
                assert answer.tokens == []

    def _check_counts(self) -> None:
        told = {name: engine.transfer_statistics() for name, engine in self.fleet.engines.items()}
        done = sum(each.fetches_total["done"] for each in told.values())
        assert sum(each.handed_over_total for each in told.values()) == done
        held = sum(len(answer.prefill) for answer in self.fleet.answers.values())
        assert held >= done + sum(each.expired_total for each in told.values()) - len(self.given_up)


def check(transfers: TransferRules, plan: list[Any], kind: type[Simulator] = Simulator) -> None:
    run = Run(transfers, kind)
    for word, *rest in plan:
        getattr(run, word)(*rest)
    run.check()


SEARCH = settings(max_examples=examples(150))


@SEARCH
@given(transfers=rules, plan=plans)
def test_every_request_ends_once_and_nothing_is_left_behind(transfers: TransferRules, plan: list[Any]) -> None:
    check(transfers, plan)


class CancelsAtOnce(Simulator):
    """Planted bug: a request that was given up is forgotten with its blocks, whatever it waits for."""

    def cancel(self, request_id: str) -> None:
        self._rank_of.pop(request_id, None)


@pytest.mark.planted
def test_the_property_fails_on_a_planted_bug() -> None:
    search = settings(SEARCH, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)

    @search
    @given(transfers=rules, plan=plans)
    def planted_fleet(transfers: TransferRules, plan: list[Any]) -> None:
        check(transfers, plan, CancelsAtOnce)

    with pytest.raises((AssertionError, KeyError)):
        planted_fleet()


def test_the_sizes_can_be_served() -> None:
    assert ENGINE.max_seq_len >= 60 + 12
    assert -(-(60 + 12 - 1) // ENGINE.block_size) <= ENGINE.total_kv_blocks
