"""When a foreign engine belongs to the fleet."""

from worker_agent.attached.health import FAILURES_MAX, Attachment


def entered() -> Attachment:
    attachment = Attachment()
    assert attachment.on_probe(is_healthy=True) == "register"
    attachment.entered()
    return attachment


def test_an_engine_is_registered_when_it_first_answers_and_once() -> None:
    attachment = Attachment()
    assert [attachment.on_probe(is_healthy=healthy) for healthy in (False, False, True)] == ["", "", "register"]
    attachment.entered()
    assert [attachment.on_probe(is_healthy=True) for _ in range(3)] == ["", "", ""]


def test_a_registration_that_could_not_be_told_is_tried_again() -> None:
    attachment = Attachment()
    assert [attachment.on_probe(is_healthy=True) for _ in range(2)] == ["register", "register"]


def test_an_engine_leaves_when_it_did_not_answer_so_often_in_a_row() -> None:
    attachment = entered()
    for _ in range(2):
        assert [attachment.on_probe(is_healthy=False) for _ in range(FAILURES_MAX - 1)] == [""] * (FAILURES_MAX - 1)
        assert attachment.on_probe(is_healthy=True) == ""
    assert [attachment.on_probe(is_healthy=False) for _ in range(FAILURES_MAX)][-1] == "leave"
    assert attachment.is_in
    assert attachment.on_probe(is_healthy=False) == "leave"
    attachment.left()
    assert [attachment.on_probe(is_healthy=healthy) for healthy in (False, True)] == ["", "register"]


def test_an_engine_that_sleeps_leaves_at_once_and_comes_again_when_it_is_awake() -> None:
    attachment = entered()
    assert attachment.on_probe(is_healthy=False, is_asleep=True) == "leave"
    attachment.left()
    assert [attachment.on_probe(is_healthy=False, is_asleep=True), attachment.on_probe(is_healthy=True)] == [
        "",
        "register",
    ]


def test_a_log_that_was_lost_and_found_is_told_again() -> None:
    attachment = entered()
    assert attachment.on_probe(is_healthy=True, is_log_new=True) == "register"
    assert attachment.on_probe(is_healthy=True) == "register"
    attachment.entered()
    assert attachment.on_probe(is_healthy=True) == ""


def test_a_log_found_while_the_engine_does_not_answer_is_told_when_it_does() -> None:
    attachment = entered()
    assert attachment.on_probe(is_healthy=False, is_log_new=True) == ""
    assert attachment.on_probe(is_healthy=True) == "register"
