"""An index held against a mirror: every verdict, and every kind of difference, over- and undercount apart."""

from random import Random

import pytest

from indexer.follow.checkpoint import RankState
from indexer.follow.question import AnsweredState
from indexer.service.difference import RankVerdict, compare
from kv_protocol import codec
from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock, block_columns
from tests.unit.indexer.life import Life

A0 = WorkerRank("a", 0)
GPU, HOST = 1 << Tier.GPU, 1 << Tier.HOST
ROWS = (HeldBlock(1, None, GPU), HeldBlock(2, 1, GPU | HOST), HeldBlock(3, 2, HOST))


def index(*rows: HeldBlock, epoch: int = 7, seq: int = 5, stale: str = "") -> RankState:
    digests = tuple(SetDigest(row.sequence_hash for row in rows if tier in row.tiers).of_tier(tier) for tier in TIERS)
    return RankState(
        worker_id=A0.worker_id,
        dp_rank=A0.dp_rank,
        epoch=epoch,
        seq=seq,
        logged_seq=seq,
        stale=stale,
        digests=digests,
        chunks=tuple(block_columns(rows, 2)),
    )


def mirror(*rows: HeldBlock, epoch: int = 7, seq: int = 5) -> AnsweredState:
    return AnsweredState(epoch, seq, b"", tuple(block_columns(rows, 2)))


def message(first_seq: int, *events: Event, epoch: int = 7) -> bytes:
    return codec.encode_message([Batch(epoch, first_seq + at, event) for at, event in enumerate(events)])


def differing(verdict: RankVerdict) -> list[tuple[str, int]]:
    return [(each.kind, each.sequence_hash) for each in verdict.examples]


# ---------------------------------------------------------------- verdicts


def test_equal_blocks_at_one_place_are_equal_whatever_their_order() -> None:
    assert compare(A0, index(*ROWS, stale="source"), mirror(ROWS[0], ROWS[2], ROWS[1])) == RankVerdict(
        worker_id="a",
        dp_rank=0,
        verdict="equal",
        stale="source",
        index_epoch=7,
        index_seq=5,
        mirror_epoch=7,
        mirror_seq=5,
        blocks={"gpu": 2, "host": 2, "disk": 0, "external": 0},
    )
    assert compare(A0, index(), mirror()).verdict == "equal"


@pytest.mark.parametrize(
    ("known", "true", "verdict", "reason"),
    [
        (None, mirror(*ROWS), "unknown", "the index does not know it"),
        (index(*ROWS), None, "unanswered", "its mirror does not answer"),
        (index(*ROWS), mirror(*ROWS, epoch=8), "other_epoch", "they are in different epochs of the stream"),
        (index(*ROWS, seq=6), mirror(*ROWS), "beyond", "the index is ahead of its mirror"),
        (index(*ROWS), mirror(*ROWS, seq=6), "behind", "the batches between are not kept, from 6 on"),
    ],
)
def test_what_cannot_be_compared_has_a_verdict_of_its_own(
    known: RankState | None, true: AnsweredState | None, verdict: str, reason: str
) -> None:
    found = compare(A0, known, true)
    assert (found.verdict, found.reason, found.counts) == (verdict, reason, {})


def test_each_kind_of_difference_is_told_with_its_blocks() -> None:
    known = index(ROWS[0], HeldBlock(2, 9, HOST), HeldBlock(4, 1, GPU))
    found = compare(A0, known, mirror(*ROWS))
    assert (found.verdict, found.reason) == ("differs", "1 missing, 1 surplus, 1 media, 1 parent")
    assert differing(found) == [("missing", 3), ("surplus", 4), ("media", 2), ("parent", 2)]
    missing, surplus, media, parent = found.examples
    assert (missing.parent, missing.index_media, missing.mirror_media) == (2, (), ("host",))
    assert (surplus.parent, surplus.index_media, surplus.mirror_media) == (1, ("gpu",), ())
    assert (media.index_media, media.mirror_media) == (("host",), ("gpu", "host"))
    assert (parent.parent, parent.index_parent) == (1, 9)


def test_of_many_differences_the_first_of_each_kind_are_shown_parents_first() -> None:
    chain = [HeldBlock(block, block - 1 or None, GPU) for block in range(1, 101)]
    found = compare(A0, index(HeldBlock(500, None, GPU)), mirror(*chain), examples_max=3)
    assert found.counts == {"missing": 100, "surplus": 1}
    assert differing(found) == [("missing", 1), ("missing", 2), ("missing", 3), ("surplus", 500)]


def test_an_index_whose_own_digest_is_wrong_is_not_equal_though_its_blocks_are() -> None:
    known = index(*ROWS)
    digests = (known.digests[0], SetDigest([99]).of_tier(Tier.HOST), *known.digests[2:])
    wrong = RankState(
        **{field: getattr(known, field) for field in known.__struct_fields__ if field != "digests"}, digests=digests
    )
    found = compare(A0, wrong, mirror(*ROWS))
    assert (found.verdict, found.reason) == ("digest", "the index's own digest is not that of its blocks: host")


# ---------------------------------------------------------------- a mirror that is further


def test_the_batches_between_are_folded_in_before_anything_is_compared() -> None:
    tail = [
        message(4, Stored((77,))),  # applied by the index before, as is the next
        message(5, Stored((78,)), Stored((4, 5), parent=1, start=1, tier=Tier.HOST), Removed((2,), Tier.GPU)),
        message(8, Cleared(Tier.HOST), Stored((2,), parent=1, start=1)),
        message(10, Stored((79,))),  # what the mirror did after it answered
    ]
    assert compare(A0, index(*ROWS), mirror(ROWS[0], HeldBlock(2, 1, GPU), seq=9), tail).verdict == "equal"
    assert compare(A0, index(*ROWS), mirror(*ROWS, seq=9), tail).counts == {"missing": 1, "media": 1}


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ([message(6, Stored((4,))), message(8, Stored((5,)))], "the batches between are not kept, from 7 on"),
        ([message(6, Stored((4,)), epoch=8)], "the batches between are not kept, from 6 on"),
        ([b"garbage"], "the batches between cannot be read: malformed at byte 2"),
    ],
)
def test_batches_between_that_are_not_all_there_leave_the_rank_behind(tail: list[bytes], reason: str) -> None:
    found = compare(A0, index(*ROWS), mirror(*ROWS, seq=8), tail)
    assert (found.verdict, found.reason.startswith(reason)) == ("behind", True), found.reason


@pytest.mark.parametrize("seed", range(20))
def test_a_right_index_is_equal_from_wherever_it_is_brought(seed: int) -> None:
    life = Life(A0, Random(seed), blocks_max=4)
    places, messages = [index(seq=0)], []
    for _ in range(60):
        batch = life.batch()
        messages.append(codec.encode_message([batch]))
        places.append(index(*life.rows(), seq=batch.seq))
    true = mirror(*life.rows(), seq=60)
    assert [compare(A0, place, true, messages).verdict for place in places] == ["equal"] * 61
    late = [index(*places[at - 1].blocks(), seq=at) for at in range(1, 61)]
    lacking = [at for at in range(60) if sorted(places[at].blocks()) != sorted(places[at + 1].blocks())]
    assert lacking, f"seed {seed}"
    assert any(compare(A0, late[at], true, messages).verdict == "differs" for at in lacking), f"seed {seed}"
