import os

import pytest

from bench.index.command import PEER_PYTHON
from bench.oracle.grid import (
    BY_DESIGN,
    LOAD_MAX,
    WEIGHTS,
    Flip,
    Held,
    OracleCell,
    OracleLoad,
    OraclePrompt,
    Outcome,
    Weights,
    flip,
    grid,
)
from bench.oracle.ours import our_flip
from bench.oracle.report import OracleComparison, by_design, compared, recorded, tables
from bench.oracle.run import PeerProcess, peer_flips
from tests.support.paths import RECORDINGS

_RECORDED = RECORDINGS / "peer_flips.json"


def _peer_recorded() -> dict[str, Flip]:
    return recorded(_RECORDED.read_bytes())[1]


def _step(at: int, *, tie: bool = False) -> Flip:
    def outcome(load: int) -> Outcome:
        return Outcome(load < at or (tie and load == at), load >= at, float(load), float(at))

    return flip(outcome)


@pytest.mark.parametrize("at", [0, 1, 7, 128, LOAD_MAX])
def test_a_flip_is_found_wherever_it_is(at: int) -> None:
    assert _step(at) == Flip(at, False, float(at), float(at))


def test_a_tie_at_the_flip_is_told() -> None:
    assert _step(20, tie=True) == Flip(20, True, 20.0, 20.0)


def test_a_choice_that_never_flips_has_no_load() -> None:
    assert _step(LOAD_MAX + 1) == Flip(None)


def test_every_cell_of_the_grid_is_recorded_of_the_peer() -> None:
    cells = [*grid(), *(cell for _, cell in BY_DESIGN)]
    assert set(_peer_recorded()) == {cell.name for cell in cells}


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: weights.name)
def test_our_choice_flips_where_the_recorded_peers_does(weights: Weights) -> None:
    cells = [cell for cell in grid() if cell.weights == weights]
    both = compared(_peer_recorded(), {cell.name: our_flip(cell) for cell in cells}, cells)
    assert [f"{each.cell.name}: {each.peer.name}, ours {each.ours.name}" for each in both if not each.is_equal] == []


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: weights.name)
def test_our_costs_at_the_flips_are_the_recorded_peers(weights: Weights) -> None:
    cells = [cell for cell in grid() if cell.weights == weights]
    both = compared(_peer_recorded(), {cell.name: our_flip(cell) for cell in cells}, cells)
    assert [each.cell.name for each in both if each.costs[0] != each.costs[1]] == []


def test_what_differs_by_design_is_told_with_its_reason() -> None:
    ours = {cell.name: our_flip(cell) for _, cell in BY_DESIGN}
    found = [(each.peer.name, each.ours.name) for _, each in by_design(_peer_recorded(), ours)]
    assert found == [("16 (tie)", "16"), ("20 (tie)", "19 (tie)")]


@pytest.mark.planted
def test_a_planted_weight_is_found() -> None:
    cell = OracleCell(Weights("default"), OraclePrompt(32, 7, Held(20)), OracleLoad("prefill"))
    planted = cell._replace(weights=Weights("default", prefill_scale=1.1))
    both = compared(_peer_recorded(), {cell.name: our_flip(planted)}, [cell])
    comparison = OracleComparison("m", "p", both, [])
    assert [each.cell for each in comparison.different] == [cell]
    assert any(line.startswith("DIFFERENT  default / 32+7t") for line in comparison.lines())
    assert tables(comparison)[0].rows == [("default", "10t != 11")]


def test_the_peer_itself_flips_where_it_is_recorded_to() -> None:
    python = os.environ.get(PEER_PYTHON)
    if not python:
        pytest.skip(f"${PEER_PYTHON} names no interpreter with ai-dynamo-runtime")
    cells = list(grid(is_small=True))
    with PeerProcess(python) as process:
        assert f"ai-dynamo-runtime {process.version}" == recorded(_RECORDED.read_bytes())[0]
        found = peer_flips(process, cells, lambda _cell: None)
    kept = _peer_recorded()
    assert {name: each[:2] for name, each in found.items()} == {cell.name: kept[cell.name][:2] for cell in cells}
