"""Describes how a repeated decision differs from the recorded one."""

from collections.abc import Sequence

from kv_protocol.decided import TERMS, Decided, best_columns, best_terms, other_costs, overlap_depths
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import decode_record, encode_record


def difference_of(recorded: Decided, found: bytes, ranks: Sequence[WorkerRank]) -> str:
    """Return in words how the repeated decision's record differs; empty if every bit is equal. `ranks`: its columns.

    Raises:
        LimitExceeded: the recorded decision is none that a router writes.
    """
    recorded.check()
    again = decode_record(found)
    assert isinstance(again, Decided)
    names = [
        name
        for name in Decided.__struct_fields__
        if encode_record(getattr(recorded, name)) != encode_record(getattr(again, name))
    ]
    return "; ".join(_difference_text(name, recorded, again, ranks) for name in names)


def _difference_text(name: str, recorded: Decided, again: Decided, ranks: Sequence[WorkerRank]) -> str:
    match name:
        case "terms":
            return _terms_text(recorded, again, ranks)
        case "best":
            found, before = best_columns(again.best), best_columns(recorded.best)
        case "costs":
            return _first_apart("cost of another", other_costs(again), other_costs(recorded))
        case "overlap":
            return _first_apart("overlap", overlap_depths(again), overlap_depths(recorded), [*map(str, ranks)])
        case _:
            found, before = getattr(again, name), getattr(recorded, name)
    return f"{name}: now {found!r}, recorded {before!r}"


def _terms_text(recorded: Decided, again: Decided, ranks: Sequence[WorkerRank]) -> str:
    of_now = dict(zip(best_columns(again.best), best_terms(again), strict=True))
    for column, before in zip(best_columns(recorded.best), best_terms(recorded), strict=True):
        found = of_now.get(column)
        for term in TERMS if found is not None else ():
            if getattr(found, term) != getattr(before, term):
                return f"{ranks[column]}: {term} now {getattr(found, term)!r}, recorded {getattr(before, term)!r}"
    return "terms: of other candidates"


def _first_apart(what: str, found: Sequence[object], before: Sequence[object], names: Sequence[str] = ()) -> str:
    if len(found) != len(before):
        return f"{what}: now of {len(found)}, recorded of {len(before)}"
    at = next(at for at, (one, other) in enumerate(zip(found, before, strict=True)) if one != other)
    return f"{what} {names[at] if names else at}: now {found[at]!r}, recorded {before[at]!r}"
