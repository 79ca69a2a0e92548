"""What an engine said, as metrics: what was kept out is counted, and what is not known has no sample."""

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from kv_protocol.load import LoadReport, PhaseLoad
from kv_runtime.supervise import PartGaveUp, Restarts, SupervisedWork
from kv_runtime.telemetry import Family
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.quarantine import REASONS
from worker_agent.load.reports import PROBLEMS, LoadRows
from worker_agent.metrics import PHASES, engine_event_families, load_families, row_families, thread_family

REPORT = LoadReport(
    instance="i", iteration=1, running_requests=2, waiting_requests=3, used_blocks=4, total_blocks=5, iteration_s=0.25
)


def samples(families: Iterable[Family], name: str, label: str) -> dict[str, float]:
    (family,) = [each for each in families if each.name == f"kvrouter_{name}"]
    return {each.labels[label]: each.value for each in family.samples}


def test_every_reason_has_a_sample_and_those_that_occurred_are_counted() -> None:
    rules = TrtllmRules(4)
    rules.translate([None, {"event_id": 0, "data": {"type": "removed", "block_hashes": ["x"]}}])
    found = samples(engine_event_families("w", rules), "quarantined_events", "reason")
    assert found == {**dict.fromkeys(REASONS, 0.0), "not_a_map": 1.0, "block_hash": 1.0}


def test_every_problem_of_a_row_has_a_sample() -> None:
    rows = LoadRows("i", (0,))
    rows.read([None, None])
    found = samples(row_families("w", rows), "engine_stats_skipped", "problem")
    assert found == {**dict.fromkeys(PROBLEMS, 0.0), "not_a_map": 2.0}


def test_ranks_are_told_apart() -> None:
    families = list(load_families("w", {0: REPORT, 3: REPORT}))
    assert samples(families, "engine_iteration_seconds", "dp_rank") == {"0": 0.25, "3": 0.25}
    assert samples(families, "engine_waiting_requests", "dp_rank") == {"0": 3.0, "3": 3.0}


def test_a_phase_has_a_sample_where_the_engine_tells_of_it() -> None:
    told = msgspec.structs.replace(REPORT, phases=PhaseLoad(context_requests=7, paused_kv_tokens=0))
    families = list(load_families("w", {0: told, 1: REPORT}))
    assert samples(families, "engine_phase_requests", "phase") == {"context": 7.0}
    assert samples(families, "engine_phase_tokens", "phase") == {}
    assert samples(families, "engine_phase_kv_tokens", "phase") == {"paused": 0.0}


def test_every_figure_of_a_phase_is_a_gauge() -> None:
    shown = {f"{phase}_{figure}" for _, phases, figure in PHASES.values() for phase in phases}
    assert shown == set(PhaseLoad.__struct_fields__)


async def test_each_poll_has_its_failures() -> None:
    async def work(_: asyncio.Event) -> None:
        raise ZeroDivisionError

    failing = SupervisedWork("engine-events", work, restarts=Restarts(failures_max=3, pause_s=0.0))
    with pytest.raises(PartGaveUp):
        await failing.run(asyncio.Event())
    idle = SupervisedWork("iteration-stats", work)
    family = thread_family("w", [failing, idle])
    found = samples([family], "poll_thread_failures", "thread")
    assert found == {"engine-events": 3.0, "iteration-stats": 0.0}
