"""The newest decisions, by either id, and no more than they."""

from router.decision.routing import DecisionLog, Lease
from tests.unit.router.samples import route
from tests.unit.router.test_routing import Bench


def log(decisions_max: int, *ids: tuple[str, str]) -> DecisionLog:
    """Return a log with decisions of these (decision id, request id)."""
    kept = DecisionLog(decisions_max)
    for each in ids:
        kept.add(made(*each))
    return kept


def made(decision_id: str, request_id: str) -> Lease:
    return Bench().take(route(decision_id=decision_id, request_id=request_id))


def found(kept: DecisionLog, any_id: str) -> str | None:
    record = kept.find(any_id)
    return record.verdict.decision_id if record else None


def test_a_decision_is_found_by_its_id_and_by_its_requests() -> None:
    kept = log(9, ("d1", "r1"), ("d2", "r2"))
    assert [found(kept, any_id) for any_id in ("d1", "r1", "d2", "r2")] == ["d1", "d1", "d2", "d2"]
    assert [found(kept, any_id) for any_id in ("", "d3", "r3")] == [None, None, None]


def test_a_requests_last_decision_is_found_by_its_id_and_the_others_by_theirs() -> None:
    kept = log(9, ("d1", "r"), ("d2", "r"))
    assert [found(kept, any_id) for any_id in ("r", "d1", "d2")] == ["d2", "d1", "d2"]


def test_the_newest_come_first() -> None:
    kept = log(9, ("d1", "r1"), ("d2", "r2"), ("d3", "r3"))
    assert [record.verdict.decision_id for record in kept.newest(2)] == ["d3", "d2"]
    assert [record.verdict.decision_id for record in kept.newest(99)] == ["d3", "d2", "d1"]
    assert log(9).newest(5) == []


def test_the_oldest_gives_way_with_all_its_names() -> None:
    kept = log(2, ("d1", "r1"), ("d2", "r2"), ("d3", "r3"))
    assert [found(kept, any_id) for any_id in ("d1", "r1", "d2", "r3")] == [None, None, "d2", "d3"]


def test_a_requests_name_stays_while_a_decision_of_it_does() -> None:
    kept = log(2, ("d1", "r"), ("d2", "r"), ("d3", "x"))
    assert [found(kept, any_id) for any_id in ("d1", "r")] == [None, "d2"]
    kept.add(made("d4", "y"))
    assert found(kept, "r") is None


def test_a_request_that_calls_itself_as_a_decision_hides_nothing() -> None:
    kept = log(9, ("d1", "r1"), ("d2", "d1"))
    assert [found(kept, any_id) for any_id in ("d1", "d2")] == ["d1", "d2"]


def test_a_requests_decisions_are_the_newest_of_it_eldest_first() -> None:
    kept = log(9, ("d1", "r"), ("d2", "r"), ("d3", "x"), ("d4", "r"))
    assert [each.verdict.decision_id for each in kept.of_request("r", 2)] == ["d2", "d4"]
