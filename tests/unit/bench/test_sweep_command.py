"""`router bench sweep`: what it refuses before anything is started."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.sweep.command import sweep


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--concurrency", "1,0"),
            "'--concurrency': found '0', allowed users, whole numbers of 1..4096, between commas",
        ),
        (("--concurrency", "1.5"), "found '1.5', allowed users"),
        (("--rate", "nan"), "'--rate': found 'nan', allowed requests a second, above 0, between commas"),
        (("--isl", ""), "'--isl': found '', allowed tokens, whole numbers of 1..1048576, between commas"),
        (("--prefix-share", "0.5,1.1"), "'--prefix-share': found '1.1', allowed shares of 0..1, between commas"),
        (("--modes", "kv,fast"), "'--modes': found 'fast', allowed a mode: "),
        (("--layouts", "4x"), "'--layouts': found '4x', allowed 4a or 1p3d with 1..99 of each, between commas"),
        (("--layouts", "1p1d@65536"), "'--layouts': found '1p1d@65536', allowed 4a or 1p3d"),
        (("--url", "127.0.0.1:8000"), "'--url': found '127.0.0.1:8000', allowed http://host:port"),
        (("--concurrency", "1", "--rate", "1"), "found --concurrency and --rate, allowed one of them"),
        (("--url", "http://h:1", "--modes", "kv"), "found --url with --modes, allowed without"),
        (("--url", "http://h:1", "--worker-set", "a.b=1"), "found --url with --worker-set, allowed without"),
        (("--gpus", "4"), "found --gpus without --url, allowed with it"),
        (("--isl", ",".join(map(str, range(1, 5001)))), "found 40000 runs, allowed 10000"),
        (("--rate", "1.0000001,1.0000002"), "found two runs of one name, allowed rates and shares that differ"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    ran = CliRunner().invoke(sweep, ["--out", str(tmp_path / "runs"), *arguments])
    assert ran.exit_code == 2
    assert words in ran.output
    assert not (tmp_path / "runs").exists()
