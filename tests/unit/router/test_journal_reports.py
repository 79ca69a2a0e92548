"""The decisions of a journal that were asked for, beside what came of them."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from kv_protocol.decided import Decided, overlap_depths
from kv_protocol.journal import AttemptEnded, JournalMessage, JournalRecord, Lost, OutcomeKnown, Refused
from router.cli.reports import JournalReports, Question
from router.decision.report import misses
from router.journal.replay import JournalEntry
from tests.unit.properties.router_life import POLICIES, journal
from tests.unit.router.samples import BLOCK_SIZE

RECORDS = asyncio.run(journal(1, POLICIES["kv"]))[1]
DECIDED = [record for record in RECORDS if isinstance(record, Decided)]
OUTCOMES = {record.decision_id: record for record in RECORDS if isinstance(record, OutcomeKnown)}


def asked(question: Question, records: Sequence[JournalRecord] = RECORDS) -> JournalReports:
    reports = JournalReports(question)
    first = 1
    for record in records:
        message = JournalMessage(version=1, life=1, first=first, records=(record,))
        reports.take(JournalEntry("router", first, 0, message))
        first += record.count if isinstance(record, Lost) else 1
    return reports


def test_a_decision_is_found_by_its_id_with_all_candidates_and_its_outcome() -> None:
    wanted = next(record for record in DECIDED if record.request.decision_id in OUTCOMES and record.best)
    decision_id = wanted.request.decision_id
    (report,) = asked(Question(decision_id)).reports()
    assert (report.decision.decision_id, report.note) == (decision_id, "")
    assert (report.decision.chosen.worker_id, report.decision.margin) == (wanted.worker_id, wanted.margin)
    assert report.outcome is not None
    known = OUTCOMES[decision_id]
    assert (report.outcome.outcome, report.outcome.cached_tokens) == (known.outcome, known.cached_tokens)
    assert decision_id in [each.decision.decision_id for each in report.decisions]


def test_a_request_has_all_its_decisions_eldest_first() -> None:
    requests = [record.request.request_id for record in DECIDED]
    retried = next(each for each in requests if requests.count(each) > 1)
    (report,) = asked(Question(retried)).reports()
    ids = [record.request.decision_id for record in DECIDED if record.request.request_id == retried]
    assert [each.decision.decision_id for each in report.decisions] == ids[-16:]
    assert report.decision.decision_id == ids[-1]


def test_without_an_id_the_last_decision_is_reported() -> None:
    (report,) = asked(Question()).reports()
    assert report.decision.decision_id == DECIDED[-1].request.decision_id


def test_the_worst_are_those_with_the_largest_miss_worst_first() -> None:
    nothing_cached = [replace(each, cached_tokens=0) if isinstance(each, OutcomeKnown) else each for each in RECORDS]
    few, many = (asked(Question(worst=count), nothing_cached).reports() for count in (3, 500))
    missed = [misses(each.decision, each.outcome).cached_tokens or 0 for each in many]
    assert missed == sorted(missed, reverse=True)
    assert missed[3] > 0
    assert few == many[:3]
    held = [overlap_depths(each)[each.winner][0] for each in DECIDED if each.request.decision_id in OUTCOMES]
    assert sum(map(bool, held)) == len(missed)
    assert missed[0] == BLOCK_SIZE * max(held)


def test_the_worst_by_ttft_missed_their_targets() -> None:
    late = [replace(each, ttft_s=9.0) if isinstance(each, OutcomeKnown) else each for each in RECORDS]
    found = asked(Question(worst=5, by="ttft"), late).reports()
    missed = [misses(each.decision, each.outcome).ttft_s or 0.0 for each in found]
    assert len(missed) == 5
    assert missed == sorted(missed, reverse=True)
    assert missed[-1] > 8.0


def test_the_failure_of_an_attempt_is_told_with_its_decision() -> None:
    failed = next(
        record
        for record in RECORDS
        if isinstance(record, AttemptEnded) and record.outcome == "failed" and record.decision_id
    )
    (report,) = asked(Question(failed.decision_id)).reports()
    assert report.outcome is not None
    assert report.outcome.error == " ".join(filter(None, ("failed", failed.phase, failed.reason)))


def test_a_refused_request_is_named_with_the_reasons() -> None:
    refused = next(record for record in RECORDS if isinstance(record, Refused) and record.exclusions)
    findings = asked(Question(refused.request.decision_id))
    assert findings.reports() == []
    assert findings.problem.startswith("it was refused, no rank was eligible: ")
    assert refused.exclusions[0].reason in findings.problem


def test_a_decision_behind_lost_records_is_counted_and_its_rank_is_named() -> None:
    last = DECIDED[-1]
    findings = asked(Question(last.request.decision_id), [RECORDS[0], Lost(now_s=0.0, count=9), last])
    assert findings.reports() == []
    assert (findings.decisions, findings.not_repeated) == (1, 1)
    assert findings.problem.startswith(f"it went to {last.rank}, but its candidates are not known: records are missing")


def test_an_empty_journal_has_nothing() -> None:
    findings = asked(Question("d1"), [])
    assert (findings.reports(), findings.decisions, findings.problem) == ([], 0, "")
