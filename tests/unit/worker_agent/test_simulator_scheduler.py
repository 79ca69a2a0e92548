from typing import Any

import msgspec
import pytest

from worker_agent.engines.simulated.scheduler import Simulator, Step
from worker_agent.engines.simulated.statistics import render as render_statistics
from worker_agent.engines.simulated.timing import H200_8B, IterationWork
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.engines.types import EngineDescription, EngineOutput, EngineRequest, RequestRefused

ENGINE = EngineDescription(
    model="m",
    version="1",
    event_source="simulated",
    block_size=4,
    total_kv_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_seq_len=200,
)


def simulator(**changes: int | tuple[int, ...]) -> Simulator:
    return Simulator(msgspec.structs.replace(ENGINE, **changes), token_source=TokenSource(seed=3))


def request(
    name: str,
    prompt: range | tuple[int, ...] = range(10),
    max_tokens: int = 4,
    *,
    stop_token_ids: tuple[int, ...] = (),
    dp_rank: int | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        dp_rank=dp_rank,
    )


def run_out(engine: Simulator, now_s: float = 0.0) -> dict[str, list[EngineOutput]]:
    """Step until there is no work; return the outputs of each request."""
    outputs: dict[str, list[EngineOutput]] = {}
    while engine.has_work:
        step = engine.step(now_s)
        now_s += step.duration_s
        engine.flush_events()
        for request_id, output in step.outputs:
            outputs.setdefault(request_id, []).append(output)
    return outputs


