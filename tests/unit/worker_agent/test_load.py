"""TensorRT-LLM's iteration statistics, of any version, as a load report."""

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_protocol.load import COUNT_MAX, LoadReport, PhaseLoad, decode_load, encode_load
from worker_agent.load.reports import LoadRows, at_rest, load_report

ROW: dict[str, Any] = {
    "timestamp": "2025-01-01",
    "iter": 12,
    "iterLatencyMS": 25.0,
    "numActiveRequests": 3,
    "numQueuedRequests": 4,
    "kvCacheStats": {"maxNumBlocks": 100, "freeNumBlocks": 40, "usedNumBlocks": 60, "tokensPerBlock": 32},
    "inflightBatchingStats": {
        "numScheduledRequests": 3,
        "numContextRequests": 1,
        "numCtxTokens": 512,
        "numCtxKvTokens": 2048,
        "numGenRequests": 2,
        "numGenKvTokens": 300,
        "numQueuedContextRequests": 4,
        "numQueuedCtxTokens": 4096,
        "numQueuedGenRequests": 5,
        "numQueuedGenKvTokens": 500,
        "numPausedRequests": 6,
        "numPausedKvTokens": 600,
        "microBatchId": 0,
    },
    "specDecodingStats": None,
    "attentionDpRank": 1,
}
REPORT = LoadReport(
    instance="i",
    iteration=12,
    running_requests=3,
    waiting_requests=4,
    used_blocks=60,
    total_blocks=100,
    context_tokens=512,
    iteration_s=0.025,
    phases=PhaseLoad(
        context_requests=1,
        context_tokens=512,
        context_kv_tokens=2048,
        generation_requests=2,
        generation_kv_tokens=300,
        queued_context_requests=4,
        queued_context_tokens=4096,
        queued_generation_requests=5,
        queued_generation_kv_tokens=500,
        paused_requests=6,
        paused_kv_tokens=600,
    ),
)
NAMES = [name for section in ("kvCacheStats", "inflightBatchingStats") for name in ROW[section]]
NO_COUNTS = [None, "12", True, -1, 0.5, float("nan"), float("inf"), 10**400]


def without(section: str, name: str) -> dict[str, Any]:
    return {**ROW, section: {key: value for key, value in ROW[section].items() if key != name}}


def skipped(*rows: object, dp_ranks: tuple[int, ...] = (0, 1)) -> dict[str, int]:
    """Return the problems of rows of which none is reported."""
    reader = LoadRows("i", dp_ranks)
    assert reader.read(list(rows)) == []
    return {problem: count for problem, count in reader.skipped.items() if count}


# -------------------------------------------------------------------- what a report cannot be without
def test_a_row_that_does_not_count_requests_or_blocks_is_skipped() -> None:
    for name in ("iter", "numActiveRequests", "numQueuedRequests"):
        for value in NO_COUNTS:
            assert skipped({**ROW, name: value}) == {"requests": 1}, (name, value)
        assert skipped({key: value for key, value in ROW.items() if key != name}) == {"requests": 1}, name
    for name in ("usedNumBlocks", "maxNumBlocks"):
        for value in NO_COUNTS:
            assert skipped({**ROW, "kvCacheStats": {**ROW["kvCacheStats"], name: value}}) == {"cache": 1}, (name, value)
        assert skipped(without("kvCacheStats", name)) == {"cache": 1}, name


def test_a_row_or_a_section_of_another_type_is_skipped() -> None:
    anything: tuple[object, ...] = (None, [], 7, "text", True)
    for strange in anything:
        assert skipped({**ROW, "kvCacheStats": strange}) == {"cache": 1}, strange
        assert strange is None or skipped({**ROW, "inflightBatchingStats": strange}) == {"batching": 1}, strange
        assert skipped(strange) == {"not_a_map": 1}, strange
    assert skipped([ROW]) == {"not_a_map": 1}


# -------------------------------------------------------------------- what it can
@pytest.mark.parametrize("row", [{**ROW, "inflightBatchingStats": None}, without("kvCacheStats", "tokensPerBlock")])
def test_a_row_without_phases_is_a_report_without_them(row: dict[str, Any]) -> None:
    report = load_report({**row, "inflightBatchingStats": None}, "i")[1]
    assert report == msgspec.structs.replace(REPORT, phases=None, context_tokens=0)


@pytest.mark.parametrize("value", [value for value in NO_COUNTS if value != 0.5])
def test_a_latency_that_is_not_told_is_0(value: object) -> None:
    assert load_report({**ROW, "iterLatencyMS": value}, "i")[1].iteration_s == 0.0


def test_a_row_without_a_rank_is_that_of_rank_0_and_small_numbers_are_no_nonsense() -> None:
    rank, report = load_report({**ROW, "attentionDpRank": None, "iterLatencyMS": 0.25}, "i")
    assert (rank, report.iteration_s) == (0, 0.00025)


def test_a_row_of_a_rank_that_the_engine_does_not_have_is_skipped() -> None:
    assert skipped(ROW, dp_ranks=(0,)) == {"rank": 1}
    assert LoadRows("i", (0, 1)).read([ROW]) == [(1, REPORT)]


# -------------------------------------------------------------------- rest
def test_a_rank_at_rest_has_no_requests_and_the_blocks_that_it_had() -> None:
    resting = at_rest(REPORT)
    assert (resting.running_requests, resting.waiting_requests, resting.context_tokens) == (0, 0, 0)
    assert (resting.used_blocks, resting.total_blocks, resting.iteration, resting.phases) == (60, 100, 12, None)


# -------------------------------------------------------------------- any row
rows = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ROW, *NAMES]), inner, max_size=6),
    max_leaves=12,
)


@example(rows=[], change={"numActiveRequests": COUNT_MAX, "iter": COUNT_MAX})
@given(rows=st.lists(rows, max_size=3), change=st.dictionaries(st.sampled_from([*ROW]), rows, max_size=2))
def test_whatever_the_rows_are_nothing_is_raised_and_what_is_reported_can_be_sent(
    rows: list[object], change: dict[str, Any]
) -> None:
    reader = LoadRows("i", (0, 1))
    for _, report in [*reader.read(rows), *reader.read([{**ROW, **change}])]:
        assert decode_load(encode_load(report)) == report


# -------------------------------------------------------------------- speculative decoding
def test_drafts_are_counted_once_an_iteration_from_the_row_of_rank_0() -> None:
    drafts = {
        "numDraftTokens": 12,
        "numAcceptedTokens": 7,
        "numRequestsWithDraftTokens": 4,
        "acceptanceLength": 2.75,
        "iterLatencyMS": 3.5,
        "draftOverhead": 0.14,
    }
    rows = LoadRows("i", (0, 1))
    rows.read([ROW | {"attentionDpRank": rank, "specDecodingStats": drafts} for rank in (0, 1)])
    rows.read([ROW | {"attentionDpRank": 0, "specDecodingStats": {**drafts, "numDraftTokens": None}}])
    assert rows.drafts == {"drafted_tokens": 12, "accepted_tokens": 14, "drafting_requests": 8}


@pytest.mark.parametrize("strange", [None, [], "7", {"numDraftTokens": -1}, {"numAcceptedTokens": True}])
def test_strange_figures_of_drafts_count_nothing_and_cost_no_row(strange: object) -> None:
    rows = LoadRows("i", (0, 1))
    assert len(rows.read([ROW | {"attentionDpRank": 0, "specDecodingStats": strange}])) == 1
    assert rows.drafts.total() == 0
