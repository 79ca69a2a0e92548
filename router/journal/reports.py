"""Reports of the decisions in journals that were asked for, found in one pass.

A journal does not have every candidate's terms: each decision is taken again (`replay.py`) and kept as its verdict,
which is rendered if it is asked for. Outcomes and decisions of the same request are joined while that request is among
the newest `REQUESTS_MAX` of its router.
"""

import heapq
from collections import OrderedDict
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from kv_protocol.decided import Decided
from kv_protocol.journal import AttemptEnded, JournalMessage, JournalRecord, OutcomeKnown, Refused
from router.decision.report import DecisionReport, MissKind, Outcome, RequestReport, misses
from router.decision.verdict import Verdict
from router.journal.replay import Continuity, Redecided, Replay

REQUESTS_MAX = 4096
OF_A_REQUEST_MAX = 16
"""Decisions of one request that are kept: the newest."""


class Question(NamedTuple):
    """What is asked: the last decision with `any_id`, its own or its request's, or the `worst`, or else the last."""

    any_id: str = ""
    worst: int = 0
    """How many, those with the largest miss above 0 first."""
    by: MissKind = "cached"


class _Known:
    """One decision, as far as it was read; `of_request` has all of its request."""

    def __init__(self, verdict: Verdict, note: str, of_request: "list[_Known]") -> None:
        self.verdict, self._note, self._of_request = verdict, note, of_request
        self.begun_s: float = of_request[0].begun_s if of_request else verdict.now_s
        self.outcome: Outcome | None = None
        self.error = ""

    def alone(self) -> DecisionReport:
        outcome = self.outcome
        if self.error:
            outcome = (
                Outcome(outcome="failed", error=self.error) if outcome is None else replace(outcome, error=self.error)
            )
        return DecisionReport(decision=self.verdict.decision(), outcome=outcome, note=self._note)

    def report(self) -> RequestReport:
        one, others = self.alone(), tuple(each.alone() for each in self._of_request)
        return RequestReport(decision=one.decision, outcome=one.outcome, note=one.note, decisions=others)


class Findings:
    """What was found of a question in the journals of all routers."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._one: _Known | None = None
        self._worst: list[tuple[float, int, _Known]] = []
        self._order = count()
        self.decisions = self.not_repeated = 0
        """How many were read, and of how many nothing can be said, because records before them are missing."""
        self.problem = ""
        """Why the id that was asked for has no report although it was read."""

    def decided(self, record: Decided, known: _Known | None, difference: str) -> None:
        """A decision was read; `known` is None if it could not be repeated."""
        self.decisions += 1
        self.not_repeated += known is None
        if self._question.any_id and not self._is_asked_for(record):
            return
        if known is not None:
            self._one = known
        else:
            self.problem = f"it went to {record.rank}, but its candidates are not known: {difference}"

    def refused(self, record: Refused) -> None:
        """A refusal was read."""
        if self._is_asked_for(record):
            ranks = (f"{each.worker_id}/{each.dp_rank} {each.reason}" for each in record.exclusions)
            self.problem = f"it was refused, no rank was eligible: {'; '.join(ranks) or 'there was none'}"

    def settled(self, known: _Known) -> None:
        """The outcome of a decision was read."""
        if not self._question.worst:
            return
        missed = misses(known.verdict.decision(), known.outcome, known.begun_s).of(self._question.by)
        if missed is not None and missed > 0:
            keep = heapq.heappush if len(self._worst) < self._question.worst else heapq.heappushpop
            keep(self._worst, (missed, -next(self._order), known))

    def reports(self) -> list[RequestReport]:
        """Return the answer; empty if there is none."""
        if self._question.worst:
            return [known.report() for _, _, known in sorted(self._worst, reverse=True)]
        return [] if self._one is None else [self._one.report()]

    def _is_asked_for(self, record: Decided | Refused) -> bool:
        return self._question.any_id in (record.request.decision_id, record.request.request_id)


class JournalReports:
    """One router's journal."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._continuity = Continuity()
        self._replay = Replay()
        self._of_request: OrderedDict[str, list[_Known]] = OrderedDict()
        self._of_decision: dict[str, _Known] = {}

    def take(self, message: JournalMessage) -> None:
        """Fold in the records of a message."""
        for record in self._continuity.records(message):
            found = self._replay.take(record)
            if isinstance(record, Decided) and isinstance(found, Redecided):
                known = None if found.verdict is None else self._keep(found.verdict, found.difference)
                self._findings.decided(record, known, found.difference)
            elif isinstance(record, Refused):
                self._findings.refused(record)
            else:
                self._end(record)

    def _end(self, record: JournalRecord) -> None:
        if not isinstance(record, AttemptEnded | OutcomeKnown) or record.decision_id not in self._of_decision:
            return
        known = self._of_decision[record.decision_id]
        if isinstance(record, OutcomeKnown):
            if known.outcome is None:
                known.outcome = _outcome(record)
                self._findings.settled(known)
        elif record.outcome != "ok":
            known.error = " ".join(filter(None, (record.outcome, record.phase, record.reason)))

    def _keep(self, verdict: Verdict, difference: str) -> _Known:
        request_id = verdict.request.request_id
        of_request = self._of_request.setdefault(request_id, [])
        self._of_request.move_to_end(request_id)
        note = f"the repeated decision differs from the journal: {difference}" if difference else ""
        known = self._of_decision[verdict.decision_id] = _Known(verdict, note, of_request)
        of_request.append(known)
        if len(of_request) > OF_A_REQUEST_MAX:
            self._forget(of_request.pop(0))
        if len(self._of_request) > REQUESTS_MAX:
            for each in self._of_request.popitem(last=False)[1]:
                self._forget(each)
        return known

    def _forget(self, known: _Known) -> None:
        if self._of_decision.get(known.verdict.decision_id) is known:
            del self._of_decision[known.verdict.decision_id]


def _outcome(record: OutcomeKnown) -> Outcome:
    return Outcome(
        outcome=record.outcome,
        cached_tokens=record.cached_tokens,
        ttft_s=record.ttft_s,
        duration_s=record.duration_s,
        output_tokens=record.output_tokens,
    )
