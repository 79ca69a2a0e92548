"""Marks: what two looks at the fleet differ by."""

from typing import Any

import pytest

from kv_protocol.ids import WorkerRank
from router.fleet.trust import EXACT, Trust
from router.live.marks import MARKS_OF_A_LOOK, Looked, Mark, marks_of

A0, B0 = WorkerRank("a", 0), WorkerRank("b", 0)
DOUBTED = Trust("DEGRADED", "behind")
BEFORE = Looked(
    workers={"a": ("a-1", False, False)},
    trust={A0: EXACT},
    resyncs={A0: 1},
    policy={"mode": "kv", "temperature": 0.0},
    is_log_connected=True,
)


def marked(**changed: Any) -> list[Mark]:
    """Return the marks of a second look."""
    assert [each.kind for each in marks_of(None, BEFORE, 1.0)] == ["router_started"]
    return marks_of(BEFORE, BEFORE._replace(**changed), 2.0)


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"is_log_connected": False}, "log_lost", "the event log is away"),
        ({"policy": {"mode": "kv-blocks", "temperature": 0.0}}, "policy", "mode kv -> kv-blocks"),
        ({"workers": {}}, "worker_left", "a left"),
        ({"workers": {"a": ("a-2", False, False)}}, "worker_joined", "a joined again, as another instance"),
        ({"workers": {"a": ("a-1", True, False)}}, "worker_draining", "a drains"),
        ({"workers": {"a": ("a-1", False, True)}}, "worker_silent", "a is silent"),
        ({"trust": {A0: DOUBTED}}, "trust", "a/0 EXACT -> DEGRADED: behind"),
        ({"resyncs": {A0: 2}}, "resync", "a/0: the index took a complete dump"),
    ],
)
def test_a_change_is_one_mark(changed: dict[str, Any], kind: str, text: str) -> None:
    [mark] = marked(**changed)
    assert (mark.kind, mark.text, mark.at_s) == (kind, text, 2.0)


def test_what_is_as_before_is_no_mark() -> None:
    assert marked() == []


def test_a_worker_that_joins_is_a_mark_and_its_ranks_are_none() -> None:
    found = marked(
        workers={**BEFORE.workers, "b": ("b-1", False, False)},
        trust={**BEFORE.trust, B0: DOUBTED},
        resyncs={**BEFORE.resyncs, B0: 3},
    )
    assert [(each.kind, each.worker_id) for each in found] == [("worker_joined", "b")]


def test_what_ends_is_a_mark_as_well() -> None:
    bad = BEFORE._replace(is_log_connected=False, workers={"a": ("a-1", False, True)}, trust={A0: DOUBTED})
    assert [each.text for each in marks_of(bad, BEFORE, 2.0)] == [
        "the event log is connected again",
        "a is heard again",
        "a/0 DEGRADED -> EXACT",
    ]


def test_many_changes_of_one_look_are_counted_beyond_the_bound() -> None:
    ranks = [WorkerRank(f"w{at}", 0) for at in range(MARKS_OF_A_LOOK + 7)]
    was, now = (BEFORE._replace(trust=dict.fromkeys(ranks, trust)) for trust in (EXACT, DOUBTED))
    found = marks_of(was, now, 2.0)
    assert len(found) == MARKS_OF_A_LOOK + 1
    assert (found[-1].kind, found[-1].text) == ("others", "7 other changes")
