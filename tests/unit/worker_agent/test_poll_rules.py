"""How urgently a source is polled, by its polls."""

from worker_agent.events.poll_rules import Pace


def turn(pace: Pace, *polls: int, is_lossy: bool = False) -> bool:
    """One turn in which polls bring so many events each, until there are no more, or it polls no further."""
    left = list(polls)
    while pace.on_poll(left.pop(0)):
        assert left, "it polls once more than was said"
    assert not left, f"it polls no more, {left} are left"
    return pace.on_cycle(is_lossy=is_lossy)


def test_at_normal_pace_a_turn_is_one_poll_that_waits() -> None:
    pace = Pace(100)
    for events in (0, 1, 50):
        turn(pace, events)
        assert not pace.is_pressed
    assert pace.pressed_cycles_total == 0


def test_a_poll_of_more_than_half_the_buffer_presses_until_a_poll_brings_nothing() -> None:
    pace = Pace(100)
    assert turn(pace, 51, 3, 0)
    assert not pace.is_pressed
    assert pace.pressed_cycles_total == 1


def test_a_loss_presses_from_the_next_turn_on() -> None:
    pace = Pace(100)
    turn(pace, 7, is_lossy=True)
    assert pace.is_pressed
    assert turn(pace, 1, 1, 0)
    assert not pace.is_pressed


def test_as_much_as_the_buffer_holds_is_taken_before_it_is_encoded_and_no_more() -> None:
    pace = Pace(100)
    assert not turn(pace, 60, 30, 10)
    assert pace.is_pressed
    assert turn(pace, 90, 0)


def test_a_turn_that_ran_dry_and_found_a_loss_is_not_all_there_was() -> None:
    pace = Pace(100)
    assert not turn(pace, 100, is_lossy=True)
    assert not turn(pace, 5, 0, is_lossy=True)
    assert pace.is_pressed
    assert turn(pace, 0)
    assert not pace.is_pressed


def test_a_poll_that_waited_and_brought_nothing_is_all_there_was() -> None:
    assert turn(Pace(100), 0)
    assert not turn(Pace(100), 1)
