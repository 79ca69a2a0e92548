"""Facts in, index changes inside, questions out: ranks that come, fall behind, fall silent and leave."""

from collections.abc import Iterable, Sequence
from random import Random

import pytest

from indexer.follow.fold import TICK_S, IndexFold, RankView
from indexer.follow.follower import FollowerLimits
from indexer.follow.inputs import LogConnected, Question, Received, WorkerGone
from indexer.index.prefix_index import RANKS_MAX
from indexer.native.index import NativeIndex
from kv_protocol.digest import SetDigest, bucket_table
from kv_protocol.events import Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock, RecoverRequest
from kv_protocol.splitmix import splitmix64
from tests.dumped import dump_chunks
from tests.support.amount import examples
from tests.unit.indexer.life import EPOCH, Life, arrived, batch, pulse, told, unreadable

A0, A1, B0, C0 = WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0), WorkerRank("c", 0)
LATER = 22
GONE_S = 5.0
PATH = [splitmix64(at) for at in range(6)]
NEVER_HEARD = RankView((0, 0, 0, 0), 0, 0, "never_heard")


def make_fold() -> IndexFold:
    limits = FollowerLimits(gap_s=0.0, behind_s=2.0, answer_s=2.0, early_batches_max=64)
    return IndexFold(NativeIndex(), limits, gone_s=GONE_S)


def path(first: int = 0, last: int = len(PATH), tier: Tier = Tier.GPU) -> Stored:
    """Return the store of PATH[first:last]."""
    return Stored(tuple(PATH[first:last]), PATH[first - 1] if first else None, first, tier)


def dump(
    rank: WorkerRank, request_id: int, last_seq: int, blocks: Iterable[HeldBlock] = (), epoch: int = EPOCH
) -> Received:
    (chunk,) = dump_chunks(request_id, epoch, last_seq, blocks)
    return Received(rank, chunk)


def asks_repair(rank: WorkerRank, request_id: int, after_seq: int, *gpu: int, host: Sequence[int] = ()) -> Question:
    """Return the question for a repair of a rank of which the index holds these blocks."""
    table = bucket_table(SetDigest(held).buckets for held in (gpu, host, (), ()))
    return Question(rank, RecoverRequest(request_id, EPOCH, after_seq, table))


def depths(fold: IndexFold, *ranks: WorkerRank) -> list[tuple[int, ...]]:
    return [view.overlap_blocks for view in fold.overlap(PATH, ranks)]


@pytest.fixture
def fold() -> IndexFold:
    return make_fold()


# ------------------------------------------------------------------------------------------------- facts to overlap


def test_what_is_stored_is_the_overlap_in_the_order_that_was_asked(fold: IndexFold) -> None:
    assert told(fold, batch(A0, 1, path()), batch(A1, 1, path(0, 2)), batch(B0, 1, path(0, 4, Tier.HOST))) == []
    views = fold.overlap(PATH, [B0, C0, A0, A1])
    assert views == [
        RankView((0, 4, 4, 4), EPOCH, 1, ""),
        NEVER_HEARD,
        RankView((6, 6, 6, 6), EPOCH, 1, ""),
        RankView((2, 2, 2, 2), EPOCH, 1, ""),
    ]
    assert fold.overlap(PATH[:3], [A0, A0])[1].overlap_blocks == (3, 3, 3, 3)
    assert fold.overlap([], [A0]) == [RankView((0, 0, 0, 0), EPOCH, 1, "")]
    assert fold.overlap(PATH, []) == []


def test_a_gap_is_a_question_to_that_rank_and_its_dump_closes_it(fold: IndexFold) -> None:
    told(fold, batch(A0, 1, path(0, 2)), batch(B0, 1, path(0, 2)))
    assert told(fold, batch(A0, 3, path(4, 6))) == [Question(A0, RecoverRequest(1, EPOCH, 1))]
    assert [view.stale for view in fold.overlap(PATH, [A0, B0])] == ["resyncing", ""]
    assert depths(fold, A0) == [(2, 2, 2, 2)], "the last known set goes on to be read"
    told(fold, batch(A0, 4, path(5, 6)))
    rows = [HeldBlock(PATH[at], PATH[at - 1] if at else None, 1) for at in range(5)]
    assert told(fold, dump(A0, 1, 3, rows)) == []
    assert fold.overlap(PATH, [A0]) == [RankView((6, 6, 6, 6), EPOCH, 4, "")]


