"""`router bench disagg`, as it is typed."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from router.__main__ import main

SMALL = ("--requests", "20", "--layouts", "3a,1p2d,1p2d+isl_bounding,1p2d@4096", "--rates", "1,8", "--jobs", "1")


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "disagg", *arguments])


def test_the_same_arguments_make_the_same_bytes(tmp_path: Path) -> None:
    first, second = (typed(*SMALL, "--json", "--out", str(tmp_path / name)) for name in ("first", "second"))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == second.stdout == (tmp_path / "first/disagg.json").read_text()
    assert (tmp_path / "first/disagg.svg").read_bytes() == (tmp_path / "second/disagg.svg").read_bytes()
    told = json.loads(first.stdout)
    assert [(each["rate"], each["layout"]) for each in told["cells"]] == [
        (rate, layout) for rate in (1.0, 8.0) for layout in ("3a", "1p2d", "1p2d+isl_bounding", "1p2d@4096")
    ]
    assert {each["requests"] for each in told["cells"]} == {20}
    assert {each["layout"] for each in told["cells"] if each["failed"]} == {"1p2d@4096"}
    assert told["comparisons"]


def test_tables_name_the_setting_every_cell_and_the_better_layout(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]}
    file.write_text(json.dumps(line) + "\n" + json.dumps(line | {"timestamp": 9000}) + "\n")
    shown = typed("--trace", str(file), "--rates", "1", "--jobs", "1")
    assert shown.exit_code == 0, shown.stderr
    for expected in (
        "2 requests in 8 s at x1 (x1 = 0.26/s); seed 1",
        "8 GPUs of 700,000 KV tokens, blocks of 512",
        "KV: 144 KiB a token, 50 GB/s, 1 ms a transfer",
        "goodput/GPU 2000/20",
        "5p3d+isl_or_load",
        "5p3d@512",
        "TTFT p50, ms",
    ):
        assert expected in shown.stdout, shown.stdout
