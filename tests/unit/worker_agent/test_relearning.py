"""When a rank is known again whose source lost events."""

from worker_agent.events.poll_rules import DrainedMoment, Relearning


def missing(
    relearning: Relearning, lost: int, drained: DrainedMoment, *, read: int, last_seq: int, published_seq: int
) -> int:
    relearning.on_progress(0, drained, read, last_seq, published_seq)
    return relearning.missing(0, lost)


def test_a_loss_lasts_until_the_source_was_dry_and_all_of_it_is_read_and_published() -> None:
    relearning, before, dry = Relearning(), DrainedMoment(4, {}), DrainedMoment(9, {0: 3})
    assert [
        missing(relearning, 3, before, read=9, last_seq=20, published_seq=20),
        missing(relearning, 3, dry, read=8, last_seq=20, published_seq=20),
        missing(relearning, 3, dry, read=9, last_seq=25, published_seq=24),
        missing(relearning, 3, dry, read=11, last_seq=30, published_seq=25),
    ] == [3, 3, 3, 0]


def test_what_comes_after_does_not_prolong_it() -> None:
    relearning = Relearning()
    assert missing(relearning, 3, DrainedMoment(9, {0: 3}), read=9, last_seq=25, published_seq=20) == 3
    assert missing(relearning, 3, DrainedMoment(50, {0: 3}), read=40, last_seq=99, published_seq=25) == 0


def test_another_loss_before_the_end_counts_with_the_first() -> None:
    relearning = Relearning()
    missing(relearning, 3, DrainedMoment(9, {0: 3}), read=9, last_seq=25, published_seq=20)
    assert missing(relearning, 5, DrainedMoment(9, {0: 3}), read=12, last_seq=26, published_seq=24) == 5
    assert missing(relearning, 5, DrainedMoment(12, {0: 5}), read=12, last_seq=26, published_seq=26) == 0


def test_another_loss_after_the_end_counts_alone() -> None:
    relearning, dry = Relearning(), DrainedMoment(9, {0: 3})
    assert missing(relearning, 3, dry, read=9, last_seq=25, published_seq=25) == 0
    assert missing(relearning, 5, dry, read=9, last_seq=25, published_seq=25) == 2


def test_ranks_lose_each_for_themselves() -> None:
    relearning = Relearning()
    relearning.on_progress(1, DrainedMoment(9, {0: 3}), 9, 5, 5)
    assert (relearning.missing(0, 3), relearning.missing(1, 0)) == (3, 0)


def test_where_nothing_was_lost_nothing_is_missing() -> None:
    assert missing(Relearning(), 0, DrainedMoment(0, {}), read=0, last_seq=5, published_seq=0) == 0