def test_a_heartbeat_that_proves_the_set_asks_nothing_and_one_that_does_not_asks(fold: IndexFold) -> None:
    told(fold, batch(A0, 1, path(0, 3)), batch(A0, 2, path(0, 1, Tier.HOST)))
    assert told(fold, pulse(A0, 2, *PATH[:3], host=PATH[:1])) == []
    assert told(fold, pulse(A0, 2, *PATH[:3], host=PATH[1:2])) == [asks_repair(A0, 1, 2, *PATH[:3], host=PATH[:1])]
    assert told(fold, pulse(A0, 2)) == [], "one question is in flight"
    told(fold, dump(A0, 1, 2))
    assert told(fold, pulse(A0, 2)) == []
    assert fold.statistics().streams[A0].counts.digest_mismatches == 1


def test_a_block_whose_parent_is_unknown_is_held_as_at_its_source(fold: IndexFold) -> None:
    told(fold, batch(A0, 1, path(2, 4)))
    assert told(fold, pulse(A0, 1, *PATH[2:4])) == []
    assert depths(fold, A0) == [(0, 0, 0, 0)]
    told(fold, batch(A0, 2, path(0, 2)))
    assert depths(fold, A0) == [(4, 4, 4, 4)]


def test_a_restart_forgets_the_former_life_of_that_rank_alone(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0), pulse(A1, 0), batch(A0, 1, path()), batch(A1, 1, path()))
    assert told(fold, pulse(A0, 0, epoch=LATER)) == []
    assert depths(fold, A0, A1) == [(0, 0, 0, 0), (6, 6, 6, 6)]
    told(fold, batch(A0, 2, path()), batch(A0, 1, path(0, 1), LATER))
    assert fold.overlap(PATH, [A0]) == [RankView((1, 1, 1, 1), LATER, 1, "")]


def test_what_is_wrong_with_a_rank_is_in_its_view(fold: IndexFold) -> None:
    told(fold, batch(A0, 1, path()), pulse(A0, 1, *PATH, stale="engine event not read"), pulse(B0, 4), unreadable(C0))
    assert [view.stale for view in fold.overlap(PATH, [A0, A1, B0, C0])] == [
        "source",
        "never_heard",
        "behind",
        "resyncing",
    ]


# ------------------------------------------------------------------------------------------------- questions


def test_bytes_that_could_not_be_read_make_the_rank_stale_and_ask(fold: IndexFold) -> None:
    told(fold, batch(A0, 1, path()), batch(B0, 1, path()))
    assert told(fold, unreadable(A0)) == [asks_repair(A0, 1, 1, *PATH)]
    assert [view.stale for view in fold.overlap(PATH, [A0, B0])] == ["resyncing", ""]
    assert told(fold, unreadable(A0), unreadable(B0)) == [asks_repair(B0, 2, 1, *PATH)]
    assert fold.statistics().refused_messages_total == 3
    told(fold, dump(A0, 1, 1), pulse(A0, 1))
    assert told(fold, unreadable(A0)) == [asks_repair(A0, 3, 1)]


# ------------------------------------------------------------------------------------------------- silence


def test_a_late_tick_makes_no_rank_alive_in_the_future(fold: IndexFold) -> None:
    fold.tick(1.0)
    told(fold, pulse(A0, 0), now_s=100.0)
    fold.tick(100.1)
    for passed_s in range(1, int(GONE_S) + 2):
        fold.tick(100.1 + passed_s)
    assert fold.ranks() == []


def test_batches_missing_in_the_log_are_requested_though_every_tick_is_a_little_late(fold: IndexFold) -> None:
    told(fold, pulse(A0, 1, *PATH))
    asked = [question for tick in range(1, 4) for question in fold.tick(tick * (TICK_S + 0.01))]
    assert asked == [Question(A0, RecoverRequest(1, EPOCH, 0))]


def test_a_first_tick_at_0_is_one(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0))
    fold.tick(0.0)
    fold.tick(GONE_S + 1.0)
    assert fold.ranks() == [A0]


def test_a_silent_rank_is_forgotten_after_gone_s(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0), batch(A0, 1, path()), pulse(B0, 0), batch(B0, 1, path()))
    for now_s in (1.0, 2.0, 3.0, 4.0):
        told(fold, pulse(B0, 1, *PATH), now_s=now_s)
        assert fold.tick(now_s + 0.9) == []
    assert fold.ranks() == [A0, B0]
    assert fold.tick(GONE_S) == []
    assert fold.ranks() == [B0]
    assert fold.overlap(PATH, [A0, B0]) == [NEVER_HEARD, RankView((6, 6, 6, 6), EPOCH, 1, "")]
    assert (fold.held(A0), list(fold.statistics().streams)) == ([], [B0])


