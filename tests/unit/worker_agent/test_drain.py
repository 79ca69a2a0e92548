"""How urgently a source is polled, by what its polls brought."""

from worker_agent.events.poll_rules import Drain


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
