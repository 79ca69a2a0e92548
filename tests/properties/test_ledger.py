"""Whatever happens, in whatever order, twice, late or never: the ledger's sums are those of a naive recount."""

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Reconciled, Renewed, Routed
from kv_protocol.splitmix import choice_index
from router.core.ledger import Ledger, RankLoad

LEASE_S = 10.0
RANKS = (WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0))
BLOCKS = range(8)
LEASES = [f"l{number}" for number in range(6)]


class Tick(NamedTuple):
    """Time is looked at; the endings are applied at once, or, `late`, after what comes next."""

    late: bool


class Gone(NamedTuple):
    """A worker left."""

    worker_id: str


Step = tuple[float, LedgerEvent | Tick | Gone]

lease_ids = st.sampled_from(LEASES)
ranks = st.sampled_from(RANKS)
counts = st.integers(0, 1000)
events = st.one_of(
    st.builds(
        lambda lease_id, rank, blocks, uncached, extra: Routed(
            lease_id=lease_id,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            blocks=tuple(blocks),
            uncached_tokens=uncached,
            extra_blocks=extra,
        ),
        lease_ids,
        ranks,
        st.lists(st.sampled_from(BLOCKS), max_size=6),  # also twice in one request: no input may break the sums
        counts,
        st.integers(0, 1),
    ),
    *(st.builds(kind, lease_id=lease_ids) for kind in (FirstToken, Renewed, Finished, Cancelled, Expired)),
    st.builds(
        Reconciled,
        worker_id=st.sampled_from(["a", "b"]),
        dp_rank=st.just(0),
        running_requests=counts,
        waiting_requests=counts,
        used_blocks=counts,
    ),
    st.builds(Tick, st.booleans()),
    st.builds(Gone, st.sampled_from(["a", "b"])),
)
steps = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 4.0, 11.0]), events), max_size=60)


class Naive:
    """The leases that run, and nothing else; every sum is counted anew."""

    def __init__(self) -> None:
        self.leases: dict[str, Routed] = {}
        self.waiting: dict[str, bool] = {}
        self.expires_at_s: dict[str, float] = {}
        self.expired_total = 0

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        if isinstance(event, Reconciled):
            return
        known = event.lease_id in self.leases
        if isinstance(event, Routed) and not known:
            self.leases[event.lease_id], self.waiting[event.lease_id] = event, True
            self.expires_at_s[event.lease_id] = now_s + LEASE_S
        elif isinstance(event, FirstToken | Renewed) and known:
            self.waiting[event.lease_id] &= isinstance(event, Renewed)
            self.expires_at_s[event.lease_id] = now_s + LEASE_S
        elif isinstance(event, Finished | Cancelled | Expired) and known:
            del self.leases[event.lease_id]
            self.expired_total += isinstance(event, Expired)

    def of(self, rank: WorkerRank) -> list[Routed]:
        return [each for each in self.leases.values() if (each.worker_id, each.dp_rank) == rank]

    def sums(self, rank: WorkerRank) -> tuple[int, int, int]:
        mine = self.of(rank)
        union = {block for each in mine for block in each.blocks}
        queued = sum(each.uncached_tokens for each in mine if self.waiting[each.lease_id])
        return len(mine), len(union) + sum(each.extra_blocks for each in mine), queued

    def shared(self, blocks: tuple[int, ...]) -> dict[WorkerRank, int]:
        shared = {rank: len(set(blocks) & {block for each in self.of(rank) for block in each.blocks}) for rank in RANKS}
        return {rank: count for rank, count in shared.items() if count}

    def overdue(self, now_s: float) -> set[str]:
        return {lease_id for lease_id in self.leases if self.expires_at_s[lease_id] <= now_s}


def promised(load: RankLoad) -> tuple[int, int, int]:
    return load.active_requests, load.active_blocks, load.prefill_tokens_queued


