"""A recorded workload in a closed loop: what is sent when, what is reused, how long it takes."""

import math
from typing import Any

import pytest

from bench.fidelity.live_recording import LiveFleet, Recording, Session, live_engine
from bench.placement.policies import PLACEMENTS
from bench.routing.virtual_fleet import RequestFigures, VirtualFleetShape
from worker_agent.engines.simulated.scheduling import VLLM
from worker_agent.engines.simulated.timing import H200_8B, IterationWork

MODEL = VirtualFleetShape(live_engine(max_num_seqs=4), (H200_8B,), scheduling=VLLM)
SESSIONS = tuple(
    Session(
        number % 2,
        tuple(100 + 10 * number + turn for turn in range(4)),
        tuple(5 + number % 3 + turn for turn in range(4)),
    )
    for number in range(14)
)


def recording(**changes: Any) -> Recording:
    """A workload on engines whose caches are too small for all of it."""
    whole = Recording(
        blocks_per_worker=250,
        block_size=16,
        concurrency=6,
        system_tokens=(320, 500),
        sessions=SESSIONS,
        sending_s=math.inf,
    )
    return whole._replace(**changes)


def played(
    workload: Recording, *, workers: int = 2, policy: str = "round-robin", seed: int = 1, **model: Any
) -> list[RequestFigures]:
    """Return all requests in the order in which they were sent."""
    fleet = LiveFleet(workload, MODEL._replace(**model), PLACEMENTS[policy], seed=seed, workers=workers)
    return sorted(fleet.run(), key=lambda each: each.number)


def ends_s(requests: list[RequestFigures]) -> list[float]:
    return [each.arrival_s + each.e2e_s for each in requests]


@pytest.mark.parametrize("concurrency", [1, 3, 6, 20])
def test_every_turn_is_sent_once_and_no_more_run_than_there_are_users(concurrency: int) -> None:
    workload = recording(concurrency=concurrency)
    requests = played(workload)
    lengths = [length for session in SESSIONS for length in session.prompts_tokens(workload.system_tokens)]
    assert sorted(each.isl_tokens for each in requests) == sorted(lengths)
    for each in requests:
        running = [other for other in requests if other.arrival_s <= each.arrival_s < other.arrival_s + other.e2e_s]
        assert len(running) <= concurrency


def test_sessions_begin_in_order_and_none_after_the_clients_stop_sending() -> None:
    firsts = [next(session.prompts_tokens((320, 500))) for session in SESSIONS]
    requests = played(recording(concurrency=1))
    assert [each.isl_tokens for each in requests if each.isl_tokens in firsts] == firsts
    stop_s = ends_s(requests)[5] - 0.001
    assert [each.number for each in played(recording(concurrency=1, sending_s=stop_s))] == [*range(6)]


def test_a_turn_finds_all_that_its_session_left_on_its_worker() -> None:
    requests = played(recording(sessions=SESSIONS[:1], blocks_per_worker=1000), workers=1)
    before = [each.isl_tokens for each in requests]
    assert [each.cached_tokens for each in requests] == [0, *(tokens // 16 * 16 for tokens in before[:-1])]


def test_sessions_share_their_system_prompt_and_nothing_else() -> None:
    requests = played(recording(sessions=SESSIONS[:3], concurrency=1, blocks_per_worker=1000), workers=1)
    assert [each.cached_tokens for each in requests[::4]] == [0, 0, 320]


def test_a_request_alone_takes_its_way_and_its_iterations() -> None:
    (alone,) = played(recording(sessions=(Session(0, (180,), (2,)),)), workers=1)
    context_s = H200_8B.iteration_s(IterationWork(context_tokens=500, attention_pairs=500 * 250))
    decode_s = H200_8B.iteration_s(IterationWork(decode_sequences=1, kv_tokens=500))
    assert alone.ttft_s == pytest.approx(H200_8B.request_s(500) + context_s)
    assert alone.e2e_s == pytest.approx(alone.ttft_s + decode_s)


def test_requests_of_one_moment_pass_the_router_one_after_the_other() -> None:
    workload = recording(sessions=(Session(0, (180,), (1,)), Session(0, (180,), (1,))), concurrency=2)
    first, second = played(workload, router_s=0.5)
    assert first.ttft_s > 0.5
    assert second.ttft_s - first.ttft_s == pytest.approx(0.5)


def test_lengths_of_iterations_vary_by_the_seed_and_only_with_jitter() -> None:
    def end_s(jitter: float, seed: int) -> float:
        return max(ends_s(played(recording(), seed=seed, jitter=jitter)))

    assert end_s(0.0, 1) == end_s(0.0, 2)
    assert end_s(0.4, 1) == end_s(0.4, 1) != end_s(0.4, 2)


def test_engines_of_one_gpu_slow_each_other_down_while_both_have_work() -> None:
    workload = recording(sessions=(Session(0, (180,), (2,)), Session(1, (180,), (2,))), concurrency=2)
    alone, shared = (played(workload, engines_per_gpu=each) for each in (1, 2))
    way_s = H200_8B.request_s(500)
    assert shared[0].ttft_s - way_s == pytest.approx(alone[0].ttft_s - way_s)
    assert shared[1].ttft_s > 1.5 * alone[1].ttft_s
    assert max(ends_s(shared)) > 1.3 * max(ends_s(alone))


def test_the_router_places_by_what_the_engines_hold() -> None:
    def cached(policy: str) -> int:
        return sum(each.cached_tokens for each in played(recording(blocks_per_worker=1000), workers=3, policy=policy))

    assert cached("kv") > 1.1 * cached("round-robin")
    assert cached("kv") == cached("kv")
