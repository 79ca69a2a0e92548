"""Parses and prints times: ISO 8601, UTC by default; as a number, nanoseconds since 1970."""

import math
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS_MAX = 10**10


def shown(time_ns: int) -> str:
    """Return the time to the millisecond, as `2026-11-21T22:10:00.123Z`."""
    time = _EPOCH + timedelta(microseconds=time_ns // 1000)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read(text: str, now_ns: int) -> int:
    """Parse a time: seconds before `now_ns`, or an ISO time.

    For a time in milliseconds, or in whole seconds, return the end of that millisecond or second, so that it includes
    every message shown with that time.

    Raises:
        ValueError: the text is neither; the message says what is allowed.
    """
    seconds_ago = _number(text)
    if seconds_ago is not None and 0 <= seconds_ago <= _SECONDS_MAX:
        return now_ns - round(seconds_ago * 1e9)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or seconds_ago is not None:
        raise ValueError(f"found {text!r}, allowed seconds ago, 0 or more, or an ISO time like 2026-11-21T22:10:00Z")
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
    return since // timedelta(microseconds=1) * 1000 + _precision_ns(text) - 1


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _precision_ns(text: str) -> int:
    """Return the precision of a written time: that of its last digit."""
    _, point, fraction = text.partition(".")
    digits = len(fraction) - len(fraction.lstrip("0123456789")) if point else 0
    return int(10 ** (9 - min(digits, 9)))
