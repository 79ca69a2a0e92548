"""Reading hop A: in order, without holes, once each; when a hole is a loss, and when the publisher began anew."""

from collections.abc import Callable

import pytest

from worker_agent.events import source_cursor
from worker_agent.events.source_cursor import AHEAD_MAX, REPLAY_S, UNANSWERED_MAX, Delivery, SourceCursor

NOTHING = Delivery()
NOW_S = 100.0
ANEW = Delivery(lost=True, began_anew=True)


def payload(sequence: int, life: int = 0) -> bytes:
    return f"payload {sequence} of life {life}".encode()


def delivered(*sequences: int, lost: bool = False, life: int = 0) -> Delivery:
    return Delivery(tuple((sequence, payload(sequence, life)) for sequence in sequences), lost)


def live(cursor: SourceCursor, sequence: int, now_s: float = NOW_S, *, life: int = 0) -> Delivery:
    return cursor.on_live(sequence, payload(sequence, life), now_s)


def replayed(cursor: SourceCursor, *sequences: int, life: int = 0) -> list[Delivery]:
    return [cursor.on_replayed(sequence, payload(sequence, life)) for sequence in sequences]


def read_up_to(sequence: int) -> SourceCursor:
    """Return a cursor that has read everything before `sequence`, without a question."""
    cursor = SourceCursor()
    for earlier in range(sequence):
        live(cursor, earlier)
    return cursor


# -------------------------------------------------------------------- the table, row by row


def test_a_frame_beyond_the_expected_one_is_kept_and_a_replay_is_due_from_the_newest_delivered() -> None:
    cursor = read_up_to(2)
    assert live(cursor, 4) == NOTHING
    assert (cursor.is_settled, cursor.gaps_total, cursor.next_replay(NOW_S)) == (False, 1, 1)


def test_a_late_subscriber_is_told_that_the_beginning_is_lost() -> None:
    cursor = SourceCursor()
    live(cursor, 5)
    assert cursor.next_replay(NOW_S) == 0
    assert replayed(cursor, 3, 4, 5) == [NOTHING] * 3
    assert cursor.on_replay_end(NOW_S) == delivered(3, 4, 5, lost=True)
    assert (cursor.expected, cursor.lost_total, cursor.restarts_total) == (6, 1, 0)


@pytest.mark.parametrize("sequence", [2 + AHEAD_MAX, (1 << 64) - 1])
def test_a_frame_implausibly_far_ahead_is_refused_and_counted(sequence: int) -> None:
    cursor = read_up_to(2)
    cursor.next_replay(NOW_S + 10)
    assert [live(cursor, sequence), *replayed(cursor, sequence)] == [NOTHING] * 2
    assert (cursor.refused_total, cursor.is_settled) == (2, True)
    assert live(cursor, 2) == delivered(2)
    assert live(cursor, 2 + AHEAD_MAX) == NOTHING
    assert (cursor.refused_total, cursor.is_settled) == (2, False)


# -------------------------------------------------------------------- another life of the publisher


def test_a_question_asked_before_the_doubt_does_not_end_it() -> None:
    cursor = read_up_to(3)
    assert cursor.next_replay(NOW_S + 10) == 2
    live(cursor, 0, NOW_S + 10, life=1)
    assert replayed(cursor, 2) == [NOTHING]
    assert cursor.on_replay_end(NOW_S + 10) == NOTHING
    assert (cursor.is_settled, cursor.next_replay(NOW_S + 10)) == (False, 2)
    assert cursor.on_replay_end(NOW_S + 10) == ANEW


def test_nothing_delivered_is_nothing_to_doubt() -> None:
    cursor = SourceCursor()
    live(cursor, 7)
    assert [live(cursor, 0, life=1), live(cursor, 1, life=1)] == [delivered(0, life=1), delivered(1, life=1)]
    assert cursor.is_settled


# -------------------------------------------------------------------- questions
def test_the_first_question_is_due_at_once_for_what_was_published_before_we_listened() -> None:
    assert SourceCursor().next_replay(0.0) == 0


def test_messages_put_the_question_off() -> None:
    cursor = SourceCursor()
    for sequence in range(5):
        live(cursor, sequence, NOW_S + sequence * 0.9)
        assert cursor.next_replay(NOW_S + sequence * 0.9 + 0.89) is None


def test_one_replay_is_in_flight_until_it_ends_or_times_out() -> None:
    cursor = SourceCursor()
    live(cursor, 3)
    assert cursor.next_replay(NOW_S) == 0
    assert cursor.next_replay(NOW_S + 1000) is None
    assert replayed(cursor, 0) == [delivered(0)]
    assert cursor.on_no_answer(NOW_S) == NOTHING
    assert cursor.next_replay(NOW_S + 1000) == 0
    assert cursor.replays_total == 2


def test_an_unrequested_end_of_a_replay_has_no_effect() -> None:
    cursor = SourceCursor()
    live(cursor, 3)
    assert cursor.on_replay_end(NOW_S) == NOTHING
    assert cursor.expected == 0


