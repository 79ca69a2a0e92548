"""The bench of one request: which stage a moment belongs to, the path of its calls, and its arithmetic."""

import importlib

import pytest

from bench.request.call_path import CallPath, path_steps
from bench.request.feed import use_of
from bench.request.machine_stacks import moments as machine_code_moments
from bench.request.machine_stacks import place_of
from bench.request.report import ORDER, tables
from bench.request.results import PACES, SHAPES, CpuUse, RequestResults, Stages, of_a_chunk
from bench.request.run import MODES
from bench.request.stages import (
    ELSE,
    LOOP,
    OBSERVER,
    OF_CALLERS,
    STAGES,
    WRITES,
    Moment,
    Step,
    named_stage,
    own_shares,
    shares,
)
from bench.request.tools import object_shares, system_calls
from router.compiled import MODULES

TAKE = "router.decision.routing:Routing.take"
BOOK = "router.fleet.ledger:Ledger.apply"
READ = "router.server.client_connection:ClientConnection.data_received"
WRITE = f"{OBSERVER}:MeasuredTransport.write"
NAMED = [name for names in STAGES.values() for name in names]


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("router.")])
def test_every_module_of_the_hot_path_belongs_to_a_stage_or_to_its_callers(module: str) -> None:
    assert named_stage(f"{module}:function") is not None


@pytest.mark.parametrize("name", [each for each in (*NAMED, *OF_CALLERS) if not each.startswith(OBSERVER)])
def test_every_name_of_the_stages_exists(name: str) -> None:
    module, _, inner = name.partition(":")
    found = importlib.import_module(module)
    for part in inner.split(".") if inner else ():
        found = getattr(found, part)


def test_no_name_has_two_stages() -> None:
    assert len({*NAMED, *OF_CALLERS}) == len(NAMED) + len(OF_CALLERS)


def test_what_no_function_runs_in_is_the_loops() -> None:
    moments = [
        Moment(2, False, []),
        Moment(1, True, [READ]),
        Moment(4, False, [READ]),
        Moment(1, True, ["router.server.heads:HeadReader.request", READ]),
    ]
    assert shares(moments) == {LOOP: 3 / 8, "read": 5 / 8}


def test_what_a_library_does_is_its_callers_own_time() -> None:
    moments = [Moment(3, False, ["numpy:sum", ":made", BOOK, TAKE]), Moment(1, False, ["nats:read"])]
    assert own_shares([*moments, Moment(4, True, [READ])]) == {BOOK: 3 / 8}


def step(place: str, *, line: int = 1, file: str = "") -> Step:
    return Step(True, place, file, line)


def back(place: str) -> Step:
    return Step(False, place, "", 1)


TRACE = [
    back("router.cli:before"),
    step("nats.aio.client:read"), back("nats.aio.client:read"),
    step(READ),
    step(TAKE), step(BOOK), back(BOOK), back(TAKE),
    step(TAKE), step(BOOK), back(BOOK), back(TAKE),
    step("router.server.upstream:WorkerConnection.send"), step(WRITE), back(WRITE),
]  # fmt: skip


def test_the_path_has_the_calls_of_the_callback_that_sends_and_the_open_ones() -> None:
    calls, stack = path_steps(TRACE)
    assert [each.place for each in calls] == [READ, TAKE, BOOK, TAKE, BOOK, TRACE[-3].place]
    assert [each.place for each in stack] == [READ, TRACE[-3].place]


def test_system_calls_are_read_from_the_table_of_strace() -> None:
    printed = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 61.07    0.012345           6      2030           write
 10.00    0.000345           1       812        12 read
------ ----------- ----------- --------- --------- ----------------
100.00    0.020215           7      2842        12 total
"""
    assert system_calls(printed) == {"write": 2030, "read": 812}


def test_shares_by_object_are_read_from_the_report_of_perf() -> None:
    printed = "# Overhead  Shared Object\n# ....\n    68.20%  libpython3.11.so.1.0\n    18.40%  [kernel.kallsyms]\n\n"
    assert object_shares(printed) == {"libpython3.11.so.1.0": 0.682, "kernel.kallsyms": 0.184}


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


@pytest.mark.parametrize(
    ("symbol", "place"),
    [
        ("CPyDef_router___fleet___ledger___Ledger___apply", "router.fleet.ledger:Ledger.apply"),
        ("CPyPy_router___server___relay___ResponseRelay____begin", "router.server.relay:ResponseRelay._begin"),
        ("CPyDef_router___decision___decide___decide", "router.decision.decide:decide"),
        ("CPyDef_router___decision___state____x", "router.decision.state:_x"),
        ("__pyx_pw_6uvloop_4loop_8UVStream_5write", WRITE),
        ("__pyx_f_6uvloop_4loop_8UVStream__exec_write", WRITE),
        ("__pyx_pw_6uvloop_4loop_8UVStream_7writelines", WRITE),
        ("__pyx_f_6uvloop_4loop_8UVStream__get_write_buffer_size", None),
        ("CPyDef_unknown___x", None),
        ("CPyDict_GetItem", None),
        ("_PyEval_EvalFrameDefault", None),
    ],
)  # fmt: skip
def test_machine_code_has_the_place_of_its_function(symbol: str, place: str | None) -> None:
    assert place_of(symbol) == place


def test_stacks_of_machine_code_are_moments() -> None:
    stacks = [
        [
            "tcp_sendmsg",
            "__pyx_f_6uvloop_4loop_8UVStream_write",
            "CPyDef_router___server___upstream___WorkerConnection___send",
            "uv_run",
        ],
        [
            "PyDict_SetItem",
            "CPyDef_router___decision___routing___Lease___end",
            "_PyEval_EvalFrameDefault",
            "uv_run",
            "CPyDef_router___names___x",
        ],
        ["epoll_wait", "uv_run", "_PyEval_EvalFrameDefault"],
        ["__pyx_f_6uvloop_4loop_8UVStream_write", "_PyEval_EvalFrameDefault", "uv_run"],
    ]
    printed = "".join("\n" + "".join(f"\t    {at:x} {name}\n" for at, name in enumerate(each)) for each in stacks)
    assert shares(machine_code_moments(printed)) == {WRITES: 0.25, "settle": 0.25, LOOP: 0.25, ELSE: 0.25}
