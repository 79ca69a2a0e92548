from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fidelity.closed_loop import ClosedLoop, EngineModel, Placer, Sent
from bench.fidelity.recording import Recording, Session
from tests.support.amount import examples
from tests.unit.bench.fleets import SESSIONS, RoundRobin, recording
from worker_agent.engines.simulated.timing import H200_8B, IterationWork

MODEL = EngineModel(H200_8B, max_num_seqs=4)


class Watched(Placer):
    """A placement that remembers what it was asked."""

    def __init__(self, placement: Placer) -> None:
        self._placement = placement
        self.sessions: list[int] = []
        self.workers: list[int] = []
        self.in_flight_max = 0

    def choose(self, sent: Sent) -> int:
        self.sessions.append(sent.session)
        self.in_flight_max = max(self.in_flight_max, 1 + sum(sent.in_flight))
        self.workers.append(self._placement.choose(sent))
        return self.workers[-1]


def check_conservation(workload: Recording, workers: int) -> None:
    """Every turn of every session is sent once, sessions begin in order, and no more run than may."""
    watched = Watched(RoundRobin())
    played = ClosedLoop(workload, MODEL, watched, workers=workers).play()
    planned = workload.sessions
    assert Counter(watched.sessions) == {
        n: len(each.added_tokens) for n, each in enumerate(planned) if each.added_tokens
    }
    firsts = list(dict.fromkeys(watched.sessions))
    assert firsts == sorted(firsts)
    turns = [enumerate(each.prompts_tokens(workload.system_tokens)) for each in planned]
    lengths = Counter((tokens, turn) for session in turns for turn, tokens in session)
    assert Counter((each.isl_tokens, each.turn) for each in played.answered) == lengths
    assert Counter(each.worker for each in played.answered) == Counter(watched.workers)
    assert watched.in_flight_max <= workload.concurrency


sessions = st.lists(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 12)), max_size=4).map(
        lambda turns: Session(0, tuple(added for added, _ in turns), tuple(output for _, output in turns))
    ),
    min_size=1,
    max_size=12,
).filter(lambda planned: any(each.added_tokens for each in planned))


@settings(max_examples=examples(40))
@given(sessions, st.integers(1, 4), st.integers(1, 9))
def test_every_turn_of_every_session_is_sent_once_and_in_order(
    planned: list[Session], workers: int, concurrency: int
) -> None:
    workload = recording(sessions=tuple(planned), concurrency=concurrency)
    check_conservation(workload, workers)


def test_a_turn_finds_all_that_its_session_left_on_its_worker() -> None:
    workload = recording(sessions=SESSIONS[:1], blocks_per_worker=1000)
    played = ClosedLoop(workload, MODEL, RoundRobin(), workers=1).play()
    block = workload.block_size
    before = [each.isl_tokens for each in played.answered]
    assert [each.cached_tokens for each in played.answered] == [0, *(tokens // block * block for tokens in before[:-1])]


def test_sessions_share_their_system_prompt_and_nothing_else() -> None:
    workload = recording(sessions=SESSIONS[:3], concurrency=1, blocks_per_worker=1000)
    played = ClosedLoop(workload, MODEL, RoundRobin(), workers=1).play()
    assert [each.cached_tokens for each in played.answered if each.turn == 0] == [0, 0, 320]


def test_a_request_alone_takes_its_way_and_its_iterations() -> None:
    workload = recording(sessions=(Session(0, (180,), (2,)),))
    (alone,) = ClosedLoop(workload, MODEL, RoundRobin(), workers=1).play().answered
    context_s = H200_8B.iteration_s(IterationWork(context_tokens=500, attention_pairs=500 * 250))
    decode_s = H200_8B.iteration_s(IterationWork(decode_sequences=1, kv_tokens=500))
    assert alone.ttft_s == pytest.approx(H200_8B.request_s(500) + context_s)
    assert alone.e2e_s == pytest.approx(alone.ttft_s + decode_s)


def test_requests_of_one_moment_pass_the_router_one_after_the_other() -> None:
    workload = recording(sessions=(Session(0, (180,), (1,)), Session(0, (180,), (1,))), concurrency=2)
    first, second = ClosedLoop(workload, MODEL._replace(router_s=0.5), RoundRobin(), workers=2).play().answered
    assert first.ttft_s > 0.5
    assert second.ttft_s - first.ttft_s == pytest.approx(0.5)


def test_lengths_of_iterations_vary_by_the_seed_and_only_with_jitter() -> None:
    def makespan_s(jitter: float, seed: int) -> float:
        model = MODEL._replace(jitter=jitter)
        return ClosedLoop(recording(), model, RoundRobin(), workers=2, seed=seed).play().makespan_s

    assert makespan_s(0.0, 1) == makespan_s(0.0, 2)
    assert makespan_s(0.4, 1) == makespan_s(0.4, 1) != makespan_s(0.4, 2)


def test_engines_of_one_gpu_slow_each_other_down_while_both_have_work() -> None:
    workload = recording(sessions=(Session(0, (180,), (2,)), Session(1, (180,), (2,))), concurrency=2)
    alone, shared = (
        ClosedLoop(workload, MODEL._replace(engines_per_gpu=each), RoundRobin(), workers=2).play() for each in (1, 2)
    )
    way_s = H200_8B.request_s(500)
    assert shared.answered[0].ttft_s - way_s == pytest.approx(alone.answered[0].ttft_s - way_s)
    assert shared.answered[1].ttft_s > 1.5 * alone.answered[1].ttft_s
    assert shared.makespan_s > 1.3 * alone.makespan_s
