"""How urgently a source is polled, by its polls."""

from worker_agent.events.poll_rules import Pace


def test_at_normal_pace_polls_wait() -> None:
    pace = Pace(100)
    for events in (1, 50, 0):
        assert pace.on_poll(events, is_lossy=False) is (events == 0)
        assert not pace.is_pressed
    assert (pace.polls_total, pace.pressed_polls_total, pace.largest_ratio) == (3, 0, 0.5)


def test_a_poll_of_more_than_half_the_buffer_presses_until_a_poll_brings_nothing() -> None:
    pace = Pace(100)
    for events in (51, 3):
        assert not pace.on_poll(events, is_lossy=False)
        assert pace.is_pressed
    assert pace.on_poll(0, is_lossy=False)
    assert (pace.is_pressed, pace.pressed_polls_total, pace.largest_ratio) == (False, 2, 0.51)


def test_a_loss_presses_until_a_poll_brings_nothing_and_is_not_all_there_was() -> None:
    for pace in (Pace(100), Pace()):
        for events in (7, 0):
            assert not pace.on_poll(events, is_lossy=True)
            assert pace.is_pressed
        assert not pace.on_poll(1, is_lossy=False)
        assert pace.is_pressed
        assert pace.on_poll(0, is_lossy=False)
        assert not pace.is_pressed
