"""`router bench events`, as it is typed, the processes that it measures in, how old batches are, and the targets."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.events.command import tables, verdicts
from bench.events.observed import BatchTimes, ages_s, spread
from bench.events.run import OURS, QUICK
from bench.tables import Rounds
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


def test_a_batch_is_as_old_as_its_own_event_or_where_that_is_not_known_as_its_payload() -> None:
    batches = [BatchTimes("w0/0", seq, 8, made_ns=102, applied_ns=110) for seq in (1, 2)]
    flushed_ns = {"w0/0": [90, 100, 101]}
    assert ages_s(batches, flushed_ns) == [20 / 1e9, 10 / 1e9]
    assert ages_s(batches, flushed_ns, since_ns=95) == [10 / 1e9]
    assert ages_s(batches, {}) == [8 / 1e9] * 2


def test_a_spread_is_median_tail_and_worst_in_milliseconds() -> None:
    assert spread([each / 1000 for each in range(1, 101)]) == pytest.approx({"p50": 51.0, "p99": 100.0, "max": 100.0})
    assert spread([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}
