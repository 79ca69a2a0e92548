"""Describes how a repeated decision differs from the recorded one."""

from collections.abc import Sequence

import msgspec

from kv_protocol.decided import TERMS, Decided, NewDecision, best_columns, best_terms, other_costs, overlap_depths
from kv_protocol.journal import encode_record
from router.decision.verdict import Verdict

decode_decision = msgspec.msgpack.Decoder(NewDecision).decode


def difference_of(recorded: Decided, verdict: Verdict) -> str:
    """Return in words how the repeated decision differs; empty if every bit is equal."""
    found = verdict.journal_record(recorded.kv_seq)
    if encode_record(recorded) == found:
        return ""
    again = decode_decision(found)
    names = [
        name
        for name in Decided.__struct_fields__
        if encode_record(getattr(recorded, name)) != encode_record(getattr(again, name))
    ]
    return "; ".join(_difference_text(name, recorded, again, verdict) for name in names) or "the sign of a zero"


def _difference_text(name: str, recorded: Decided, again: NewDecision, verdict: Verdict) -> str:
    match name:
        case "terms":
            return _terms_text(recorded, again, verdict)
        case "best":
            found, before = best_columns(again.best), best_columns(recorded.best)
        case "costs":
            return _first_apart("cost of another", other_costs(again), other_costs(recorded))
        case "overlap":
            ranks = [str(rank) for rank in verdict.ranks]
            return _first_apart("overlap", overlap_depths(again), overlap_depths(recorded), ranks)
        case _:
            found, before = getattr(again, name), getattr(recorded, name)
    return f"{name}: now {found!r}, recorded {before!r}"


def _terms_text(recorded: Decided, again: NewDecision, verdict: Verdict) -> str:
    of_now = dict(zip(best_columns(again.best), best_terms(again), strict=True))
    for column, before in zip(best_columns(recorded.best), best_terms(recorded), strict=True):
        found = of_now.get(column)
        for term in TERMS if found is not None else ():
            if getattr(found, term) != getattr(before, term):
                rank = verdict.ranks[column]
                return f"{rank}: {term} now {getattr(found, term)!r}, recorded {getattr(before, term)!r}"
    return "terms: of other candidates"


def _first_apart(what: str, found: Sequence[object], before: Sequence[object], names: Sequence[str] = ()) -> str:
    if len(found) != len(before):
        return f"{what}: now of {len(found)}, recorded of {len(before)}"
    at = next(at for at, (one, other) in enumerate(zip(found, before, strict=True)) if one != other)
    return f"{what} {names[at] if names else at}: now {found[at]!r}, recorded {before[at]!r}"
