"""Whatever is routed where and when: the approximate index says what a naive list of routed blocks says."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.codec import pack_u64, unpack_u64
from kv_protocol.ids import WorkerRank
from kv_protocol.splitmix import choice_index
from router.decision import approximate, routed_tree
from router.decision.approximate import ApproximateIndex, ApproximateLimits
from router.decision.routed_tree import PythonRoutedTree
from tests.support.amount import examples

TTL_S = 10.0
BLOCKS_MAX = 12
RANKS = (WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0))


def chain(path: Sequence[int]) -> bytes:
    """Return sequence hashes of which each names its whole path, as real ones do."""
    return pack_u64([int("".join(map(str, path[: at + 1])), 8) for at in range(len(path))])


class Routing(NamedTuple):
    """A request was routed."""

    rank: WorkerRank
    path: tuple[int, ...]
    capacity_blocks: int


class Forget(NamedTuple):
    """A worker left."""

    worker_id: str


class Tick(NamedTuple):
    """Time is looked at."""


Step = tuple[float, Routing | Forget | Tick]

paths = st.lists(st.integers(1, 2), max_size=9).map(tuple)
steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 4.0, 11.0]),
        st.one_of(
            st.builds(Routing, st.sampled_from(RANKS), paths, st.sampled_from([0, 1, 5, 100])),
            st.builds(Routing, st.just(RANKS[0]), paths, st.just(0)),
            st.builds(Forget, st.sampled_from(["a", "b"])),
            st.just(Tick()),
        ),
    ),
    max_size=40,
)


class Naive:
    """Every block of every rank with its age: when it expires, its request's number, how deep it lies."""

    def __init__(self) -> None:
        self.ages: dict[WorkerRank, dict[int, tuple[float, int, int]]] = {}
        self.requests = self.expired = self.evicted = self.left = 0

    def routed(self, rank: WorkerRank, hashes: bytes, now_s: float, capacity_blocks: int) -> None:
        ages = self.ages.setdefault(rank, {})
        self.expire(ages, now_s)
        self.requests += 1
        ages.update({block: (now_s + TTL_S, self.requests, -depth) for depth, block in enumerate(unpack_u64(hashes))})
        while len(ages) > min(capacity_blocks or BLOCKS_MAX, BLOCKS_MAX):
            del ages[min(ages, key=ages.__getitem__)]
            self.evicted += 1

    def expire(self, ages: dict[int, tuple[float, int, int]], now_s: float) -> None:
        over = [block for block, (expires_at_s, _, _) in ages.items() if expires_at_s <= now_s]
        self.expired += len(over)
        for block in over:
            del ages[block]

    def forget(self, worker_id: str, now_s: float) -> None:
        for rank in [rank for rank in self.ages if rank.worker_id == worker_id]:
            ages = self.ages.pop(rank)
            self.expire(ages, now_s)
            self.left += len(ages)

    def overlap(self, hashes: bytes, rank: WorkerRank, now_s: float) -> int:
        ages = self.ages.get(rank, {})
        alive = [block in ages and ages[block][0] > now_s for block in unpack_u64(hashes)]
        return [*alive, False].index(False)


def questions(script: list[Step]) -> list[bytes]:
    """Return the chains to ask for: all that were routed, longer ones, and some that were not."""
    routed = {step.path for _, step in script if isinstance(step, Routing)}
    return [chain(path) for path in {*routed, *(((*path, 1)) for path in routed), (1, 2, 1, 2), (3,), ()}]


def run(script: list[Step]) -> tuple[ApproximateIndex, Naive, float]:
    """Do all of it to both, which must never differ in an answer."""
    index, naive, now_s = ApproximateIndex(ApproximateLimits(ttl_s=TTL_S, blocks_max=BLOCKS_MAX)), Naive(), 0.0
    asked = questions(script)
    for advance_s, step in script:
        now_s += advance_s
        match step:
            case Routing(rank, path, capacity_blocks):
                index.routed(rank, chain(path), now_s, capacity_blocks)
                if path:
                    naive.routed(rank, chain(path), now_s, capacity_blocks)
            case Forget(worker_id):
                index.forget(worker_id, now_s)
                naive.forget(worker_id, now_s)
            case Tick():
                index.tick(now_s)
                for ages in naive.ages.values():
                    naive.expire(ages, now_s)
        for hashes in asked:
            assert index.overlap(hashes, RANKS, now_s) == [naive.overlap(hashes, rank, now_s) for rank in RANKS]
    return index, naive, now_s


@given(steps)
@settings(max_examples=examples(300), deadline=None)
def test_every_answer_is_that_of_a_naive_list(script: list[Step]) -> None:
    run(script)


@given(steps)
@settings(deadline=None)
def test_what_is_kept_and_what_went_is_counted_as_a_naive_list_counts_it(script: list[Step]) -> None:
    index, naive, _ = run(script)
    told = index.statistics()
    assert told.blocks == {rank: len(ages) for rank, ages in naive.ages.items() if ages or rank in told.blocks}
    assert (told.expired_blocks_total, told.evicted_blocks_total) == (naive.expired, naive.evicted)
    assert told.left_blocks_total == naive.left
    assert all(blocks <= BLOCKS_MAX for blocks in told.blocks.values())


@pytest.mark.parametrize("seed", range(3))
def test_a_long_run_under_pressure_agrees_with_a_naive_list(seed: int) -> None:
    index, naive = ApproximateIndex(ApproximateLimits(ttl_s=TTL_S, blocks_max=BLOCKS_MAX)), Naive()
    for number in range(1500):
        now_s = number * 0.7
        length = choice_index(seed, 9, 3 * number)
        path = tuple(1 + choice_index(seed, 3, 100 * number + at) for at in range(1 + length))
        rank = RANKS[choice_index(seed, 3, 3 * number + 1)]
        for each in (index, naive):
            each.routed(rank, chain(path), now_s, 0)
        for other in RANKS:
            assert index.overlap(chain(path), (other,), now_s) == [naive.overlap(chain(path), other, now_s)]
    assert index.statistics().evicted_blocks_total == naive.evicted > 100, f"seed {seed}"


# ---------------------------------------------------------------- the harness sees what is wrong

SCRIPT: list[Step] = [
    (0.0, Routing(RANKS[0], (1, 1, 1, 1), 0)),
    (1.0, Routing(RANKS[0], (1, 1, 2), 0)),
    (1.0, Routing(RANKS[0], (2, 2, 2, 2, 2, 2), 0)),
    (1.0, Routing(RANKS[0], (1, 2), 8)),
    (9.5, Routing(RANKS[1], (1, 1), 0)),
    (0.0, Tick()),
    (0.5, Routing(RANKS[0], (1, 1), 0)),
]


@pytest.mark.interpreted
@pytest.mark.planted
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run(SCRIPT)
    monkeypatch.setattr(
        routed_tree, "shared_blocks", lambda stretch, hashes, at: min(len(stretch), len(hashes) - 8 * at) // 8
    )
    monkeypatch.setattr(approximate, "new_routed_tree", PythonRoutedTree)
    with pytest.raises(AssertionError):
        run(SCRIPT)
