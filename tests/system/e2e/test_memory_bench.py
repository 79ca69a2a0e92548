"""`router bench memory`, as it is typed, with few blocks."""

import re

import pytest
from click.testing import CliRunner

from router.__main__ import main

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
def test_every_process_is_measured_and_the_target_is_told() -> None:
    ran = CliRunner().invoke(main, ["bench", "memory", "--blocks", "2048", "--processes", "1,2"])
    assert ran.exit_code == 0, ran.output
    rows = [line.split(" | ") for line in ran.output.splitlines() if re.match(r"\| [12] ", line)]
    assert [row[0] for row in rows] == ["| 1", "| 2"]
    assert rows[0][2] == "1.00x"
    parts = [sorted(re.findall(r"[a-z][a-z0-9-]*", row[3])) for row in rows]
    assert parts == [["router"], ["index", "parent", "serving-0", "serving-1"]]
    assert re.search(r"two serving processes: \d\.\d\dx of one, target 1\.3x: (reached|missed)", ran.output)
