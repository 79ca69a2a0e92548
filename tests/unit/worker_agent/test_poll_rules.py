"""How urgently a source is polled, by its polls, and when a rank is known again whose source lost events."""

from worker_agent.events.poll_rules import Drain, DrainedMoment, Relearning


def turn(drain: Drain, *polls: int, is_lossy: bool = False) -> bool:
    """One turn in which polls bring so many events each, until there are no more, or it polls no further."""
    left = list(polls)
    while drain.on_poll(left.pop(0)):
        assert left, "it polls once more than was said"
    assert not left, f"it polls no more, {left} are left"
    return drain.on_cycle(is_lossy=is_lossy)


def test_at_normal_pace_a_turn_is_one_poll_that_waits() -> None:
    drain = Drain(100)
    for events in (0, 1, 50):
        turn(drain, events)
        assert not drain.is_pressed
    assert drain.pressed_cycles_total == 0


def test_a_poll_of_more_than_half_the_buffer_presses_until_a_poll_brings_nothing() -> None:
    drain = Drain(100)
    assert turn(drain, 51, 3, 0)
    assert not drain.is_pressed
    assert drain.pressed_cycles_total == 1


def test_a_loss_presses_from_the_next_turn_on() -> None:
    drain = Drain(100)
    turn(drain, 7, is_lossy=True)
    assert drain.is_pressed
    assert turn(drain, 1, 1, 0)
    assert not drain.is_pressed


def test_as_much_as_the_buffer_holds_is_taken_before_it_is_encoded_and_no_more() -> None:
    drain = Drain(100)
    assert not turn(drain, 60, 30, 10)
    assert drain.is_pressed
    assert turn(drain, 90, 0)


def test_a_turn_that_ran_dry_and_found_a_loss_is_not_all_there_was() -> None:
    drain = Drain(100)
    assert not turn(drain, 100, is_lossy=True)
    assert not turn(drain, 5, 0, is_lossy=True)
    assert drain.is_pressed
    assert turn(drain, 0)
    assert not drain.is_pressed


def test_a_poll_that_waited_and_brought_nothing_is_all_there_was() -> None:
    assert turn(Drain(100), 0)
    assert not turn(Drain(100), 1)


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
