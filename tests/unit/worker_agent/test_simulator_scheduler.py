from typing import Any

import msgspec

from tests.support.engine_description import described
from tests.support.held_hashes import held_hashes
from worker_agent.engines.simulated.scheduler import Simulator, Step
from worker_agent.engines.simulated.timing import H200_8B, IterationWork
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.port.types import EngineOutput, EngineRequest

ENGINE = described()


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
        request_id=name, prompt=tuple(prompt), max_tokens=max_tokens, stop_token_ids=stop_token_ids, dp_rank=dp_rank
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
    return step.statistics[0]


def test_the_iteration_that_completes_a_prompt_emits_the_first_token() -> None:
    engine = simulator()
    engine.submit(request("a", range(10)), 0.0)
    first, second = engine.step(0.0), engine.step(0.1)
    assert [name for name, _ in first.outputs] == ["a"]
    assert first.duration_s == H200_8B.iteration_s(IterationWork(context_tokens=10, attention_pairs=50))
    assert second.duration_s == H200_8B.iteration_s(IterationWork(decode_sequences=1, kv_tokens=10))


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


def test_cancelling_in_the_context_phase_keeps_the_computed_chunks() -> None:
    engine = simulator(max_num_batched_tokens=16)
    engine.submit(request("a", range(50)), 0.0)
    engine.step(0.0)
    engine.cancel("a")
    assert len(held_hashes(engine.pool())) == 4
    assert engine.step(0.0).outputs == ()


def test_the_largest_request_that_the_pool_holds_is_served() -> None:
    engine = simulator(total_kv_blocks=32)
    engine.submit(request("x", range(100), max_tokens=29), 0.0)
    assert len(run_out(engine)["x"]) == 29


def test_without_a_rank_the_least_loaded_takes_the_request() -> None:
    engine = simulator(dp_ranks=(0, 1))
    for name in "abc":
        engine.submit(request(name), 0.0)
    assert [each["numActiveRequests"] for each in engine.step(0.0).statistics] == [2, 1]


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
    assert [(event["attention_dp_rank"], event["event_id"]) for event in engine.drain_events()] == [
        (0, number) for number in (3, 4, 5, 6)
    ]
    engine.submit(request("d", dp_rank=1), 0.0)
    run_out(engine)
    assert [(event["attention_dp_rank"], event["event_id"]) for event in engine.drain_events()] == [(1, 1), (1, 2)]
