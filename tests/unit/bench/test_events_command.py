"""`router bench events`, as it is typed, and the processes that it measures in."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.events.plan import GROUPS, QUICK
from router.__main__ import main


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "events", *arguments])


@pytest.mark.slow
def test_a_quick_run_measures_every_group(tmp_path: Path) -> None:
    markdown = tmp_path / "out.md"
    ran = typed("--quick", "--json", "-", "--markdown", str(markdown))
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert {"machine", "commit", "others_ratio", *GROUPS} <= set(told)
    assert [cell["name"] for cell in told["freshness"]] == ["2,000 blocks/s"]
    assert [cell["event_blocks"] for cell in told["throughput"]] == [blocks for blocks, _ in QUICK.throughput]
    held = QUICK.ranks * QUICK.rank_blocks
    tail = QUICK.ranks * QUICK.tail_blocks
    assert [start["blocks"] for start in told["cold"]["starts"]] == [held + tail, held, held + tail]
    assert [each["healed_by"] for each in told["recovery"]] == ["replay", "replay", "repair", "dump"]
    assert [each["ranks"] for each in told["pulse"]["pulses"]] == list(QUICK.heartbeat_ranks)
    assert "### Recovery: from detection to current, ms" in markdown.read_text()
    assert "### Targets" not in markdown.read_text()
