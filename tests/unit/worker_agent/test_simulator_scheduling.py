import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.amount import examples
from tests.support.engine_description import described
from tests.support.held_hashes import held_hashes
from tests.unit.worker_agent.test_simulator_scheduler import run_out, text
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.scheduling import SGLANG, TRTLLM, VLLM, Scheduling
from worker_agent.port.types import EngineRequest

ENGINE = described(max_num_batched_tokens=16)


def request(name: str, prompt: int, max_tokens: int = 8) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tuple(range(prompt)), max_tokens=max_tokens)


def computed(engine: Simulator, now_s: float) -> tuple[float, list[str]]:
    """Return when the iteration that begins now ends, and the requests that got a token in it."""
    step = engine.step(now_s)
    return now_s + step.duration_s, [request_id for request_id, _ in step.outputs]


def begun(scheduling: Scheduling) -> tuple[Simulator, float]:
    """An engine that computes its first request's prompt, and when that iteration ends."""
    engine = Simulator(ENGINE, scheduling=scheduling)
    engine.submit(request("a", 8), 0.0)
    return engine, computed(engine, 0.0)[0]


def test_planning_ahead_a_request_that_comes_during_an_iteration_waits_for_the_next_but_one() -> None:
    engine, end_s = begun(VLLM)
    engine.submit(request("b", 8), end_s / 2)
    second_s, second = computed(engine, end_s)
    assert (second, computed(engine, second_s)[1]) == (["a"], ["a", "b"])


def test_otherwise_it_waits_for_the_next() -> None:
    engine, end_s = begun(TRTLLM)
    engine.submit(request("b", 8), end_s / 2)
    assert computed(engine, end_s)[1] == ["a", "b"]


def test_planning_ahead_an_engine_without_running_sequences_takes_a_request_at_once() -> None:
    engine = Simulator(ENGINE, scheduling=VLLM)
    engine.submit(request("a", 8, max_tokens=1), 0.0)
    end_s, _ = computed(engine, 0.0)
    engine.submit(request("b", 8), end_s / 2)
    assert computed(engine, end_s)[1] == ["b"]


def test_planning_ahead_serves_all_that_queue_in_order() -> None:
    engine, now_s = begun(VLLM)
    for name in ("b", "c", "d"):
        engine.submit(request(name, 12), now_s)
    firsts: list[str] = []
    while engine.has_work:
        now_s, ids = computed(engine, now_s)
        firsts += [each for each in ids if each not in {*firsts, "a"}]
    assert firsts == ["b", "c", "d"]


def cached(scheduling: Scheduling, first: int, second: int) -> int:
    """How many tokens of the second prompt were found, when both came together."""
    engine = Simulator(ENGINE, scheduling=scheduling)
    engine.submit(request("a", first), 0.0)
    engine.submit(request("b", second), 0.0)
    return run_out(engine)["b"][0].cached_tokens


def test_prompts_of_one_batch_share_blocks_at_once() -> None:
    assert (cached(VLLM, 10, 14), cached(TRTLLM, 10, 14)) == (8, 0)


def test_chunks_are_shared_before_their_context_ends() -> None:
    engine = Simulator(ENGINE, scheduling=VLLM)
    engine.submit(request("a", 40), 0.0)
    engine.step(0.0)
    assert len(held_hashes(engine.pool())) == 3  # of 16 computed tokens; the last one's block is not shared


def two(scheduling: Scheduling, blocks: int = 6) -> Simulator:
    """An engine with two requests of two blocks of prompt each, whose answers take two more each."""
    engine = Simulator(msgspec.structs.replace(ENGINE, total_kv_blocks=blocks), scheduling=scheduling)
    engine.submit(EngineRequest(request_id="a", prompt=tuple(range(8)), max_tokens=9), 0.0)
    engine.submit(EngineRequest(request_id="b", prompt=tuple(range(100, 108)), max_tokens=9), 0.0)
    return engine


def rounds(engine: Simulator) -> list[list[str]]:
    """Return which requests got a token in each iteration."""
    found = []
    while engine.has_work:
        found.append([request_id for request_id, _ in engine.step(0.0).outputs])
    return found


def test_a_request_is_admitted_when_the_blocks_of_its_prompt_are_there() -> None:
    assert (two(VLLM).step(0.0).outputs[-1][0], two(TRTLLM).step(0.0).outputs[-1][0]) == ("b", "a")


def test_the_request_admitted_last_is_preempted_when_no_block_is_left() -> None:
    found = rounds(two(VLLM))
    assert found[:5] == [["a", "b"]] * 5
    assert found[5:10] == [["a"]] * 4 + [["b"]]


