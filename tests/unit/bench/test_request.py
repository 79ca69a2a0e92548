"""The bench of one request: which stage a stack belongs to, and what its tables say."""

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.request.command import MODES, ORDER, SHAPES, request, tables
from bench.request.stages import LOOP, OF_CALLERS, STAGES, SampledStack, own_shares, shares
from bench.tables import Rounds

TAKE = "router.decision.routing:Routing.take"
BOOK = "router.fleet.trust:Calibration.note"
READ = "router.http.client:ClientConnection.data_received"
NAMED = [name for names in STAGES.values() for name in names]


@pytest.mark.parametrize("name", [*NAMED, *OF_CALLERS])
def test_every_name_of_the_stages_exists(name: str) -> None:
    module, _, inner = name.partition(":")
    found = importlib.import_module(module)
    for part in inner.split(".") if inner else ():
        found = getattr(found, part)


def test_what_no_function_runs_in_is_the_loops() -> None:
    stacks = [
        SampledStack(2, False, []),
        SampledStack(1, True, [READ]),
        SampledStack(4, False, [READ]),
        SampledStack(1, True, ["router.http.sites:Sites.checked", READ]),
    ]
    assert shares(stacks) == {LOOP: 3 / 8, "read": 5 / 8}


def test_what_a_library_does_is_its_callers_own_time() -> None:
    stacks = [SampledStack(3, False, ["numpy:sum", ":made", BOOK, TAKE]), SampledStack(1, False, ["nats:read"])]
    assert own_shares([*stacks, SampledStack(4, True, [READ])]) == {BOOK: 3 / 8}


def test_a_stage_costs_its_share_of_the_median() -> None:
    rounds, stacks = Rounds(), {}
    for mode in MODES:
        for shape in SHAPES:
            for cpu_us in (100.0, 300.0, 200.0):
                rounds.add(mode, shape, {"cpu_us": cpu_us, "kernel_us": cpu_us / 5})
            stacks[mode, shape] = [SampledStack(1, False, [READ]), SampledStack(3, False, [])]
    stages, functions = tables(rounds, stacks)
    rows = {row[0]: row[1] for row in stages.rows}
    assert [*rows] == ["all", "of it in the kernel", *ORDER]
    assert (rows["all"], rows["read"], rows[LOOP], rows["queue"]) == ("200", "50", "150", "0")
    assert [row[:2] for row in functions.rows] == [(f"`{READ}`", "50")]


@pytest.mark.slow
def test_a_quick_run_measures_every_request(tmp_path: Path) -> None:
    written, markdown = tmp_path / "found.json", tmp_path / "found.md"
    ran = CliRunner().invoke(request, ["--quick", "--json", str(written), "--markdown", str(markdown)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(written.read_bytes())
    assert [(each["mode"], each["shape"]) for each in found["stages"]] == [
        (mode, shape) for mode in MODES for shape in SHAPES
    ]
    assert not found["failed"]
    assert "### CPU us of a request" in markdown.read_text()
    for each in found["stages"]:
        assert {"relay", "journal", LOOP} & each["shares"].keys()
        assert sum(each["shares"].values()) == pytest.approx(1.0)
