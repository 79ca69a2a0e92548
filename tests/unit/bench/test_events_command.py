"""`router bench events`, as it is typed, the processes that it measures in, and what it says of figures."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.events.command import tables, verdicts
from bench.events.plan import QUICK
from bench.events.run import OURS
from bench.rounds import Rounds
from router.__main__ import main


@pytest.mark.slow
def test_a_quick_run_measures_every_group(tmp_path: Path) -> None:
    written, markdown = tmp_path / "out.json", tmp_path / "out.md"
    command = ["bench", "events", "--quick", "--json", str(written), "--markdown", str(markdown)]
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    cells = {each["cell"]: each["rounds"][0] for each in json.loads(written.read_bytes())["cells"]}
    held, tail = QUICK.ranks * QUICK.rank_blocks, QUICK.ranks * QUICK.tail_blocks
    assert cells["freshness, 2,000 blocks/s"]["p50"] > cells["freshness, 2,000 blocks/s"]["bare p50"] / 10
    assert cells["throughput, events of 64 blocks"]["blocks/s"] > 0
    assert cells["cold start, from the log"]["blocks"] == held
    assert cells["cold start, from a snapshot"]["blocks"] == cells["cold start, from dumps"]["blocks"] == held + tail
    assert "### Cold start" in markdown.read_text()
    assert "### Targets" not in markdown.read_text()


def test_a_target_is_missed_if_one_cell_misses_it() -> None:
    found = Rounds()
    found.add(OURS, "freshness, slow", {"p50": 4.0, "p99": 49.0, "bare p50": 0.5})
    found.add(OURS, "freshness, fast", {"p50": 6.0, "p99": 49.0, "bare p50": 0.5})
    found.add(OURS, "throughput, events of 8 blocks", {"blocks/s": 1e5, "bare blocks/s": 8e6})
    found.add(OURS, "cold start, from a snapshot", {"caught up s": 1.5, "all proven s": 3.5})
    assert [each.holds for each in verdicts(found)] == [False, True, True, False, True, True]
    assert [each.title.partition(";")[0] for each in tables(found)] == ["freshness", "throughput", "cold start"]
    assert {each.holds for each in verdicts(Rounds())} == {None}
    assert tables(Rounds()) == []
