"""Whatever happens, in whatever order, twice, late or never: the core is what the reference is, within its bounds.

Scripts are drawn of few leases, ranks, sessions, epochs and times: messages come twice, too late, for a worker that
left, or never.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_protocol.fleet import WorkerLeft
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    CheckpointBegan,
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    TimePassed,
    WorkerHeard,
)
from kv_protocol.ledger import (
    Cancelled,
    Expired,
    Finished,
    FirstToken,
    LedgerEvent,
    Renewed,
    Routed,
    Unreported,
)
from kv_protocol.splitmix import choice_index
from router.decision.policy import CostParameters, Policy
from router.decision.state import AffinityLimits, ApproximateLimits, RankLoad, RouterState, StateSettings
from tests.reference import predictions
from tests.reference.following import KV_SEQ
from tests.reference.ledger import REPORTS
from tests.reference.state import ReferenceState
from tests.support.amount import examples
from tests.unit.properties.test_core_differential import tables_of
from tests.unit.router.samples import TEXT, answer, chain, chain_of, joined, load, rank, registered, route, tell

LEASE_S = 25.0
BLOCKS_MAX, SESSIONS_MAX = 12, 2
SETTINGS = StateSettings(
    text=TEXT,
    lease_s=LEASE_S,
    approximate=ApproximateLimits(ttl_s=10.0, blocks_max=BLOCKS_MAX),
    affinity=AffinityLimits(idle_s=3.0, sessions_max=SESSIONS_MAX),
)
POLICY = Policy(affinity="soft", parameters=CostParameters(host_weight=0.5))
RANKS = (rank("a/0"), rank("a/1"), rank("b/0"))
LEASES = [f"l{number}" for number in range(6)]
EPOCHS = (0, 7)
FOUNDERS = (registered("a", dp_ranks=(0, 1)), registered("b", total_kv_blocks=5))


class Told(NamedTuple):
    """An event of a lease; `router`: of another router."""

    event: LedgerEvent
    router: str = ""


class Reports(NamedTuple):
    """An engine reports so often, as many requests each time."""

    rank: WorkerRank
    requests: int
    times: int


class Tick(NamedTuple):
    """Time is looked at; the endings are applied at once, or, `late`, after what comes next."""

    late: bool


class Begins(NamedTuple):
    """A life of a worker begins, or goes on."""

    worker_id: str
    life: int
    total_kv_blocks: int


class Ends(NamedTuple):
    """A life of a worker ends, if it is the present one."""

    worker_id: str
    life: int


class Ask(NamedTuple):
    """A request is decided, and carried out if it `is_taken`."""

    path: Sequence[int]
    session_id: str
    doubt: str
    epoch: int
    is_taken: bool


Step = Told | Reports | Tick | Begins | Ends | Ask
Script = list[tuple[float, Step]]

lease_ids, ranks = st.sampled_from(LEASES), st.sampled_from((*RANKS, RANKS[0], RANKS[0]))
paths = st.lists(st.integers(1, 2), max_size=7)
sessions = st.sampled_from(("", "s", "t", "u"))
bookings = st.builds(
    lambda lease_id, at, path, **fields: Routed(
        lease_id=lease_id, worker_id=at.worker_id, dp_rank=at.dp_rank, blocks=chain_of(path), **fields
    ),
    lease_ids,
    ranks,
    paths,
    uncached_tokens=st.integers(0, 100),
    extra_blocks=st.integers(0, 1),
    epoch=st.sampled_from(EPOCHS),
    session_id=sessions,
)
endings = st.one_of(
    *(st.builds(kind, lease_id=lease_ids) for kind in (FirstToken, Renewed, Finished, Cancelled)),
    st.builds(Expired, lease_id=lease_ids, cause=st.sampled_from(["silence", "engine"])),
    st.builds(lambda at: Unreported(worker_id=at.worker_id, dp_rank=at.dp_rank), ranks),
)
counts, times = st.sampled_from([0, 0, 1, 2, 5]), st.sampled_from([1, REPORTS, REPORTS + 1])
reported = st.builds(Reports, ranks, counts, times)
asked = st.builds(
    Ask, paths, sessions, st.sampled_from(["", "never_heard"]), st.sampled_from(EPOCHS), is_taken=st.booleans()
)
workers, lives = st.sampled_from(["a", "b"]), st.integers(1, 2)
events = st.one_of(
    *[st.builds(Told, bookings)] * 3,
    st.builds(Told, bookings, st.just("other")),
    *[st.builds(Told, endings)] * 3,
    *[reported] * 2,
    st.builds(Tick, st.booleans()),
    st.builds(Begins, workers, lives, st.sampled_from([0, 1, 5, 100])),
    st.builds(Ends, workers, lives),
    *[asked] * 2,
)
scripts = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.5, 4.0, 11.0]), events), max_size=60)


class Both:
    """The router's state and the reference, to which the same happens."""

    def __init__(self) -> None:
        self.state, self.reference = RouterState(SETTINGS), ReferenceState(SETTINGS)
        self.now_s = 0.0
        self.decisions = 0
        for policed in (self.state, self.reference):
            policed.policy = POLICY
        for event in FOUNDERS:
            self.begin(event.worker_id, 1, event.total_kv_blocks)

    def apply(self, *records: JournalRecord) -> None:
        for record in records:
            self.state.apply(record)
            self.reference.apply(record)

    def tell(self, event: LedgerEvent, router: str = "") -> None:
        self.apply(LedgerApplied(now_s=self.now_s, event=event, router=router))

    def begin(self, worker_id: str, life: int, total_kv_blocks: int) -> None:
        event = registered(worker_id, instance=f"{worker_id}-{life}", dp_ranks=(0, 1), total_kv_blocks=total_kv_blocks)
        heard = WorkerHeard(now_s=self.now_s, worker_id=worker_id, instance=event.instance)
        self.apply(FleetApplied(now_s=self.now_s, event=event), heard)

    def tick(self) -> list[JournalRecord]:
        """Return what the passing of time causes."""
        self.apply(TimePassed(now_s=self.now_s))
        due = self.state.tick(self.now_s)
        assert due == self.reference.tick(self.now_s)
        return due

    def decide(self, asked: Ask) -> None:
        if not list(self.state.fleet.serving("m")):
            return
        self.decisions += 1
        hashes = chain_of(asked.path)
        request = route(
            2 * len(hashes) + 1,  # of 16 tokens a block
            decision_id=f"d{self.decisions}",
            sequence_hashes=hashes,
            session_id=asked.session_id,
        )

        def held(_: object, of: tuple[WorkerRank, ...]) -> Any:
            return answer([((0, 0, 0, 0), asked.epoch, 9, asked.doubt)] * len(of))

        verdict = self.state.decide(request, held, self.now_s, 1)
        expected = self.reference.decide(request, held, self.now_s, 1)
        assert verdict.journal_record(KV_SEQ) == expected.record(KV_SEQ)
        if asked.is_taken:
            self.state.take(verdict)
            self.reference.take(expected)

    def do(self, step: Step) -> list[JournalRecord]:
        """Do it to both; return the endings to be applied."""
        match step:
            case Told():
                self.tell(*step)
            case Reports(at, requests, times):
                self.apply(*[self._report(at, requests)] * times)
            case Tick():
                return self.tick()
            case Begins():
                self.begin(*step)
            case Ends(worker_id, life):
                event = WorkerLeft(worker_id=worker_id, instance=f"{worker_id}-{life}")
                self.apply(FleetApplied(now_s=self.now_s, event=event))
            case Ask():
                self.decide(step)
        return []

    def _report(self, at: WorkerRank, requests: int) -> JournalRecord:
        return load(at, requests, 0, 3 * requests, self.now_s)

    def compare(self) -> None:
        """Nothing that a checkpoint has differs."""
        began = CheckpointBegan(now_s=self.now_s, router="router-1", settings={})
        self.apply(began)
        found = tables_of(self.state)(began)
        expected = self.reference.tables()
        assert {name: found[name] for name in expected} == expected


