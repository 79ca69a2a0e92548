"""Whatever happens to sessions: each is bound to the rank that a naive list of its leases names."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Renewed, Routed
from router.decision.affinity import Affinity, AffinityLimits
from tests.support.amount import examples

PLANTED = settings(
    deadline=None,
    max_examples=examples(500),
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
IDLE_S = 3.0
SESSIONS = ("", "s", "t", "u")
RANKS = (WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0))


class Gone(NamedTuple):
    """A worker left."""

    worker_id: str


class Tick(NamedTuple):
    """Time is looked at."""


Step = tuple[float, LedgerEvent | Gone | Tick]
lease_ids = st.sampled_from([f"l{number}" for number in range(5)])
events = st.one_of(
    st.builds(
        lambda lease_id, rank, session_id: Routed(
            lease_id=lease_id,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            blocks=b"",
            uncached_tokens=0,
            session_id=session_id,
        ),
        lease_ids,
        st.sampled_from(RANKS),
        st.sampled_from(SESSIONS),
    ),
    *(st.builds(kind, lease_id=lease_ids) for kind in (FirstToken, Renewed, Finished, Cancelled, Expired)),
    st.builds(Gone, st.sampled_from(["a", "b"])),
    st.builds(Tick),
)
steps = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 1.0, 2.0]), events), max_size=60)


class Naive:
    """Every session's leases, rank, and when it was last seen in flight."""

    def __init__(self) -> None:
        self.session_of: dict[str, tuple[str, int]] = {}
        self.bound_to: dict[str, tuple[WorkerRank, int]] = {}
        self.ended_s: dict[str, float] = {}
        self.lives = 0

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        match event:
            case Routed(lease_id=lease_id, session_id=name) if name and lease_id not in self.session_of:
                if self.bound(name, now_s) is None:
                    self.lives += 1
                    life = self.lives
                else:
                    life = self.bound_to[name][1]
                self.session_of[lease_id] = (name, life)
                self.bound_to[name] = (WorkerRank(event.worker_id, event.dp_rank), life)
            case Finished(lease_id=lease_id) | Cancelled(lease_id=lease_id) | Expired(lease_id=lease_id):
                session = self.session_of.pop(lease_id, None)
                if session is not None and session not in self.session_of.values():
                    self.ended_s[f"{session}"] = now_s

    def forget(self, worker_id: str) -> None:
        for name in [name for name, (rank, _) in self.bound_to.items() if rank.worker_id == worker_id]:
            del self.bound_to[name]

    def bound(self, name: str, now_s: float) -> WorkerRank | None:
        if name not in self.bound_to:
            return None
        rank, life = self.bound_to[name]
        if (name, life) in self.session_of.values():
            return rank
        return rank if now_s < self.ended_s[f"{(name, life)}"] + IDLE_S else None


def check(affinity: Affinity, script: Sequence[Step]) -> None:
    naive, now_s = Naive(), 0.0
    for pause_s, event in script:
        now_s += pause_s
        match event:
            case Gone(worker_id):
                affinity.forget(worker_id)
                naive.forget(worker_id)
            case Tick():
                affinity.tick(now_s)
            case _:
                affinity.apply(event, now_s)
                naive.apply(event, now_s)
        for later_s in (0.0, IDLE_S / 2, IDLE_S):
            for name in SESSIONS:
                assert affinity.bound(name, now_s + later_s) == naive.bound(name, now_s + later_s)


@given(steps)
@settings(deadline=None)
def test_bindings_are_those_of_a_naive_list(script: list[Step]) -> None:
    check(Affinity(AffinityLimits(idle_s=IDLE_S)), script)


@given(steps)
@settings(deadline=None)
def test_there_are_never_more_sessions_than_allowed(script: list[Step]) -> None:
    affinity, now_s = Affinity(AffinityLimits(idle_s=IDLE_S, sessions_max=2)), 0.0
    for pause_s, event in script:
        now_s += pause_s
        if isinstance(event, Gone):
            affinity.forget(event.worker_id)
        elif not isinstance(event, Tick):
            affinity.apply(event, now_s)
        assert affinity.statistics().sessions <= 2


class EndsWithTheFirstLease(Affinity):
    """A planted bug: the idle time begins when any of a session's requests ends."""

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        session = self._of_lease.get(getattr(event, "lease_id", ""))
        if session is not None and isinstance(event, Finished):
            session.leases = 1
        super().apply(event, now_s)


@pytest.mark.interpreted
@pytest.mark.planted
def test_the_comparison_sees_a_planted_bug() -> None:
    @given(steps)
    @settings(PLANTED)
    def run(script: list[Step]) -> None:
        check(EndsWithTheFirstLease(AffinityLimits(idle_s=IDLE_S)), script)

    with pytest.raises(AssertionError):
        run()
