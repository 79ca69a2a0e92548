"""Engine events that could not be read: reasons, counts, and the newest of them, shortened.

    reason          the event
    -------------   ---------------------------------------------------------------------------------------------------
    not_a_map       is not a JSON object
    no_place        has no readable `event_id` or `attention_dp_rank`
    too_deep        is nested deeper than can be read
    too_large       is larger than one event may be (`EventTooLarge`)
    block_hash      has a block hash that is not a u64, names a block twice, or names a block as its own parent
    hash_algo       has hashes of an algorithm whose values are not u64
    cache_salt      has blocks of several salts
    token_id        has a token that is neither u32 nor a multimodal item
    cache_level     is of an unknown tier
    wrong_type      has another field that is missing or of a wrong type

`dialects/trtllm.py` says what follows for the event's rank. Written by one thread, read by any.
"""

import reprlib
from typing import NamedTuple

from kv_protocol.errors import LimitExceeded

REASONS = (
    *("not_a_map", "no_place", "too_deep", "too_large"),
    *("block_hash", "hash_algo", "cache_salt", "token_id", "cache_level", "wrong_type"),
)
NEWEST_MAX = 16
SHOWN_CHARACTERS_MAX = 512
PROBLEM_CHARACTERS_MAX = 256

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxtuple = 5, 12, 4, 4
_short.maxstring = _short.maxlong = _short.maxother = 80


class EventTooLarge(LimitExceeded):
    """An event is larger than one may be."""


class QuarantinedEvent(NamedTuple):
    """One event: its number among all quarantined events, from 1, its rank if it has one, and its shortened text."""

    number: int
    reason: str
    problem: str
    dp_rank: int | None
    shown: str


class Quarantine:
    """Counts all quarantined events, keeps the newest `NEWEST_MAX`."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(REASONS, 0)
        self.kept: tuple[QuarantinedEvent, ...] = ()
        """The newest events, oldest first."""

    def add(self, engine_event: object, error: Exception, dp_rank: int | None = None) -> str:
        """Keep an event that cannot be processed because of `error`; return the problem, cut short.

        `dp_rank` is its rank; None: it has no readable one.
        """
        reason, problem = _reason(engine_event, error, dp_rank), str(error)[:PROBLEM_CHARACTERS_MAX]
        self.counts[reason] += 1
        number = sum(self.counts.values())
        entry = QuarantinedEvent(number, reason, problem, dp_rank, _shown(engine_event))
        self.kept = (*self.kept, entry)[-NEWEST_MAX:]  # replaced, not changed: other threads read it
        return problem


def _reason(engine_event: object, error: Exception, dp_rank: int | None) -> str:
    if not isinstance(engine_event, dict):
        return "not_a_map"
    if dp_rank is None:
        return "no_place"
    if isinstance(error, EventTooLarge):
        return "too_large"
    if isinstance(error, RecursionError):
        return "too_deep"
    return error.field if isinstance(error, LimitExceeded) and error.field in REASONS else "wrong_type"


def _shown(engine_event: object) -> str:
    try:
        return _short.repr(engine_event)[:SHOWN_CHARACTERS_MAX]
    except ValueError:  # a number of more digits than Python spells out
        return f"{type(engine_event).__name__} that cannot be shown"