def assert_equal(ledger: Ledger, naive: Naive, now_s: float) -> None:
    for rank in RANKS:
        load = ledger.load_of(rank)
        assert promised(load) == naive.sums(rank)
        assert all(getattr(load, name) >= 0 for name in RankLoad.__struct_fields__)
    for blocks in (tuple(BLOCKS), tuple(BLOCKS)[::2], (3,), (99,)):
        assert ledger.shared_blocks(blocks) == naive.shared(blocks)
    assert {expired.lease_id for expired in ledger.tick(now_s)} == naive.overdue(now_s)
    assert ledger.expired_total == naive.expired_total


def assert_empty(ledger: Ledger) -> None:
    assert all(promised(load) == (0, 0, 0) for load in ledger.loads().values())
    assert ledger.shared_blocks(BLOCKS) == {}
    assert ledger.tick(float("inf")) == []
    assert ledger._ranks_of == {}


def run(script: list[Step]) -> tuple[Ledger, Naive, float]:
    ledger, naive, now_s = Ledger(LEASE_S), Naive(), 0.0
    late: list[LedgerEvent] = []
    for advance_s, event in script:
        now_s += advance_s
        due, late = late, []
        if isinstance(event, Gone):
            ledger.forget(event.worker_id)
        elif isinstance(event, Tick):
            expired: list[LedgerEvent] = list(ledger.tick(now_s))
            due, late = (due, expired) if event.late else ([*due, *expired], [])
        else:
            due = [event, *due]
        for each in due:
            ledger.apply(each, now_s)
            naive.apply(each, now_s)
        assert_equal(ledger, naive, now_s)
    return ledger, naive, now_s


@given(steps)
@settings(max_examples=300, deadline=None)
def test_the_sums_are_those_of_a_recount_at_any_time(script: list[Step]) -> None:
    run(script)


@given(steps, st.permutations(LEASES), st.sampled_from([Finished, Cancelled, Expired]))
@settings(deadline=None)
def test_when_nothing_is_in_flight_every_sum_is_0(
    script: list[Step], order: list[str], ending: type[Finished | Cancelled | Expired]
) -> None:
    ledger, _, now_s = run(script)
    for lease_id in order:
        ledger.apply(ending(lease_id=lease_id), now_s)
    assert_empty(ledger)


@given(steps)
@settings(deadline=None)
def test_when_everybody_falls_silent_every_sum_is_0_after_one_lease(script: list[Step]) -> None:
    ledger, naive, now_s = run(script)
    for expired in ledger.tick(now_s + LEASE_S):
        ledger.apply(expired, now_s + LEASE_S)
        naive.apply(expired, now_s + LEASE_S)
    assert_empty(ledger)
    assert ledger.expired_total == naive.expired_total


@pytest.mark.parametrize("seed", range(5))
def test_a_storm_of_cancels_and_expiries_leaves_nothing(seed: int) -> None:
    ledger = Ledger(LEASE_S)
    for number in range(3000):
        now_s = number * 0.01
        rank = RANKS[choice_index(seed, len(RANKS), 3 * number)]
        length = choice_index(seed, 40, 3 * number + 1)
        start = choice_index(seed, 100, 3 * number + 2)
        ledger.apply(
            Routed(
                lease_id=f"{number}",
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                blocks=tuple(range(start, start + length)),
                uncached_tokens=length,
                extra_blocks=number % 2,
            ),
            now_s,
        )
        if number % 3 == 0:
            ledger.apply(FirstToken(lease_id=f"{number}"), now_s)
        if number % 7 == 0:  # the others only expire
            ledger.apply(Cancelled(lease_id=f"{number - choice_index(seed, 50, number)}"), now_s)
        for expired in ledger.tick(now_s):
            ledger.apply(expired, now_s)
            ledger.apply(Cancelled(lease_id=expired.lease_id), now_s)
    left = Counter(rank for rank, load in ledger.loads().items() if load.active_requests)
    assert left, f"seed {seed}: the storm is over before its end"
    for number in range(3000):
        ledger.apply(Cancelled(lease_id=f"{number}"), 30.0)
    assert_empty(ledger)
