"""Reading hop A: in order, without holes, once each; and when a hole is a loss."""

import pytest

from worker_agent.core import source_cursor
from worker_agent.core.source_cursor import Delivery, SourceCursor

NOTHING = Delivery()
LONG_AGO_S, NOW_S = 0.0, 100.0


def payload(sequence: int) -> bytes:
    return f"payload {sequence}".encode()


def delivered(*sequences: int, lost: bool = False) -> Delivery:
    return Delivery(tuple((sequence, payload(sequence)) for sequence in sequences), lost)


def live(cursor: SourceCursor, sequence: int, now_s: float = NOW_S) -> Delivery:
    return cursor.on_live(sequence, payload(sequence), now_s)


def replayed(cursor: SourceCursor, sequence: int) -> Delivery:
    return cursor.on_replayed(sequence, payload(sequence))


def read_up_to(sequence: int) -> SourceCursor:
    """Return a cursor that has read everything before `sequence`, without a question."""
    cursor = SourceCursor()
    for earlier in range(sequence):
        live(cursor, earlier)
    return cursor


# -------------------------------------------------------------------- the table, row by row
def test_the_expected_frame_is_delivered() -> None:
    cursor = SourceCursor()
    assert [live(cursor, sequence) for sequence in range(3)] == [delivered(0), delivered(1), delivered(2)]
    assert (cursor.expected, cursor.has_hole, cursor.gaps_total) == (3, False, 0)


def test_a_frame_beyond_the_expected_one_is_kept_and_a_replay_is_due_from_there() -> None:
    cursor = read_up_to(2)
    assert live(cursor, 4) == NOTHING
    assert (cursor.has_hole, cursor.gaps_total, cursor.ask_from(NOW_S)) == (True, 1, 2)


def test_the_expected_frame_brings_what_waited_behind_it() -> None:
    cursor = read_up_to(2)
    live(cursor, 4)
    live(cursor, 3)
    live(cursor, 6)
    assert live(cursor, 2) == delivered(2, 3, 4)
    assert (cursor.expected, cursor.has_hole) == (5, True)


@pytest.mark.parametrize("sequence", [0, 1, 2, 5])
def test_a_frame_that_came_before_is_a_duplicate(sequence: int) -> None:
    cursor = read_up_to(3)
    live(cursor, 5)
    assert live(cursor, sequence) == NOTHING
    assert replayed(cursor, sequence) == NOTHING
    assert cursor.duplicates_total == 2
    assert live(cursor, 3) == delivered(3)


def test_a_replay_fills_the_hole_in_order() -> None:
    cursor = read_up_to(2)
    live(cursor, 5)
    assert cursor.ask_from(NOW_S) == 2
    assert [replayed(cursor, sequence) for sequence in (2, 3, 4, 5)] == [
        delivered(2),
        delivered(3),
        delivered(4, 5),
        NOTHING,
    ]
    assert cursor.on_replay_end(NOW_S) == NOTHING
    assert (cursor.expected, cursor.has_hole, cursor.lost_total, cursor.replays_total) == (6, False, 0, 1)


def test_a_hole_that_the_replay_did_not_fill_is_a_loss_and_reading_goes_on_behind_it() -> None:
    cursor = read_up_to(2)
    live(cursor, 4)
    live(cursor, 5)
    cursor.ask_from(NOW_S)
    live(cursor, 7)
    assert cursor.on_replay_end(NOW_S) == delivered(4, 5, lost=True)
    assert (cursor.expected, cursor.has_hole, cursor.lost_total) == (6, True, 1)
    assert cursor.ask_from(NOW_S) == 6


def test_several_holes_are_one_loss_and_what_lies_between_them_is_of_no_use() -> None:
    cursor = read_up_to(2)
    for sequence in (3, 5, 8, 9):
        live(cursor, sequence)
    cursor.ask_from(NOW_S)
    live(cursor, 10)
    live(cursor, 12)
    assert cursor.on_replay_end(NOW_S) == delivered(8, 9, 10, lost=True)
    assert (cursor.expected, cursor.lost_total) == (11, 1)
    assert live(cursor, 11) == delivered(11, 12)
    assert not cursor.has_hole


def test_a_replay_that_begins_beyond_what_was_asked_shows_the_loss() -> None:
    cursor = SourceCursor()
    assert cursor.ask_from(NOW_S) == 0
    assert (replayed(cursor, 7), replayed(cursor, 8)) == (NOTHING, NOTHING)
    assert cursor.on_replay_end(NOW_S) == delivered(7, 8, lost=True)


