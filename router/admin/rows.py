"""What the control plane shows of trust in a rank, and of one decision, as values for JSON. Pure."""

from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from kv_protocol.fleet import NO_EVENTS, WorkerRegistered
from kv_protocol.ids import WorkerRank
from router.decision.report import DecisionReport, Outcome, misses, predicted_cached_tokens, predicted_ttft_s
from router.decision.report_text import explanation, sentence
from router.decision.routing import DecisionRecord
from router.fleet.trust import Trust
from router.live.decision_rows import outcome_of


def explained(record: DecisionRecord, begun_s: float, trace_link: str) -> dict[str, object]:
    """Return a decision with every candidate, what was predicted beside what came of it, and the link to its trace."""
    decision = record.decision
    outcome = None if record.outcome is None else msgspec.convert(record.outcome, Outcome, from_attributes=True)
    ids = {"request_id": decision.request_id, "decision_id": decision.decision_id}
    return {
        "decision": decision,
        "outcome": outcome_of(record),
        "explanation": explanation(decision),
        "sentence": sentence(DecisionReport(decision=decision, outcome=outcome)),
        "predicted": {"cached_tokens": predicted_cached_tokens(decision), "ttft_s": predicted_ttft_s(decision)},
        "misses": misses(decision, record.outcome, begun_s),
        "trace_url": trace_url(trace_link, ids),
    }


def trace_url(link: str, ids: Mapping[str, str]) -> str | None:
    """Return the link with the ids in their places, quoted; None without a link."""
    for name, value in ids.items():
        link = link.replace(f"{{{name}}}", quote(value, safe=""))
    return link or None


def trusted(rank: WorkerRank, trust: Trust) -> dict[str, object]:
    """Return the rank with the trust in it."""
    return {**rank._asdict(), "trust": trust.state, "trust_reason": trust.reason}


def event_flag(registration: WorkerRegistered, trust: Trust) -> str:
    """Return the flag with which the engine of this rank publishes events; empty where it does, or none is known."""
    return (registration.event_flag or "") if trust.reason.startswith(NO_EVENTS) else ""