def test_events_from_the_log_are_no_sign_of_life(fold: IndexFold) -> None:
    for seq in range(1, 6):
        told(fold, batch(A0, seq, path(0, seq)), now_s=seq - 1.0)
    fold.tick(GONE_S - 0.1)
    assert fold.ranks() == [A0]
    fold.tick(GONE_S)
    assert fold.ranks() == []


def test_no_worker_is_forgotten_while_the_log_is_lost(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0), batch(A0, 1, path()))
    told(fold, LogConnected(False), now_s=1)
    assert fold.tick(1000.0) == []
    assert depths(fold, A0) == [(6, 6, 6, 6)]
    told(fold, LogConnected(True), now_s=1000.0)
    for passed_s in (1.0, 2.0, 3.0, 4.0, GONE_S - 0.1):
        fold.tick(1000.0 + passed_s)
    assert fold.ranks() == [A0]
    fold.tick(1000.0 + GONE_S)
    assert fold.ranks() == []


def test_a_suspended_process_forgets_no_worker_when_it_resumes(fold: IndexFold) -> None:
    told(fold, pulse(A0, 0))
    fold.tick(0.5)
    fold.tick(60.0)
    assert fold.ranks() == [A0]
    for passed_s in range(1, int(GONE_S)):
        fold.tick(60.0 + passed_s)
    assert fold.ranks() == []


def test_a_dump_is_a_sign_of_life(fold: IndexFold) -> None:
    told(fold, pulse(A0, 1), batch(A0, 2, path()))
    assert told(fold, dump(A0, 1, 2), now_s=GONE_S - 0.5) == []
    fold.tick(GONE_S)
    assert fold.ranks() == [A0]


# ------------------------------------------------------------------------------------------------- leaving


def test_a_worker_that_left_takes_all_its_ranks_and_no_others(fold: IndexFold) -> None:
    told(fold, *(batch(rank, 1, path()) for rank in (A0, B0, A1)))
    assert told(fold, WorkerGone("a")) == []
    assert fold.ranks() == [B0]
    assert depths(fold, A0, A1, B0) == [(0, 0, 0, 0), (0, 0, 0, 0), (6, 6, 6, 6)]
    assert told(fold, WorkerGone("a"), WorkerGone("unknown")) == []
    told(fold, WorkerGone("b"))
    now = fold.statistics().index
    assert (now.ranks, now.nodes, now.held_blocks) == (0, 0, 0)


def test_the_late_last_word_of_a_former_life_forgets_no_living_one(fold: IndexFold) -> None:
    told(fold, batch(A0, 1, path(0, 2)), pulse(A0, 1, *PATH[:2]))
    told(fold, WorkerGone("a", "former"))
    assert fold.ranks() == [A0]
    told(fold, WorkerGone("a", "i"))
    assert fold.ranks() == []


def test_the_late_pulse_of_a_dead_life_does_not_name_the_living_one(fold: IndexFold) -> None:
    for epoch, instance in ((1, "former"), (2, "living"), (1, "former")):
        told(fold, Received(A0, Heartbeat(instance=instance, epoch=epoch, last_seq=0)))
    told(fold, WorkerGone("a", "former"))
    assert A0 in fold.ranks()
    told(fold, WorkerGone("a", "living"))
    assert A0 not in fold.ranks()


def test_a_rank_whose_life_is_not_known_yet_leaves_with_its_worker(fold: IndexFold) -> None:
    told(fold, batch(A0, 1, path(0, 2)), WorkerGone("a", "i"))
    assert fold.ranks() == []


def test_a_late_dump_for_a_worker_that_left_brings_nothing_back(fold: IndexFold) -> None:
    told(fold, unreadable(A0), WorkerGone("a"))
    assert told(fold, dump(A0, 1, 3, [HeldBlock(PATH[0], None, 1)])) == []
    assert (depths(fold, A0), fold.statistics().index.nodes) == ([(0, 0, 0, 0)], 0)


@pytest.mark.parametrize("end", ["left", "silent"])
def test_a_rank_in_a_reused_slot_has_no_blocks_of_the_former_rank(fold: IndexFold, end: str) -> None:
    told(fold, batch(A0, 1, path()), batch(A0, 2, Stored((77,), 76, 1)), pulse(B0, 0), now_s=0)
    if end == "left":
        told(fold, WorkerGone("a"))
    else:
        told(fold, pulse(B0, 0), now_s=GONE_S)
        fold.tick(GONE_S)
    told(fold, pulse(C0, 0), now_s=GONE_S)
    assert fold.ranks() == [B0, C0]
    assert (depths(fold, B0, C0), fold.held(C0)) == ([(0, 0, 0, 0)] * 2, [])
    assert told(fold, pulse(C0, 0), now_s=GONE_S) == [], "the digests are those of an empty set"
    told(fold, batch(B0, 1, Stored((76,))), now_s=GONE_S)
    assert fold.held(C0) == []


