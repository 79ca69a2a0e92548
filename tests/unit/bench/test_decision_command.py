"""The bench of decisions: every cell and stage is there, and a target that is missed is named."""

import json

import pytest
from click.testing import CliRunner

from bench.decision.command import STAGES, Timed, decision, missed
from bench.decision.fleet import IN_FLIGHT, DecisionFleet, DecisionShape
from bench.decision.request import REQUEST_STAGES

SMALL = DecisionShape(4, 8)


def test_every_cell_has_every_stage() -> None:
    typed = CliRunner().invoke(decision, ["--ranks", "2,4", "--blocks", "8", "--decisions", "10", "--json"])
    assert typed.exit_code == 0
    told = json.loads(typed.stdout)
    assert [(cell["ranks"], cell["blocks"]) for cell in told["cells"]] == [(2, 8), (4, 8)]
    assert all(set(cell["p50_us"]) == set(cell["p99_us"]) == set(STAGES) for cell in told["cells"])
    assert all(set(cell["request"]["p50_us"]) == set(REQUEST_STAGES) for cell in told["cells"])
    assert (told["misses"], "cores" in told["machine"]) == ([], True)


@pytest.mark.parametrize(("mode", "ranks", "misses"), [("kv", 64, 2), ("kv", 8, 0), ("random", 64, 0)])
def test_a_target_is_of_one_cell(mode: str, ranks: int, misses: int) -> None:
    slow = dict.fromkeys(STAGES, 200.0)
    assert len(missed(Timed(DecisionShape(ranks, 512, mode), 10, slow, slow))) == misses


def test_the_fleet_that_is_measured_is_at_work_and_holds_parts_of_prompts() -> None:
    fleet = DecisionFleet(SMALL, 1)
    loads = fleet.state.loads()
    assert sum(load.active_requests for load in loads.values()) == IN_FLIGHT * SMALL.ranks
    verdicts = [fleet.routing.decide(request) for request in fleet.requests(40)]
    assert {verdict.trust for verdict in verdicts} == {"EXACT"}
    assert len({verdict.overlap_blocks for verdict in verdicts}) > 1
