"""`router bench scrape`, as it is typed, with few ranks."""

import pytest
from click.testing import CliRunner

from router.__main__ import main

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
def test_scrapes_of_a_router_that_knows_all_ranks_are_measured() -> None:
    ran = CliRunner().invoke(main, ["bench", "scrape", "--ranks", "11"])
    assert ran.exit_code == 0, ran.output
    table = [line.strip("| ").split(" | ") for line in ran.output.splitlines() if line.startswith("|")]
    heads, (samples, size, cpu, took, held_up, alone) = table[0], table[-1]
    assert "11 ranks, 8 a worker" in ran.output
    assert len(heads) == 6
    assert int(samples.replace(",", "")) > 11 * 10
    assert float(size) > 0
    assert float(cpu) >= 0
    for usual_and_worst in (took, held_up):
        usual, worst = map(float, usual_and_worst.split(", "))
        assert 0 <= usual <= worst
    assert float(alone) >= 0
