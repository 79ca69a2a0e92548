"""The columns that decisions read are the views, rank by rank, after whatever was told in whatever order."""

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from indexer.follow.fold import IndexFold, RankView
from indexer.follow.follower import FollowerLimits
from indexer.follow.inputs import Fact, LogConnected, Received, WorkerCame, WorkerGone
from indexer.index.overlap_columns import StatusColumnsCache
from indexer.native.index import NativeIndex
from kv_protocol.codec import pack_u64
from kv_protocol.events import Batch, Cleared, Removed, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.splitmix import splitmix64
from tests.dumped import dump_chunks
from tests.support.amount import examples
from tests.unit.indexer.life import arrived, unreadable

RANKS = tuple(WorkerRank(worker_id, dp_rank) for worker_id in ("a", "b") for dp_rank in (0, 1))
SEEN = (RANKS, RANKS[::-1], RANKS[1:3], (WorkerRank("stranger", 0), *RANKS), ())
"""The tuples that are asked for: the very same ones, again and again."""
PATH = [splitmix64(at) for at in range(6)]
CHAINS: tuple[list[int], ...] = ([], PATH[:2], PATH)

ranks = st.sampled_from(RANKS)
numbers = st.integers(1, 6)
epochs = st.sampled_from((11, 22))
tiers = st.sampled_from(list(Tier))
spans = st.tuples(st.integers(0, 5), numbers)
"""Where in `PATH` a stretch of blocks begins, and how many there are."""


def stored(span: tuple[int, int], tier: Tier) -> Stored:
    first, count = span
    return Stored(tuple(PATH[first : first + count]), PATH[first - 1] if first else None, first, tier)


events = st.one_of(
    st.builds(stored, spans, tiers),
    st.builds(lambda span, tier: Removed(tuple(PATH[span[0] : sum(span)]), tier), spans, tiers),
    st.builds(Cleared, tiers),
)
facts: st.SearchStrategy[Fact] = st.one_of(
    st.builds(lambda rank, epoch, seq, event: arrived(rank, Batch(epoch, seq, event)), ranks, epochs, numbers, events),
    st.builds(
        lambda rank, epoch, seq, stale: Received(rank, Heartbeat(instance="i", epoch=epoch, last_seq=seq, stale=stale)),
        ranks,
        epochs,
        numbers,
        st.sampled_from(("", "overflow")),
    ),
    st.builds(
        lambda rank, request_id, epoch, seq: Received(rank, dump_chunks(request_id, epoch, seq, ())[0]),
        ranks,
        numbers,
        epochs,
        numbers,
    ),
    st.builds(unreadable, ranks),
    st.builds(WorkerCame, st.sampled_from(("a", "b")), st.sampled_from((0, 10))),
    st.builds(WorkerGone, st.sampled_from(("a", "b"))),
    st.just(LogConnected(False)),
    st.just(LogConnected(True)),
)
Step = tuple[Fact | None, float]
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.none() | facts, st.sampled_from((0.0, 0.25, 3.0))), max_size=30
)
"""What happens, and how long after the one before; None: time is let pass."""


def by_columns(fold: IndexFold, chain: list[int], asked: tuple[WorkerRank, ...]) -> list[RankView]:
    depths, *standing = fold.columns(pack_u64(chain), asked)
    assert depths.shape == (4, len(asked))
    rows = zip(map(tuple, depths.T.tolist()), *standing, strict=True)
    return [RankView(*row) for row in rows]


def differences(told: list[Step]) -> list[str]:
    """Return where the columns are not the views."""
    fold = IndexFold(NativeIndex(), FollowerLimits(behind_s=0.5, answer_s=0.5, early_batches_max=8), gone_s=4.0)
    now_s, found = 0.0, list[str]()
    for fact, later_s in told:
        now_s += later_s
        if fact is None:
            fold.tick(now_s)
        else:
            fold.apply(fact, now_s)
        for asked in SEEN:
            for chain in CHAINS:
                views, columns = fold.overlap(chain, asked), by_columns(fold, chain, asked)
                found += [f"after {fact}: {columns}, not {views}"] if columns != views else []
    return found


@settings(max_examples=examples(60))
@given(steps)
def test_the_columns_are_the_views_after_any_facts_in_any_order(told: list[Step]) -> None:
    assert differences(told) == []


def test_what_was_answered_stays_as_it_was_but_for_the_depths_of_the_same_tuple() -> None:
    fold = IndexFold(NativeIndex())
    fold.apply(arrived(RANKS[0], Batch(11, 1, Stored(tuple(PATH[:3])))), 0.0)
    before = fold.columns(pack_u64(PATH), RANKS)
    kept, depths = before[1:], before.depths.tolist()
    fold.apply(arrived(RANKS[0], Batch(11, 2, Removed((PATH[0],)))), 0.0)
    fold.columns(pack_u64(PATH), RANKS[::-1])
    assert (before[1:], before.depths.tolist()) == (kept, depths)
    after = fold.columns(pack_u64(PATH), RANKS)
    assert before[1:] == kept
    assert after.depths is before.depths
    assert not after.depths.any()


def test_while_nothing_is_told_the_same_objects_answer() -> None:
    fold = IndexFold(NativeIndex())
    fold.apply(arrived(RANKS[0], Batch(11, 1, Stored(tuple(PATH[:3])))), 0.0)
    before = fold.columns(pack_u64(PATH), RANKS)
    fold.apply(arrived(RANKS[0], Batch(11, 2, Removed((PATH[0],)))), 0.0)
    after = fold.columns(pack_u64(PATH), RANKS)
    assert (after.epochs is before.epochs, after.doubts is before.doubts) == (True, True)
    assert (before.seqs, after.seqs) == ((1, 0, 0, 0), (2, 0, 0, 0))


def test_however_many_tuples_are_asked_for_a_bounded_number_is_remembered() -> None:
    cache = StatusColumnsCache(lambda _: 0, lambda _: (0, 0, ""))
    for number in range(1000):
        cache.of((WorkerRank(f"w{number}", 0),))
    assert len(cache) == 64


@pytest.mark.planted
def test_not_looking_again_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _is_found()
    monkeypatch.setattr(StatusColumnsCache, "touch", lambda *_: None)
    assert _is_found()


FIRST_FOUND = settings(max_examples=examples(300), database=None, derandomize=True, phases=[Phase.generate])


def _is_found() -> bool:
    def is_wrong(told: list[Step]) -> bool:
        try:
            return bool(differences(told))
        except (AssertionError, IndexError, KeyError):
            return True

    try:
        find(steps, is_wrong, settings=FIRST_FOUND)
    except NoSuchExample:
        return False
    return True
