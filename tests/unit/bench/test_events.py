"""`router bench events`, as it is typed, the processes that it measures in, how old batches are, and the targets."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.events.command import tables, verdicts
from bench.events.observed import STAGES, Age, BatchTimes, SentBatches, ages, medians_ms, spread
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


MS = 1_000_000
BATCH = BatchTimes("w0/0", 2, 8, made_ns=102 * MS, stored_ns=105 * MS, delivered_ns=106 * MS, applied_ns=110 * MS)


def test_a_batch_is_as_old_as_its_own_event_and_its_message_left_with_the_first_of_its_batches() -> None:
    sent = SentBatches(flushed_ns=[90 * MS, 100 * MS, 101 * MS], handed_ns=[(1, 104 * MS), (3, 120 * MS)])
    (age,) = ages([BATCH], {"w0/0": sent})
    assert age.flushed_ns == 100 * MS
    assert age.total_s == pytest.approx(0.010)
    assert {stage: round(1e3 * each_s) for stage, each_s in age.stages_s.items()} == {
        "poll": 2,
        "to log": 3,
        "publish": 1,
        "to index": 1,
        "apply": 4,
    }
    assert age.total_s == pytest.approx(sum(each_s for stage, each_s in age.stages_s.items() if stage != "publish"))


def test_without_the_engine_s_flush_times_the_age_counts_from_the_payload() -> None:
    (age,) = ages([BATCH], {})
    assert age.total_s == pytest.approx(0.008)
    assert set(age.stages_s) == {"to log", "to index", "apply"}


def test_a_spread_is_median_tail_and_worst_in_milliseconds() -> None:
    assert spread([each / 1000 for each in range(1, 101)]) == pytest.approx({"p50": 51.0, "p99": 100.0, "max": 100.0})
    assert spread([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}


def test_medians_are_told_of_the_stages_that_are_known() -> None:
    known = [Age(0, 0.0, {"to log": each / 1000, "apply": 0.0}) for each in (1, 9, 2)]
    assert medians_ms(known) == {"to log": 2.0, "apply": 0.0}
    assert medians_ms([]) == {}
    assert set(STAGES) >= set(medians_ms(known))
