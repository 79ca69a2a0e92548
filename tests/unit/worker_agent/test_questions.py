"""Questions about a rank: which are taken, and which is answered next."""

from kv_protocol.recovery import RecoverRequest
from worker_agent.events.recoveries import QUESTIONS_MAX, PendingRecovery, Questions

FIRST, SECOND = RecoverRequest(1), RecoverRequest(2)


def ask(questions: Questions, asker: str, request: RecoverRequest = FIRST) -> str:
    return questions.ask(PendingRecovery(asker, request))


def test_askers_are_answered_in_the_order_in_which_they_came() -> None:
    questions = Questions()
    assert [ask(questions, asker) for asker in "abc"] == ["taken"] * 3
    assert [questions.next() for _ in range(4)] == [*(PendingRecovery(asker, FIRST) for asker in "abc"), None]


def test_a_question_repeated_while_it_waits_or_is_answered_is_dropped() -> None:
    questions = Questions()
    ask(questions, "a")
    assert ask(questions, "a") == "repeated"
    answered = questions.next()
    assert answered is not None
    assert ask(questions, "a") == "repeated"
    assert questions.is_current(answered)
    assert questions.next() is None


def test_another_question_of_the_asker_being_answered_ends_that_answer() -> None:
    questions = Questions()
    ask(questions, "a")
    answered = questions.next()
    assert answered is not None
    assert ask(questions, "a", SECOND) == "replaced"
    assert not questions.is_current(answered)
    assert ask(questions, "a", SECOND) == "repeated"
    assert questions.next() == PendingRecovery("a", SECOND)


def test_an_earlier_question_that_comes_late_does_not_replace_the_one_that_waits() -> None:
    questions = Questions()
    ask(questions, "a", SECOND)
    assert ask(questions, "a", FIRST) == "overtaken"
    assert [questions.next(), questions.next()] == [PendingRecovery("a", SECOND), None]


def test_beyond_a_bound_askers_are_turned_away_but_waiting_ones_may_ask_again() -> None:
    questions = Questions()
    for asker in range(QUESTIONS_MAX):
        ask(questions, str(asker))
    assert ask(questions, "late") == "turned_away"
    assert ask(questions, "0", SECOND) == "replaced"
    questions.next()
    assert ask(questions, "late") == "taken"
