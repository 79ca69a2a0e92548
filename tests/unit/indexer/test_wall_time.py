"""Times as people write them."""

import pytest

from indexer.service import wall_time

NOON_NS = 1_795_262_400 * 10**9
"""2026-11-21T12:00:00Z"""


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("0", NOON_NS),
        ("90", NOON_NS - 90 * 10**9),
        ("0.25", NOON_NS - 250_000_000),
        ("2026-11-21T12:00:00Z", NOON_NS + 10**9 - 1),
        ("2026-11-21T12:00:00", NOON_NS + 10**9 - 1),
        ("2026-11-21 13:00:00+01:00", NOON_NS + 10**9 - 1),
        ("2026-11-21T12:00:00.5Z", NOON_NS + 600_000_000 - 1),
        ("2026-11-21T12:00:00.123Z", NOON_NS + 124_000_000 - 1),
        ("2026-11-21T12:00:00.123456+00:00", NOON_NS + 123_457_000 - 1),
        ("2026-11-21T12:00:00,123Z", NOON_NS + 124_000_000 - 1),
        ("2026-11-21T12:00:00.1234567-00:00", NOON_NS + 123_456_800 - 1),
        ("2026-11-21T12:00:00.123456789Z", NOON_NS + 123_456_789),
        ("2026-11-21T12:00:00.1234567891Z", NOON_NS + 123_456_789),
        ("20261121", NOON_NS - 12 * 3600 * 10**9 + 10**9 - 1),
        ("20261121T120000.5Z", NOON_NS + 600_000_000 - 1),
    ],
)
def test_a_time_is_seconds_ago_or_the_end_of_what_an_iso_time_names(text: str, expected_ns: int) -> None:
    assert wall_time.read(text, NOON_NS) == expected_ns


@pytest.mark.parametrize(
    "text", ["", "-1", "nan", "inf", "1e300", "yesterday", "2026-13-01", "12:00", "2026-11-21T25:00"]
)
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"found .*, allowed seconds ago, 0 or more, or an ISO time") as refused:
        wall_time.read(text, NOON_NS)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("ns", [0, 1, 999_999, 10**9, NOON_NS, NOON_NS + 123_456_789])
def test_what_is_shown_is_read_as_the_millisecond_in_which_it_lies(ns: int) -> None:
    shown = wall_time.shown(ns)
    assert shown.endswith("Z")
    assert wall_time.read(shown, 0) == ns // 10**6 * 10**6 + 10**6 - 1


def test_a_time_is_shown_in_utc_to_the_millisecond() -> None:
    assert wall_time.shown(NOON_NS + 7_999_999) == "2026-11-21T12:00:00.007Z"