def run(script: Script) -> Both:
    both, late = Both(), list[JournalRecord]()
    for pause_s, step in script:
        both.now_s += pause_s
        due = both.do(step)
        if isinstance(step, Tick) and step.late:
            late += due
        else:
            both.apply(*due, *late)
            late = []
        assert all(blocks <= BLOCKS_MAX for _, blocks in both.state.core.routed_blocks())
    both.compare()
    return both


def booked(lease_id: str) -> Told:
    return Told(Routed(lease_id=lease_id, worker_id="a", dp_rank=0, blocks=b"", uncached_tokens=0))


def reports(requests: int, times: int) -> Reports:
    return Reports(RANKS[0], requests, times)


A_REUSED_ID: Script = [
    (0.0, booked("l3")),
    (0.0, reports(0, REPORTS + 1)),
    (0.0, Told(Finished(lease_id="l3"))),
    (0.0, booked("l3")),
    (11.0, Tick(late=False)),
]
"""A lease has the id of one that an engine did not report, and that has ended."""
UNKNOWN_ONES: Script = [
    (0.0, booked("l0")),
    (0.0, reports(1, REPORTS + 1)),
    (0.0, booked("l1")),
    (11.0, reports(1, 2)),
    (0.0, booked("l2")),
    (0.0, Told(Finished(lease_id="l2"))),
    (0.0, reports(0, REPORTS)),
    (0.0, Told(Finished(lease_id="l0"))),
    (6.0, Tick(late=False)),
]
"""One of two leases is known to the engine for a while; then none is. A third is over before it was told of."""


