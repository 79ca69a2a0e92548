"""`/v1/workers` of a router in several processes shows the doubts that any of them has."""

from typing import Any

from router.processes.front import doubted_workers

EVIDENCE = {"doubt": "overpredicted", "requests": 16, "overpredicted": 16, "underpredicted": 0, "newest_decision": "d"}


def workers(trust: str = "EXACT", reason: str = "", evidence: Any = None) -> dict[str, Any]:
    rank = {"worker_id": "w0", "dp_rank": 0, "trust": trust, "trust_reason": reason, "evidence": evidence, "unfit": ""}
    return {"workers": [{"ranks": [rank]}]}


def test_a_rank_that_one_process_doubts_is_shown_with_its_evidence() -> None:
    doubted = workers("DEGRADED", "overpredicted", EVIDENCE)
    assert doubted_workers([workers(), workers(), doubted]) == doubted


def test_what_streams_and_registrations_show_is_not_replaced() -> None:
    stale = workers("DEGRADED", "behind")
    assert doubted_workers([workers("DEGRADED", "behind"), workers("FALLBACK", "underpredicted", EVIDENCE)]) == stale


def test_without_doubts_the_workers_are_as_they_are() -> None:
    assert doubted_workers([workers(), workers(), workers()]) == workers()
    assert doubted_workers([workers()]) == workers()
