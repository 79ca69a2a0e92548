"""The bench of one request: which stage a moment belongs to, the path of its calls, and its arithmetic."""

import importlib

import pytest

from bench.request.call_path import CallPath
from bench.request.feed import use_of
from bench.request.report import ORDER, tables
from bench.request.results import PACES, SHAPES, CpuUse, RequestResults, Stages, of_a_chunk
from bench.request.run import MODES
from bench.request.stages import LOOP, OBSERVER, OF_CALLERS, STAGES, Moment, own_shares, shares

TAKE = "router.decision.routing:Routing.take"
BOOK = "router.fleet.calibration:Calibration.note"
READ = "router.http.client:ClientConnection.data_received"
NAMED = [name for names in STAGES.values() for name in names]


@pytest.mark.parametrize("name", [each for each in (*NAMED, *OF_CALLERS) if not each.startswith(OBSERVER)])
def test_every_name_of_the_stages_exists(name: str) -> None:
    module, _, inner = name.partition(":")
    found = importlib.import_module(module)
    for part in inner.split(".") if inner else ():
        found = getattr(found, part)


def test_what_no_function_runs_in_is_the_loops() -> None:
    moments = [
        Moment(2, False, []),
        Moment(1, True, [READ]),
        Moment(4, False, [READ]),
        Moment(1, True, ["router.http.heads:HeadReader.request", READ]),
    ]
    assert shares(moments) == {LOOP: 3 / 8, "read": 5 / 8}


def test_what_a_library_does_is_its_callers_own_time() -> None:
    moments = [Moment(3, False, ["numpy:sum", ":made", BOOK, TAKE]), Moment(1, False, ["nats:read"])]
    assert own_shares([*moments, Moment(4, True, [READ])]) == {BOOK: 3 / 8}


def test_a_chunk_costs_the_difference_of_two_streams_over_their_chunks() -> None:
    assert of_a_chunk(CpuUse(400.0, 100.0), CpuUse(1400.0, 300.0), 200) == CpuUse(5.0, 1.0)


def test_an_event_batch_costs_what_is_used_beyond_a_time_without_events() -> None:
    use = use_of(used_s=0.3, took_s=10.0, idle=0.01, blocks=80_000, batches=10_000, messages=500)
    assert use == pytest.approx((1000.0, 8000.0, 50.0, 20.0, 400.0, 10.0))


def made_results() -> RequestResults:
    results = RequestResults()
    path = CallPath(3, (READ, TAKE), (READ,), ())
    for mode in MODES:
        for shape in SHAPES:
            key = mode, shape.name
            results.rounds[key] = [CpuUse(100.0, 20.0), CpuUse(300.0, 60.0), CpuUse(200.0, 40.0)]
            results.stages[key] = Stages({"read": 0.25, LOOP: 0.75}, {READ: 0.25}, 400, {"read": 2.0}, path)
            results.system_calls[key] = {"read": 2.0, "mmap": 0.001}
        results.chunks[mode, PACES[0].name] = CpuUse(3.0, 1.0)
    return results


def test_a_stage_costs_its_share_of_the_median() -> None:
    table = next(each for each in tables(made_results()) if "by stage, kv" in each.title)
    rows = {row[0]: row[1] for row in table.rows}
    assert [*rows] == [*ORDER, "all"]
    assert (rows["read"], rows[LOOP], rows["queue"]) == ("50.0 (25.0%)", "150.0 (75.0%)", "0.0 (0.0%)")