@given(scripts)
@example(A_REUSED_ID)
@example(UNKNOWN_ONES)
@settings(max_examples=examples(400))
def test_the_core_decides_forgets_and_remembers_as_the_reference_whatever_happens(script: Script) -> None:
    run(script)


def assert_nothing_is_promised(folded: RouterState, now_s: float) -> None:
    """Nothing is promised; what an engine may still speak of counts no more once it is silent."""
    assert folded.core.is_ledger_empty
    for record in folded.tick(now_s):
        assert isinstance(record, LedgerApplied)
        assert isinstance(record.event, Unreported)
        folded.apply(record)
    assert set(folded.loads().values()) <= {RankLoad()}
    assert folded.tick(now_s) == []


@given(scripts, st.sampled_from([Finished, Cancelled, Expired]))
def test_when_nothing_is_in_flight_every_sum_is_0(script: Script, ending: Any) -> None:
    both = run(script)
    for lease_id in (*LEASES, *(f"d{number + 1}" for number in range(both.decisions))):
        both.tell(ending(lease_id=lease_id))
    both.compare()
    assert_nothing_is_promised(both.state, both.now_s + LEASE_S)


@given(scripts)
def test_when_no_lease_is_renewed_every_sum_is_0_after_one_lease(script: Script) -> None:
    both = run(script)
    core = both.state.core
    running, before = core.open_leases, core.expired_total
    both.now_s += LEASE_S
    both.apply(*both.tick())
    assert_nothing_is_promised(both.state, both.now_s)
    assert core.expired_total == before + running


def path_of(seed: int, number: int, digits: int, most: int) -> list[int]:
    length = choice_index(seed, most, 3 * number + 1)
    return [1 + choice_index(seed, digits, 100 * number + at) for at in range(length)]


@pytest.mark.parametrize("seed", range(3))
def test_what_was_routed_in_a_long_run_under_pressure_is_what_the_reference_has(seed: int) -> None:
    both = Both()
    for number in range(1500):
        both.now_s = number * 0.7
        at, blocks = RANKS[choice_index(seed, 3, 3 * number)], chain_of(path_of(seed, number, 3, 10))
        both.tell(Routed(lease_id="l", worker_id=at.worker_id, dp_rank=at.dp_rank, blocks=blocks, uncached_tokens=0))
        if number % 50 == 0:
            both.compare()
    assert both.state.core.routed_totals()[1] > 100, f"seed {seed}: too few blocks were dropped for others"


def test_chains_of_thousands_of_blocks_fork_where_they_differ() -> None:
    folded, long = joined(registered("a")), list(range(5000))
    for number, blocks in enumerate((long, [*long[:4321], 9, 8])):
        routed = Routed(lease_id=f"l{number}", worker_id="a", dp_rank=0, blocks=chain(*blocks), uncached_tokens=0)
        tell(folded, routed)
    assert folded.core.routed_blocks() == [(rank("a"), 5002)]
    assert folded.load_of(rank("a")).active_blocks == 5002
    found = list[tuple[int, int]]()
    for cut in (0, 1, 4320, 4321, 5000):
        asked = route(16 * cut + 17, sequence_hashes=chain(*long[:cut], 7))
        verdict = folded.decide(asked, lambda _, of: answer([((0, 0, 0, 0), 0, 0, "never_heard")] * len(of)), 0.0, 1)
        found.append((verdict.overlap_blocks, int(verdict.numbers["shared_blocks"][0])))
    assert found == [(cut, cut) for cut in (0, 1, 4320, 4321, 5000)]


# ---------------------------------------------------------------- the harness sees what is wrong

SEEN: Script = [
    (0.0, Told(Routed(lease_id="l0", worker_id="a", dp_rank=0, blocks=chain_of((1, 2)), uncached_tokens=0, epoch=7))),
    (1.0, Told(FirstToken(lease_id="l0"))),
    (1.0, Ask((1, 2), "", "", 7, is_taken=False)),
]


@pytest.mark.planted
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run(SEEN)
    monkeypatch.setattr(predictions, "SEEN_S", 0.5)
    with pytest.raises(AssertionError):
        run(SEEN)