def text(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def row(step: Step) -> dict[str, Any]:
    return render_statistics(step.statistics[0])


def test_the_iteration_that_completes_a_prompt_emits_the_first_token() -> None:
    engine = simulator()
    engine.submit(request("a", range(10)), 0.0)
    first, second = engine.step(0.0), engine.step(0.1)
    assert [name for name, _ in first.outputs] == ["a"]
    assert first.duration_s == H200_8B.iteration_s(IterationWork(context_tokens=10, attention_pairs=50))
    assert second.duration_s == H200_8B.iteration_s(IterationWork(decode_sequences=1, kv_tokens=10))


def test_a_generation_ends_with_a_stop_token() -> None:
    engine = simulator()
    engine.submit(request("a", max_tokens=50), 0.0)
    whole = text(run_out(engine)["a"])
    engine.submit(request("b", max_tokens=50, stop_token_ids=(whole[5],)), 0.0)
    outputs = run_out(engine)["b"]
    assert outputs[-1].finish_reason == "stop"
    assert text(outputs) == whole[: whole.index(whole[5]) + 1]


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_cut_stream_sent_again_elsewhere_yields_the_same_rest(cut: int) -> None:
    undisturbed, elsewhere = simulator(), simulator(block_size=8)
    undisturbed.submit(request("a", max_tokens=20), 0.0)
    whole = text(run_out(undisturbed)["a"])
    elsewhere.submit(request("a", (*range(10), *whole[:cut]), 20 - cut), 0.0)
    assert text(run_out(elsewhere)["a"]) == whole[cut:]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    engine = simulator(max_num_batched_tokens=16)
    engine.submit(request("short", range(4), max_tokens=20), 0.0)
    engine.step(0.0)
    engine.submit(request("long", range(100, 140), max_tokens=2), 0.0)
    steps = [engine.step(0.0) for _ in range(3)]
    batching = [row(step)["inflightBatchingStats"] for step in steps]
    assert [each["numCtxTokens"] for each in batching] == [15, 15, 10]
    assert [each["numGenRequests"] for each in batching] == [1, 1, 1]
    assert [len(step.outputs) for step in steps] == [1, 1, 2]


def test_requests_beyond_max_num_seqs_wait_in_order_of_arrival() -> None:
    engine = simulator(max_num_seqs=2)
    for name in "abcd":
        engine.submit(request(name, max_tokens=2), 0.0)
    starts = [name for _ in range(4) for name, output in engine.step(0.0).outputs if output.finish_reason is None]
    assert starts == ["a", "b", "c", "d"]


def test_the_first_that_does_not_fit_keeps_all_others_waiting() -> None:
    engine = simulator(total_kv_blocks=8)
    engine.submit(request("runs", range(8), max_tokens=5), 0.0)
    engine.submit(request("large", range(50, 70), max_tokens=13), 0.0)
    engine.submit(request("small", range(90, 92), max_tokens=2), 0.0)
    now = row(engine.step(0.0))
    assert (now["numActiveRequests"], now["numQueuedRequests"]) == (1, 2)
    assert now["inflightBatchingStats"]["numQueuedCtxTokens"] == 22
    assert list(run_out(engine)) == ["runs", "large", "small"]


def test_cancelling_a_decoding_request_frees_its_blocks_and_keeps_what_it_computed() -> None:
    engine = simulator()
    engine.submit(request("a", range(10), max_tokens=30), 0.0)
    for _ in range(4):
        engine.step(0.0)
    engine.cancel("a")
    step = engine.step(0.0)
    assert (row(step)["kvCacheStats"]["usedNumBlocks"], row(step)["numActiveRequests"]) == (0, 0)
    assert len(engine.held_hashes(0)) == 3
    assert not engine.has_work


def test_cancelling_in_the_context_phase_keeps_the_computed_chunks() -> None:
    engine = simulator(max_num_batched_tokens=16)
    engine.submit(request("a", range(50)), 0.0)
    engine.step(0.0)
    engine.cancel("a")
    assert len(engine.held_hashes(0)) == 4
    assert engine.step(0.0).outputs == ()


def test_a_cancellation_is_told_by_one_more_iteration() -> None:
    engine = simulator()
    engine.submit(request("a"), 0.0)
    engine.step(0.0)
    engine.cancel("a")
    assert engine.has_work
    assert engine.step(0.0).duration_s == H200_8B.base_s
    assert not engine.has_work


@pytest.mark.parametrize(
    ("field", "refused"),
    [
        ("prompt", request("x", ())),
        ("max_tokens", request("x", max_tokens=0)),
        ("max_tokens", request("x", range(190), max_tokens=11)),
        ("max_tokens", request("x", range(100), max_tokens=30)),
        ("dp_rank", request("x", dp_rank=1)),
        ("priority", msgspec.structs.replace(request("x"), priority=101)),
        ("priority", msgspec.structs.replace(request("x"), priority=-1)),
        ("request_id", request("in-use")),
    ],
)
def test_what_can_never_be_served_is_refused_with_its_field(field: str, refused: EngineRequest) -> None:
    engine = simulator(total_kv_blocks=32)
    engine.submit(request("in-use"), 0.0)
    with pytest.raises(RequestRefused) as error:
        engine.submit(refused, 0.0)
    assert error.value.field == field
    assert list(run_out(engine)) == ["in-use"]


def test_the_largest_request_that_the_pool_holds_is_served() -> None:
    engine = simulator(total_kv_blocks=32)
    engine.submit(request("x", range(100), max_tokens=29), 0.0)
    assert len(run_out(engine)["x"]) == 29


def test_without_a_rank_the_least_loaded_takes_the_request() -> None:
    engine = simulator(dp_ranks=(0, 1))
    for name in "abc":
        engine.submit(request(name), 0.0)
    assert [each.num_active_requests for each in engine.step(0.0).statistics] == [2, 1]


def test_an_iteration_lasts_as_long_as_its_slowest_rank() -> None:
    engine = simulator(dp_ranks=(0, 1))
    engine.submit(request("a", dp_rank=0), 0.0)
    engine.step(0.0)
    engine.submit(request("b", dp_rank=1), 0.0)
    assert engine.step(0.0).duration_s == H200_8B.context_floor_s


def test_the_buffer_is_one_for_all_ranks_and_each_rank_s_numbers_show_what_it_lost() -> None:
    engine = Simulator(msgspec.structs.replace(ENGINE, dp_ranks=(0, 1)), event_buffer_max_size=2)
    for index in range(3):
        engine.submit(request(str(index), range(index * 20, index * 20 + 10), dp_rank=0), 0.0)
        run_out(engine)
    assert [(event.attention_dp_rank, event.event_id) for event in engine.drain_events()] == [
        (0, number) for number in (3, 4, 5, 6)
    ]
    engine.submit(request("d", dp_rank=1), 0.0)
    run_out(engine)
    assert [(event.attention_dp_rank, event.event_id) for event in engine.drain_events()] == [(1, 1), (1, 2)]


def test_a_row_has_the_engines_names_and_counts() -> None:
    engine = simulator()
    engine.submit(request("a", range(10)), 1.0)
    step = engine.step(1.5)
    found = row(step)
    assert found.pop("iterLatencyMS") == pytest.approx(H200_8B.context_floor_s * 1e3)
    assert found == {
        "timestamp": "1.500000",
        "iter": 0,
        "newActiveRequestsQueueLatencyMS": 500.0,
        "numNewActiveRequests": 1,
        "numActiveRequests": 1,
        "numQueuedRequests": 0,
        "numCompletedRequests": 0,
        "maxNumActiveRequests": 8,
        "maxBatchSizeStatic": 8,
        "maxBatchSizeTunerRecommended": 0,
        "maxBatchSizeRuntime": 8,
        "maxNumTokensStatic": 64,
        "maxNumTokensTunerRecommended": 0,
        "maxNumTokensRuntime": 64,
        "gpuMemUsage": 64 * 4 * 144 * 1024,
        "cpuMemUsage": 0,
        "pinnedMemUsage": 0,
        "kvCacheStats": {
            "maxNumBlocks": 64,
            "freeNumBlocks": 61,
            "usedNumBlocks": 3,
            "tokensPerBlock": 4,
            "allocTotalBlocks": 3,
            "allocNewBlocks": 3,
            "reusedBlocks": 0,
            "missedBlocks": 3,
            "cacheHitRate": 0.0,
        },
        "staticBatchingStats": None,
        "inflightBatchingStats": {
            "numScheduledRequests": 1,
            "numContextRequests": 1,
            "numGenRequests": 0,
            "numPausedRequests": 0,
            "numCtxTokens": 10,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 0.0,
            "numCtxKvTokens": 10,
            "numGenKvTokens": 0,
            "numQueuedContextRequests": 0,
            "numQueuedCtxTokens": 0,
            "numQueuedGenRequests": 0,
            "numQueuedGenKvTokens": 0,
            "numPausedKvTokens": 0,
        },
        "specDecodingStats": None,
        "hostStepTimeMS": step.duration_s * 1e3,
        "prevDeviceStepTimeMS": 0.0,
        "gpuForwardTimeMS": step.duration_s * 1e3,
        "schedulerMode": "GUARANTEED_NO_EVICT",
        "statsSequence": 0,
        "statsDroppedFrames": 0,
        "rank": 0,
    }


def test_the_last_row_before_idleness_shows_no_load() -> None:
    engine = simulator()
    engine.submit(request("a", max_tokens=1), 0.0)
    last = row(engine.step(0.0))
    assert (last["numActiveRequests"], last["numCompletedRequests"], last["kvCacheStats"]["usedNumBlocks"]) == (0, 1, 0)
    assert not engine.has_work