def test_ranks_come_and_go_without_end_and_nothing_stays_behind(fold: IndexFold) -> None:
    for life in range(200):
        rank = WorkerRank(f"w{life}", life % 3)
        told(fold, pulse(rank, 0), batch(rank, 1, path(0, 1 + life % 6)), batch(rank, 2, path(5, 6)))
        if life >= 10:
            told(fold, WorkerGone(f"w{life - 10}"))
        views = fold.overlap(PATH[:5], [WorkerRank(f"w{each}", each % 3) for each in range(life + 1)])
        assert [view.overlap_blocks[0] for view in views[-10:]] == [
            min(5, 1 + each % 6) for each in range(max(0, life - 9), life + 1)
        ]
        assert not any(view.overlap_blocks[3] for view in views[:-10])
    for life in range(190, 200):
        told(fold, WorkerGone(f"w{life}"))
    now = fold.statistics()
    assert (now.index.ranks, now.index.nodes, now.streams) == (0, 0, {})


def test_ranks_beyond_the_bound_are_refused_and_counted_until_there_is_room(fold: IndexFold) -> None:
    ranks = [WorkerRank(f"w{at}", 0) for at in range(RANKS_MAX)]
    told(fold, *(pulse(rank, 0) for rank in ranks))
    assert told(fold, pulse(A0, 0), batch(A0, 2, path()), unreadable(A0)) == []
    assert (len(fold.ranks()), fold.statistics().refused_rank_facts_total) == (RANKS_MAX, 3)
    assert fold.overlap(PATH, [A0]) == [RankView((0, 0, 0, 0), 0, 0, "refused")]
    told(fold, batch(ranks[-1], 1, path()))
    assert depths(fold, ranks[-1], ranks[0]) == [(6, 6, 6, 6), (0, 0, 0, 0)]
    told(fold, WorkerGone("w7"), batch(A0, 1, path(0, 2)))
    assert (depths(fold, A0), len(fold.ranks())) == ([(2, 2, 2, 2)], RANKS_MAX)


# ------------------------------------------------------------------------------------------------- all together


@pytest.mark.parametrize("seed", range(examples(30, least=8)))
def test_whatever_is_lost_the_index_is_what_the_workers_hold_once_they_were_heard(fold: IndexFold, seed: int) -> None:
    random = Random(seed)
    lives = {rank: Life(rank, random) for rank in (A0, A1, B0)}
    questions: list[Question] = []
    for step in range(240):
        now_s, is_faulty = step / 4, step < 200
        for life in lives.values():
            for fact in [arrived(life.rank, life.batch()) for _ in range(random.randrange(3))]:
                if not is_faulty or random.random() < 0.9:
                    questions += fold.apply(fact, now_s)
            if step % 4 == 0:
                questions += fold.apply(life.beat(), now_s)
        for question in questions:
            if not is_faulty or random.random() < 0.7:
                assert told(fold, *lives[question.rank].answer(question), now_s=now_s) == []
        questions = fold.tick(now_s)
    now_s = 60.0
    assert questions == []
    assert [fold.apply(life.beat(), now_s) for life in lives.values()] == [[], [], []]
    for rank, life in lives.items():
        assert set(fold.held(rank)) == set(life.rows())
        assert fold.overlap((), [rank]) == [RankView((0, 0, 0, 0), life.epoch, life.seq, "")]
    now = fold.statistics().index
    assert now.parent_conflicts_total == 0
    assert now.held_blocks == sum(len(life.held) for life in lives.values())


def test_the_same_facts_in_the_same_order_give_the_same_state() -> None:
    folds = [make_fold(), make_fold()]
    outcomes = []
    for fold in folds:
        random = Random(5)
        life, other = Life(A0, random), Life(B0, random)
        said: list[list[Question]] = []
        for step in range(300):
            teller = life if step % 2 else other
            fact = arrived(teller.rank, teller.batch())
            said += [fold.apply(fact, step / 10)] if step % 11 else [fold.tick(step / 10)]
        outcomes.append((said, fold.statistics(), fold.held(A0), fold.held(B0)))
    assert outcomes[0] == outcomes[1]
    assert any(outcomes[0][0])
