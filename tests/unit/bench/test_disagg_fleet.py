"""Layouts in virtual time: aggregated is the routing bench's fleet, and nothing is lost between workers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.disagg.fleet import DisaggFleet, DisaggRun, DisaggSetting
from bench.disagg.layouts import layout_of
from bench.routing.trace import TraceRequest
from bench.routing.virtual_fleet import VirtualFleet, VirtualFleetShape
from router.decision.disaggregation import ConditionalLimits
from router.decision.policy import Policy
from tests.support.amount import examples
from tests.unit.bench.traces import random_trace, request
from worker_agent.engines.simulated.timing import H200_8B, IterationWork
from worker_agent.engines.simulated.transfer import TransferRules

LIMITS = ConditionalLimits(prefill_busy=0.3, decode_busy=0.8)
SETTING = DisaggSetting(kv_tokens=24 * 512, limits=LIMITS, seed=7)
LAYOUTS = ("3a", "1p2d", "2p2d+isl_bounding", "2p1d+isl_or_load", "1p2d@2500")


def played(
    trace: Sequence[TraceRequest], layout: str, setting: DisaggSetting = SETTING
) -> tuple[DisaggFleet, DisaggRun]:
    fleet = DisaggFleet(layout_of(layout), setting, trace)
    return fleet, fleet.run()


def told(fleet: DisaggFleet, run: DisaggRun) -> tuple[DisaggRun, list[Any]]:
    """Return all that a run shows of itself: answers, and each engine's batches, blocks and counts."""
    return run, [
        (engine.stream.seq, engine.simulator.held_hashes(0), engine.simulator.pool_statistics())
        for engine in fleet.engines
    ]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("mode", ["kv", "round-robin"])
def test_aggregated_workers_are_the_fleet_of_the_routing_bench(seed: int, mode: str) -> None:
    trace, policy = random_trace(seed), Policy(mode=mode)
    outcomes = VirtualFleet(VirtualFleetShape(workers=3, kv_tokens=24 * 512), policy, trace, seed=7).run()
    _, run = played(trace, "3a", SETTING._replace(policy=policy))
    assert [each.outcome for each in run.answers] == [each._replace(number=0) for each in outcomes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_ends_once_and_nothing_is_left_anywhere(layout: str, seed: int) -> None:
    trace = random_trace(seed)
    fleet, run = played(trace, layout)
    answered = Counter((each.outcome.arrival_s, each.outcome.isl_tokens) for each in run.answers)
    assert answered <= Counter((each.arrival_s, each.isl_tokens) for each in trace)
    assert answered.total() + run.failed == len(trace)
    for load in fleet.state.loads().values():
        assert (load.active_requests, load.active_blocks, load.prefill_tokens_queued) == (0, 0, 0)
    for engine in fleet.engines:
        buffer = fleet.exchange.buffer_of(engine.rank.worker_id)
        assert (buffer.used_tokens, buffer.waiting) == (0, 0)
        assert not engine.simulator.has_requests
        assert engine.simulator.pool_statistics().used_blocks == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_the_end_the_index_holds_what_the_engines_hold(layout: str) -> None:
    fleet, _ = played(random_trace(4), layout)
    for engine in fleet.engines:
        held = {block.sequence_hash for block in fleet.index.held(engine.rank)}
        assert held == engine.simulator.held_hashes(0)
        assert held


def test_a_lone_request_takes_the_time_that_engines_and_network_say() -> None:
    _, run = played([request(2.0, 1, 2, osl_tokens=3)], "1p1d")
    (answer,) = run.answers
    way_s = H200_8B.request_s(1024)
    prefill_s = H200_8B.iteration_s(IterationWork(context_tokens=1024, attention_pairs=1024 * 512))
    admitting_s, transfer_s = H200_8B.iteration_s(IterationWork()), TransferRules().duration_s(1024)
    second_s, third_s = (H200_8B.iteration_s(IterationWork(decode_sequences=1, kv_tokens=n)) for n in (1024, 1025))
    handover_s = way_s + max(admitting_s, transfer_s) + second_s
    assert answer.handover_s == pytest.approx(handover_s)
    assert answer.outcome.ttft_s == pytest.approx(way_s + prefill_s + handover_s)
    assert answer.outcome.e2e_s == pytest.approx(way_s + prefill_s + handover_s + third_s)
    assert answer.phase == "decode"


def test_the_end_of_a_known_prompt_is_computed_by_the_worker_that_decodes() -> None:
    trace = [request(30.0 * number, *range(number + 4)) for number in range(3)]
    assert [each.phase for each in played(trace, "1p1d")[1].answers] == ["decode"] * 3
    _, run = played(trace, "1p1d+isl_bounding")
    assert [each.phase for each in run.answers] == ["decode", "alone", "alone"]


def test_a_buffer_below_the_longest_prompt_fails_requests_and_one_for_it_fails_none() -> None:
    trace = [request(0.1 * number, *range(10 * number, 10 * number + 4)) for number in range(8)]
    _, small = played(trace, "1p1d@2047")
    _, enough = played(trace, "1p1d@2048")
    assert (small.failed, enough.failed) == (8, 0)
    assert small.span_s > TransferRules().timeout_s
    assert sum(each.fetches_total["stalled"] for each in small.transfers) == 8  # once: there is no other to be tried


def test_a_transfer_that_does_not_fit_is_tried_at_three_workers_and_blocks_those_behind_it() -> None:
    short = [request(1.0 + 0.05 * n, *range(10 * n, 10 * n + 4), osl_tokens=300) for n in range(1, 7)]
    _, run = played([request(0.0, *range(5)), *short], "2p3d@2048")
    assert run.failed == 1
    assert sum(each.fetches_total["stalled"] for each in run.transfers) == 3
    waited = [each.outcome.e2e_s > 50.0 for each in run.answers]
    assert sorted(waited) == [False] * 5 + [True]


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 10_000), per_s=st.sampled_from((0.5, 4.0, 40.0)), layout=st.sampled_from(LAYOUTS))
def test_iterations_computed_at_once_change_nothing(seed: int, per_s: float, layout: str) -> None:
    trace = random_trace(seed, requests=20, per_s=per_s)
    one_by_one = SETTING._replace(foreseen_max=0)
    assert told(*played(trace, layout)) == told(*played(trace, layout, one_by_one))
