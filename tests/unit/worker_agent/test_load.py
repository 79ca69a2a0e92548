"""TensorRT-LLM's iteration statistics, of any version, as a load report."""

from typing import Any

import pytest

from kv_protocol.load import LoadReport, decode_load, encode_load
from worker_agent.core.engine import EngineDescription, EngineRequest
from worker_agent.core.load import load_report
from worker_agent.core.simulator.scheduler import Simulator
from worker_agent.core.simulator.statistics import render

ROW: dict[str, Any] = {
    "timestamp": "2025-01-01",
    "iter": 12,
    "iterLatencyMS": 25.0,
    "numActiveRequests": 3,
    "numQueuedRequests": 4,
    "kvCacheStats": {"maxNumBlocks": 100, "freeNumBlocks": 40, "usedNumBlocks": 60, "tokensPerBlock": 32},
    "inflightBatchingStats": {"numCtxTokens": 512, "numGenRequests": 2},
    "specDecodingStats": None,
    "attentionDpRank": 1,
}
EMPTY = LoadReport(instance="i", iteration=0, running_requests=0, waiting_requests=0, used_blocks=0, total_blocks=0)
NUMBERS = ("iter", "iterLatencyMS", "numActiveRequests", "numQueuedRequests")


def test_a_row_is_the_report_of_its_rank() -> None:
    expected = LoadReport(
        instance="i",
        iteration=12,
        running_requests=3,
        waiting_requests=4,
        used_blocks=60,
        total_blocks=100,
        context_tokens=512,
        iteration_s=0.025,
    )
    assert load_report(ROW, "i") == (1, expected)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({}, id="nothing"),
        pytest.param(dict.fromkeys(ROW), id="nulls"),
        pytest.param({"kvCacheStats": {}, "inflightBatchingStats": {}}, id="empty sections"),
        pytest.param({"kvCacheStats": {"usedNumBlocks": None}}, id="nulls in sections"),
        pytest.param({"kvCacheStats": [], "inflightBatchingStats": 7}, id="sections that are none"),
        pytest.param(dict.fromkeys(NUMBERS, "12"), id="numbers as text"),
        pytest.param(dict.fromkeys(NUMBERS, -1), id="below 0"),
        pytest.param(dict.fromkeys(NUMBERS, float("nan")), id="no numbers"),
        pytest.param(dict.fromkeys(NUMBERS, float("inf")), id="without end"),
        pytest.param(dict.fromkeys(NUMBERS, 10**400), id="beyond any number"),
    ],
)
def test_what_is_not_said_or_is_nonsense_is_0(row: dict[str, Any]) -> None:
    assert load_report(row, "i") == (0, EMPTY)


def test_small_numbers_are_no_nonsense() -> None:
    assert load_report({**ROW, "iterLatencyMS": 0.25}, "i")[1].iteration_s == 0.00025


def test_a_row_without_a_rank_is_that_of_rank_0() -> None:
    assert load_report({**ROW, "attentionDpRank": None}, "i")[0] == 0


def test_every_report_can_be_sent() -> None:
    for row in (ROW, {}, dict.fromkeys(NUMBERS, 2**62)):
        _, report = load_report(row, "i")
        assert decode_load(encode_load(report)) == report


def test_the_simulated_engine_s_rows_are_read() -> None:
    description = EngineDescription(
        model="m",
        version="1",
        event_source="simulated",
        block_size=4,
        total_kv_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_seq_len=100,
        dp_ranks=(0, 1),
    )
    simulator = Simulator(description)
    simulator.submit(EngineRequest(request_id="a", prompt=tuple(range(10)), max_tokens=4, dp_rank=1), 0.0)
    step = simulator.step(0.0)
    idle, busy = (load_report(render(row), "i") for row in step.statistics)
    assert idle[0] == 0
    assert busy == (
        1,
        LoadReport(
            instance="i",
            iteration=0,
            running_requests=1,
            waiting_requests=0,
            used_blocks=3,
            total_blocks=64,
            context_tokens=10,
            iteration_s=step.duration_s,
        ),
    )
