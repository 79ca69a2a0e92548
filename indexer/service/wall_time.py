"""Parses and prints times: ISO 8601, UTC by default; as a number, nanoseconds since 1970."""

import re
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS_MAX = 10**10
_FRACTION = re.compile("[.,]([0-9]{1,9})")


def shown(time_ns: int) -> str:
    """Return the time to the millisecond, as `2026-11-21T22:10:00.123Z`."""
    time = _EPOCH + timedelta(microseconds=time_ns // 1000)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read(text: str, now_ns: int) -> int:
    """Parse a time: seconds before `now_ns`, or an ISO time.

    For a time in milliseconds, or in whole seconds, return the end of that millisecond or second, so that it includes
    every message shown with that time. Eight digits that are a date, like 20261121, are an ISO time.

    Raises:
        ValueError: the text is neither; the message says what is allowed.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return now_ns - round(_seconds_ago(text) * 1e9)
    since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
    found = _FRACTION.search(text)
    digits = found[1] if found else ""
    below_us, precision_ns = int(digits[6:].ljust(3, "0")), int(10 ** (9 - len(digits)))
    return since // timedelta(microseconds=1) * 1000 + below_us + precision_ns - 1


def _seconds_ago(text: str) -> float:
    try:
        if 0 <= (seconds := float(text)) <= _SECONDS_MAX:
            return seconds
    except ValueError:
        pass
    raise ValueError(f"found {text!r}, allowed seconds ago, 0 or more, or an ISO time like 2026-11-21T22:10:00Z")
