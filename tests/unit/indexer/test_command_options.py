"""What is typed at `indexer verify | tail | at | dump`, times too: what may not be is named, with what is allowed."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from indexer.__main__ import main
from indexer.commands.options import read_hashes, read_rank
from indexer.service.history import read_time, time_text
from kv_protocol.ids import WorkerRank

COMMANDS = ("verify", "tail", "at", "dump")
TOO_LARGE = str(1 << 64)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("verify --timeout-s 0", "Invalid value for '--timeout-s': 0.0 is not in the range 0.1<=x<=600"),
        ("tail --since x", "Invalid value for '--since': 'x' is not a valid float range"),
        ("verify --examples -1", "Invalid value for '--examples': -1 is not in the range"),
        ("tail --rank w0", "Invalid value for '--rank': found 'w0', allowed worker/dp_rank, as w0/0"),
        ("tail --rank W0/0", "Invalid value for '--rank': found 'W0/0'"),
        ("tail --since -1", "Invalid value for '--since': -1.0 is not in the range"),
        ("tail --from-seq 0", "Invalid value for '--from-seq': 0 is not in the range x>=1"),
        ("tail --limit 0", "Invalid value for '--limit': 0 is not in the range x>=1"),
        ("at --seq 0", "Invalid value for '--seq': 0 is not in the range x>=1"),
        ("at --time yesterday", "Invalid value for '--time': found 'yesterday', allowed seconds ago, 0 or more, or an"),
        ("at --time -5", "Invalid value for '--time': found '-5', allowed"),
        ("at --seq 1 --overlap 1,x", "Invalid value for '--overlap': found 'x', allowed sequence hashes (u64, decimal"),
        (f"at --seq 1 --prefix {TOO_LARGE}", f"Invalid value for '--prefix': found '{TOO_LARGE}', allowed"),
        ("dump --format xml", "Invalid value for '--format': 'xml' is not one of 'json', 'columns'"),
        ("dump --rank w0/4096", "Invalid value for '--rank': found 'w0/4096'"),
        ("dump --nonsense", "No such option"),
    ],
)
def test_what_may_not_be_is_named_with_what_is_allowed(typed: str, words: str) -> None:
    ended = CliRunner().invoke(main, typed.split(), env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    assert words in ended.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    shown = CliRunner().invoke(main, [command, "--help"])
    assert (shown.exit_code, f"indexer {command} " in shown.output) == (0, True)


def test_the_commands_are_among_the_indexer_s() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    assert [command for command in (*COMMANDS, "serve", "check-capture") if f"  {command} " not in shown] == []


@pytest.mark.parametrize(("text", "rank"), [("w0/0", ("w0", 0)), ("a-9/4095", ("a-9", 4095))])
def test_a_rank_is_a_worker_and_its_number(text: str, rank: tuple[str, int]) -> None:
    assert read_rank(text) == WorkerRank(*rank)


@pytest.mark.parametrize(
    "text", ["", "w0", "/0", "w0/", "w0/-1", "w0/00", "w0/x", "w0/٣", "w0/1/2", "w0/4096", "W/0", "w 0/0"]
)
def test_anything_else_is_no_rank(text: str) -> None:
    with pytest.raises(ValueError, match="allowed worker/dp_rank, as w0/0"):
        read_rank(text)


@pytest.mark.parametrize(
    ("text", "hashes"),
    [
        ("1", [1]),
        ("1,0x10, 3", [1, 16, 3]),
        ("0", [0]),
        (f"{(1 << 64) - 1} 0xffffffffffffffff", [(1 << 64) - 1] * 2),
        ("[5, 6]", [5, 6]),
    ],
)
def test_hashes_are_numbers_with_commas_or_blanks_between_typed_or_in_a_file(
    text: str, hashes: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "hashes"
    file.write_text(f"{text}\n")
    assert (read_hashes(text), read_hashes(str(file))) == (hashes, hashes)


@pytest.mark.parametrize(
    "text", ["", ",", "[]", "x", "1,,x", "-1", "01", "1.5", "0x", "0x1ffffffffffffffff", TOO_LARGE, "²"]
)
def test_anything_else_is_no_hashes(text: str) -> None:
    with pytest.raises(ValueError, match="allowed sequence hashes"):
        read_hashes(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hashes"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="which cannot be read: 'utf-8' codec"):
        read_hashes(str(file))


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
    assert read_time(text, NOON_NS) == expected_ns


@pytest.mark.parametrize(
    "text", ["", "-1", "nan", "inf", "1e300", "yesterday", "2026-13-01", "12:00", "2026-11-21T25:00"]
)
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"found .*, allowed seconds ago, 0 or more, or an ISO time") as refused:
        read_time(text, NOON_NS)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("ns", [0, 1, 999_999, 10**9, NOON_NS, NOON_NS + 123_456_789])
def test_what_is_shown_is_read_as_the_millisecond_in_which_it_lies(ns: int) -> None:
    shown = time_text(ns)
    assert shown.endswith("Z")
    assert read_time(shown, 0) == ns // 10**6 * 10**6 + 10**6 - 1


def test_a_time_is_shown_in_utc_to_the_millisecond() -> None:
    assert time_text(NOON_NS + 7_999_999) == "2026-11-21T12:00:00.007Z"
