"""However attempts end: an answer that may be kept is kept, one request at a time probes, and a rank comes back."""

from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import AttemptEnded, AttemptOutcome
from kv_protocol.ledger import Finished, FirstToken, LedgerEvent, Routed
from router.fleet.breakers import BreakerLimits, Breakers
from tests.support.amount import examples

LIMITS = BreakerLimits(failures=2, window_s=20.0, open_s=4.0, open_s_max=10.0, retry_after_s_max=5.0)
RANKS = (WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0))


class Ask(NamedTuple):
    """A request comes for a rank, and is routed there if the rank is fit."""

    rank: WorkerRank


class End(NamedTuple):
    """One of those under way ends so."""

    which: int
    outcome: AttemptOutcome
    phase: str
    retry_after_s: float | None
    is_lease_first: bool


class Begin(NamedTuple):
    """One of those under way has its first token."""

    which: int


class Gone(NamedTuple):
    """A worker left."""

    worker_id: str


Step = Ask | End | Begin | Gone
outcomes = st.sampled_from(["ok", "client_fault", "back_pressure", "erred", "failed", "failed", "cancelled"])
ends = st.builds(
    End,
    st.integers(0, 9),
    outcomes,
    st.sampled_from(["connect", "first_byte", "body"]),
    st.sampled_from([None, 0.0, 3.0, 1e6]),
    st.booleans(),
)
steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 1.0, 4.0]),
        st.one_of(
            st.builds(Ask, st.sampled_from(RANKS)),
            st.builds(Ask, st.sampled_from(RANKS)),
            ends,
            ends,
            st.builds(Begin, st.integers(0, 9)),
            st.builds(Gone, st.sampled_from(["a", "b"])),
        ),
    ),
    max_size=60,
)


class Router:
    """Requests under way, and the newest answers, kept as long as `changes` and `valid_until_s` allow."""

    def __init__(self, breakers: Breakers) -> None:
        self.breakers, self.now_s, self.number = breakers, 0.0, 0
        self.under_way: dict[str, WorkerRank] = {}
        self.probes: dict[str, WorkerRank] = {}
        self.kept: dict[WorkerRank, str] = {}
        self.kept_changes, self.kept_until_s = -1, 0.0

    def look(self) -> None:
        if self.breakers.changes != self.kept_changes or self.now_s >= self.kept_until_s:
            self.kept = {rank: self.breakers.unfit(rank, self.now_s) for rank in RANKS}
            self.kept_changes, self.kept_until_s = self.breakers.changes, self.breakers.valid_until_s(self.now_s)
        assert self.kept == {rank: self.breakers.unfit(rank, self.now_s) for rank in RANKS}

    def follow(self, event: LedgerEvent) -> None:
        self.breakers.follow(event, self.now_s)

    def step(self, step: Step) -> None:
        match step:
            case Ask(rank) if not self.breakers.unfit(rank, self.now_s):
                self.number += 1
                lease_id = f"l{self.number}"
                self.under_way[lease_id] = rank
                if self.breakers.state(rank, self.now_s) == "half_open":
                    assert rank not in self.probes.values()
                    self.probes[lease_id] = rank
                self.follow(
                    Routed(
                        lease_id=lease_id, worker_id=rank.worker_id, dp_rank=rank.dp_rank, blocks=b"", uncached_tokens=0
                    )
                )
            case End() if self.under_way:
                self.end(step)
            case Begin(which) if self.under_way:
                lease_id = list(self.under_way)[which % len(self.under_way)]
                self.probes.pop(lease_id, None)
                self.follow(FirstToken(lease_id=lease_id))
            case Gone(worker_id):
                self.breakers.forget(worker_id)
                self.probes = {lease: rank for lease, rank in self.probes.items() if rank.worker_id != worker_id}
            case _:
                pass
        self.look()

    def end(self, end: End) -> None:
        lease_id = list(self.under_way)[end.which % len(self.under_way)]
        rank = self.under_way.pop(lease_id)
        self.probes.pop(lease_id, None)
        if end.is_lease_first:
            self.follow(Finished(lease_id=lease_id))
        self.breakers.apply(
            AttemptEnded(
                now_s=self.now_s,
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                outcome=end.outcome,
                phase=end.phase if end.outcome == "failed" else "",
                retry_after_s=end.retry_after_s,
                decision_id=lease_id,
            )
        )
        self.follow(Finished(lease_id=lease_id))


def run(breakers: Breakers, script: list[tuple[float, Step]]) -> Router:
    router = Router(breakers)
    for pause_s, step in script:
        router.now_s += pause_s
        router.look()
        router.step(step)
    return router


@given(steps)
@settings(max_examples=examples(300))
def test_answers_may_be_kept_and_one_request_at_a_time_probes(script: list[tuple[float, Step]]) -> None:
    run(Breakers(LIMITS), script)


@given(steps)
def test_every_rank_comes_back_once_it_answers(script: list[tuple[float, Step]]) -> None:
    router = run(Breakers(LIMITS), script)
    for lease_id in list(router.under_way):
        router.follow(Finished(lease_id=lease_id))
    router.under_way.clear()
    router.probes.clear()
    router.now_s += max(LIMITS.open_s_max, LIMITS.retry_after_s_max)
    for rank in RANKS:
        router.step(Ask(rank))
        router.step(End(0, "ok", "", None, is_lease_first=True))
        assert router.breakers.unfit(rank, router.now_s) == ""
        assert router.breakers.state(rank, router.now_s) == "closed"
    assert router.breakers.valid_until_s(router.now_s) == float("inf")


class LetsEveryRequestProbe(Breakers):
    """A planted bug: a request that is routed to a half-open rank is not known as its probe."""

    def follow(self, event: LedgerEvent, now_s: float) -> None:
        if not isinstance(event, Routed):
            super().follow(event, now_s)


@pytest.mark.planted
def test_the_comparison_sees_a_planted_bug() -> None:
    @given(steps)
    @settings(
        max_examples=examples(1000),
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    def compare(script: list[tuple[float, Step]]) -> None:
        run(LetsEveryRequestProbe(LIMITS), script)

    with pytest.raises(AssertionError):
        compare()