def test_a_hole_younger_than_the_answer_is_no_loss_but_asked_again() -> None:
    cursor = read_up_to(2)
    live(cursor, 3)
    assert cursor.ask_from(NOW_S) == 2
    assert replayed(cursor, 2) == delivered(2, 3)
    live(cursor, 5)  # 4 was published after the answer was made, and lost on its way
    assert cursor.on_replay_end(NOW_S) == NOTHING
    assert (cursor.lost_total, cursor.ask_from(NOW_S)) == (0, 4)
    assert replayed(cursor, 4) == delivered(4, 5)
    assert cursor.on_replay_end(NOW_S) == NOTHING


def test_a_hole_that_opened_after_a_question_into_the_silence_is_no_loss() -> None:
    cursor = read_up_to(2)
    assert cursor.ask_from(NOW_S + 10) == 2
    live(cursor, 3, NOW_S + 10)
    assert cursor.on_replay_end(NOW_S + 10) == NOTHING
    assert cursor.ask_from(NOW_S + 10) == 2


# -------------------------------------------------------------------- questions
def test_the_first_question_is_due_at_once_for_what_was_published_before_we_listened() -> None:
    assert SourceCursor().ask_from(0.0) == 0


def test_silence_asks_once_each_idle_time() -> None:
    cursor = SourceCursor(idle_s=1.0)
    live(cursor, 0, NOW_S)
    assert cursor.ask_from(NOW_S + 0.9) is None
    assert cursor.ask_from(NOW_S + 1.0) == 1
    cursor.on_replay_end(NOW_S + 1.1)
    assert cursor.ask_from(NOW_S + 2.0) is None
    assert cursor.ask_from(NOW_S + 2.2) == 1


def test_messages_put_the_question_off() -> None:
    cursor = SourceCursor(idle_s=1.0)
    for sequence in range(5):
        live(cursor, sequence, NOW_S + sequence * 0.9)
        assert cursor.ask_from(NOW_S + sequence * 0.9 + 0.89) is None


def test_one_replay_is_in_flight_and_asked_again_when_it_does_not_end_in_time() -> None:
    cursor = SourceCursor(answer_s=2.0)
    live(cursor, 3)
    assert cursor.ask_from(NOW_S) == 0
    live(cursor, 5)
    assert cursor.ask_from(NOW_S + 1.9) is None
    assert replayed(cursor, 0) == delivered(0)
    assert cursor.ask_from(NOW_S + 2.0) == 1
    assert cursor.replays_total == 2


def test_the_late_end_of_an_unanswered_question_is_held_against_its_own_time() -> None:
    cursor = read_up_to(2)
    live(cursor, 3)
    assert cursor.ask_from(NOW_S) == 2
    replayed(cursor, 2)
    live(cursor, 6)
    assert cursor.ask_from(NOW_S + 2) == 4
    assert cursor.on_replay_end(NOW_S + 2) == NOTHING
    assert cursor.on_replay_end(NOW_S + 2) == delivered(6, lost=True)


def test_an_end_that_nobody_asked_for_says_nothing() -> None:
    cursor = SourceCursor()
    live(cursor, 3)
    assert cursor.on_replay_end(NOW_S) == NOTHING
    assert cursor.expected == 0


# -------------------------------------------------------------------- bounds
def test_beyond_its_room_the_oldest_hole_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_cursor, "KEPT_MAX", 3)
    cursor = read_up_to(1)
    assert [live(cursor, sequence) for sequence in (3, 4, 6)] == [NOTHING] * 3
    assert live(cursor, 8) == delivered(3, 4, lost=True)
    assert (cursor.expected, cursor.has_hole, cursor.lost_total) == (5, True, 1)


def test_a_gap_is_counted_once_until_it_is_closed() -> None:
    cursor = SourceCursor()
    live(cursor, 2)
    live(cursor, 3)
    live(cursor, 5)
    assert cursor.gaps_total == 1
    live(cursor, 0)
    live(cursor, 1)
    live(cursor, 4)
    live(cursor, 7)
    assert cursor.gaps_total == 2


def test_questions_without_answers_need_no_more_room_however_many() -> None:
    cursor = SourceCursor(answer_s=1.0)
    assert [cursor.ask_from(NOW_S + second) for second in range(1000)] == [0] * 1000
    live(cursor, 1)
    cursor.ask_from(NOW_S + 1000)
    ends = [cursor.on_replay_end(NOW_S + 1000) for _ in range(source_cursor.QUESTIONS_MAX)]
    assert ends == [NOTHING] * (source_cursor.QUESTIONS_MAX - 1) + [delivered(1, lost=True)]
