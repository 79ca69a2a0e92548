"""How urgently a source is polled, by its polls, and when a rank is known again whose source lost events."""

from worker_agent.events.poll_rules import Drain, Relearning


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


def test_a_loss_lasts_until_all_of_the_source_is_read_and_published() -> None:
    relearning = Relearning()
    assert relearning.missing(0, 3, published_seq=20) == 3
    relearning.on_read(0, 3, last_seq=25)
    assert (relearning.missing(0, 3, published_seq=24), relearning.missing(1, 0, published_seq=24)) == (3, 0)
    relearning.on_read(0, 3, last_seq=99)  # what comes after does not prolong it
    assert relearning.missing(0, 3, published_seq=25) == 0
    assert relearning.missing(0, 5, published_seq=25) == 2  # another loss counts alone


def test_another_loss_before_the_end_counts_with_the_first() -> None:
    relearning = Relearning()
    relearning.on_read(0, 3, last_seq=25)
    assert relearning.missing(0, 5, published_seq=24) == 5
    relearning.on_read(0, 5, last_seq=26)
    assert relearning.missing(0, 5, published_seq=26) == 0


def test_where_nothing_was_lost_nothing_is_missing() -> None:
    relearning = Relearning()
    relearning.on_read(0, 0, last_seq=5)
    assert relearning.missing(0, 0, published_seq=0) == 0