def unanswered(cursor: SourceCursor, times: int = UNANSWERED_MAX) -> list[Delivery]:
    answers = []
    for _ in range(times):
        assert cursor.next_replay(NOW_S + 1000) is not None
        answers.append(cursor.on_no_answer(NOW_S + 1000))
    return answers


def test_a_hole_without_a_replay_is_a_loss() -> None:
    cursor = read_up_to(2)
    live(cursor, 4)
    live(cursor, 5)
    assert unanswered(cursor) == [NOTHING, NOTHING, delivered(4, 5, lost=True)]
    assert cursor.is_unanswered


def test_a_doubt_without_a_replay_is_a_restart() -> None:
    cursor = read_up_to(2)
    live(cursor, 0, life=1)
    assert unanswered(cursor) == [NOTHING, NOTHING, ANEW]


# -------------------------------------------------------------------- without replay


@pytest.mark.parametrize("has_replay", [False, True])
def test_a_connection_before_which_nothing_was_delivered_says_nothing(has_replay: bool) -> None:
    cursor = SourceCursor(has_replay=has_replay)
    assert cursor.on_connect() == NOTHING
    assert live(cursor, 0) == delivered(0)


def test_with_a_replay_a_new_connection_is_judged_by_what_the_replay_says() -> None:
    cursor = read_up_to(3)
    assert cursor.on_connect() == NOTHING
    assert live(cursor, 3) == delivered(3)


# -------------------------------------------------------------------- bounds
@pytest.mark.parametrize(("bound", "room"), [("BUFFERED_MAX", 3), ("BUFFERED_BYTES_MAX", 3 * len(payload(0)))])
@pytest.mark.parametrize("comes", [live, replayed])
def test_beyond_its_room_in_messages_or_bytes_every_hole_is_given_up(
    monkeypatch: pytest.MonkeyPatch, bound: str, room: int, comes: Callable[[SourceCursor, int], object]
) -> None:
    monkeypatch.setattr(source_cursor, bound, room)
    cursor = read_up_to(1)
    live(cursor, 3)
    cursor.next_replay(NOW_S)
    assert [live(cursor, sequence) for sequence in (4, 6)] == [NOTHING] * 2
    assert comes(cursor, 8) in (delivered(8, lost=True), [delivered(8, lost=True)])
    assert (cursor.expected, cursor.is_settled, cursor.lost_total) == (9, True, 1)
    assert [live(cursor, sequence) for sequence in (10, 11)] == [NOTHING] * 2


# -------------------------------------------------------------------- replays that do not end
def test_a_replay_that_brings_frames_for_ever_is_given_up_in_time() -> None:
    cursor = read_up_to(2)
    live(cursor, 100)
    cursor.next_replay(NOW_S)
    assert replayed(cursor, 2, 3) == [delivered(2), delivered(3)]
    assert (cursor.is_overdue(NOW_S + REPLAY_S - 1), cursor.on_no_answer(NOW_S + REPLAY_S - 1)) == (False, NOTHING)
    assert cursor.next_replay(NOW_S + REPLAY_S - 1) == 3
    assert replayed(cursor, 4) == [delivered(4)]
    assert cursor.is_overdue(NOW_S + REPLAY_S)
    assert cursor.on_no_answer(NOW_S + REPLAY_S) == delivered(100, lost=True)
    assert (cursor.is_settled, cursor.is_unanswered, cursor.is_overdue(NOW_S + REPLAY_S)) == (True, True, False)


def test_a_doubt_that_a_replay_never_ends_is_a_restart_in_time() -> None:
    cursor = read_up_to(2)
    cursor.on_disconnect()
    live(cursor, 2, life=1)
    cursor.next_replay(NOW_S)
    assert cursor.on_no_answer(NOW_S + REPLAY_S) == ANEW


def test_after_replays_were_given_up_one_is_asked_for_even_while_messages_come() -> None:
    cursor = read_up_to(2)
    unanswered(cursor)
    assert live(cursor, 2, NOW_S + 1000) == delivered(2)
    assert cursor.next_replay(NOW_S + 1000) == 2
    replayed(cursor, 2)
    cursor.on_replay_end(NOW_S + 1000)
    assert (cursor.is_unanswered, cursor.next_replay(NOW_S + 1000)) == (False, None)


def test_a_replay_that_a_full_queue_thinned_out_is_asked_for_again_from_where_it_came_to() -> None:
    cursor = read_up_to(1)
    live(cursor, 9)
    assert cursor.next_replay(NOW_S) == 0
    replayed(cursor, 0, 1, 2, 5, 6, 9)
    assert cursor.on_replay_end(NOW_S) == NOTHING
    assert (cursor.lost_total, cursor.next_replay(NOW_S)) == (0, 2)
    assert replayed(cursor, *range(2, 8)) == [NOTHING, delivered(3), delivered(4, 5, 6), *[NOTHING] * 2, delivered(7)]
    assert [cursor.on_no_answer(NOW_S + 2), cursor.next_replay(NOW_S + 2)] == [NOTHING, 7]
    replayed(cursor, 7, 9)
    assert cursor.on_replay_end(NOW_S + 2) == delivered(9, lost=True)
