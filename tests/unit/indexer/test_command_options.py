"""What is typed at `indexer verify | tail | at | dump` and may not be: named, with what is allowed, exit code 2."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from indexer.__main__ import main
from indexer.commands.options import read_hashes, read_rank
from kv_protocol.ids import WorkerRank

COMMANDS = ("verify", "tail", "at", "dump")
TOO_LARGE = str(1 << 64)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("verify --timeout-s 0", "Invalid value for '--timeout-s': 0.0 is not in the range 0.1<=x<=600"),
        ("verify --timeout-s nan", "Invalid value for '--timeout-s': found 'nan', allowed 0.1..600"),
        ("tail --since x", "Invalid value for '--since': found 'x', allowed 0..1e+09"),
        ("tail --since nan", "Invalid value for '--since': found 'nan', allowed 0..1e+09"),
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