def test_a_request_in_its_context_phase_is_preempted_before_those_that_decode() -> None:
    engine = Simulator(msgspec.structs.replace(ENGINE, total_kv_blocks=9), scheduling=VLLM)
    engine.submit(request("a", 8, max_tokens=9), 0.0)
    engine.submit(EngineRequest(request_id="long", prompt=tuple(range(100, 128)), max_tokens=1), 0.0)
    assert rounds(engine) == [["a"]] * 9 + [[], ["long"]]


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    engine = two(VLLM)
    engine.submit(EngineRequest(request_id="c", prompt=tuple(range(200, 208)), max_tokens=1), 0.0)
    assert list(dict.fromkeys(name for names in rounds(engine)[5:] for name in names)) == ["a", "b", "c"]


def tokens_of(engine: Simulator, now_s: float = 0.0) -> tuple[int, int]:
    """Return how many prompt tokens the next iteration computes, and how many requests decode in it."""
    did = engine.step(now_s).statistics[0]["inflightBatchingStats"]
    return did["numCtxTokens"], did["numGenRequests"]


def test_where_prompts_come_first_nothing_decodes_while_one_is_computed() -> None:
    engine = Simulator(ENGINE, scheduling=SGLANG)
    engine.submit(request("a", 8), 0.0)
    assert [tokens_of(engine), tokens_of(engine)] == [(8, 0), (0, 1)]
    engine.submit(EngineRequest(request_id="long", prompt=tuple(range(100, 130)), max_tokens=4), 0.0)
    assert [tokens_of(engine) for _ in range(3)] == [(16, 0), (14, 0), (0, 2)]


def test_a_request_is_admitted_when_there_is_room_for_its_answer_and_the_estimated_rest_of_the_running_ones() -> None:
    def begins_after(blocks: int) -> int:
        """How many answers' tokens there are when a prompt of 8 tokens begins, whose answer has 8."""
        engine = Simulator(msgspec.structs.replace(ENGINE, total_kv_blocks=blocks), scheduling=SGLANG)
        engine.submit(EngineRequest(request_id="a", prompt=tuple(range(8)), max_tokens=20), 0.0)
        engine.step(0.0)
        engine.submit(EngineRequest(request_id="b", prompt=tuple(range(100, 108)), max_tokens=8), 0.0)
        return next(tokens for tokens in range(1, 99) if "b" in computed(engine, 0.0)[1])

    # b needs 2 blocks, its answer and a page 3 tokens' blocks more, a's rest 0.7 x 19 tokens: 4 blocks at first
    assert begins_after(2 + 2 + 7) == 1
    assert begins_after(2 + 2 + 6) > 1


def test_the_request_with_the_shortest_answer_is_retracted_to_the_end_of_the_queue() -> None:
    engine = Simulator(msgspec.structs.replace(ENGINE, total_kv_blocks=250, max_seq_len=900), scheduling=SGLANG)
    engine.submit(EngineRequest(request_id="a", prompt=tuple(range(8)), max_tokens=800), 0.0)
    for _ in range(700):  # so few of a's tokens are expected still that b finds room
        engine.step(0.0)
    engine.submit(EngineRequest(request_id="b", prompt=tuple(range(1000, 1160)), max_tokens=100), 0.0)
    engine.submit(EngineRequest(request_id="c", prompt=tuple(range(2000, 2140)), max_tokens=1), 0.0)
    decoding = [names for names in rounds(engine) if names]
    both = decoding.index(["a", "b"])
    retracted = decoding.index(["a"], both)
    assert set(map(tuple, decoding[both:retracted])) == {("a", "b")}
    assert list(dict.fromkeys(name for names in decoding[retracted:] for name in names)) == ["a", "c", "b"]


@pytest.mark.parametrize("scheduling", [VLLM, SGLANG])
@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=10),
    blocks=st.integers(13, 30),
)
def test_however_few_blocks_there_are_every_answer_is_the_one_it_would_be_with_many(
    scheduling: Scheduling, sizes: list[tuple[int, int]], blocks: int
) -> None:
    def played(blocks: int, scheduling: Scheduling) -> dict[str, list[int]]:
        description = msgspec.structs.replace(ENGINE, total_kv_blocks=blocks)
        engine = Simulator(description, scheduling=scheduling)
        for number, (prompt, max_tokens) in enumerate(sizes):
            engine.submit(request(f"r{number}", prompt, max_tokens), 0.0)
        found = {name: text(outputs) for name, outputs in run_out(engine).items()}
        assert engine.pool().used_blocks == engine.pool().reserved_blocks == 0
        return found

    assert played(blocks, scheduling) == played(500, TRTLLM)


def test_running_requests_use_the_budget_before_waiting_ones() -> None:
    engine = Simulator(ENGINE, scheduling=VLLM)
    engine.submit(EngineRequest(request_id="a", prompt=tuple(range(8)), max_tokens=9), 0.0)
    engine.step(0.0)
    engine.submit(EngineRequest(request_id="long", prompt=tuple(range(100, 130)), max_tokens=1), 0.0)
    assert [tokens_of(engine, 1.0 + at) for at in range(2)] == [(15, 1), (15, 1)]
