"""The fleet in virtual time: nothing is lost, nothing is told that is not so, and the same is the same."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.routing.trace import ANSWER_TOKEN, TraceRequest, at_rate, load_trace, prompt_tokens
from bench.routing.virtual_fleet import RequestFigures, VirtualFleet, VirtualFleetShape
from bench.routing.virtual_router import describe
from kv_protocol.events import Tier
from kv_protocol.hashing import Namespace, sequence_hashes
from router.decision.policy import Policy
from tests.support.held_hashes import held_hashes
from tests.unit.bench.traces import random_trace, request
from worker_agent.engines.simulated.blocks import named_block
from worker_agent.engines.simulated.timing import H200_8B, IterationWork

SHAPE = VirtualFleetShape((describe(24 * 512),) * 3)
KV, ROUND_ROBIN = Policy(mode="kv"), Policy(mode="round-robin")


def played(
    trace: Sequence[TraceRequest], shape: VirtualFleetShape = SHAPE, policy: Policy = KV
) -> tuple[VirtualFleet, list[RequestFigures]]:
    fleet = VirtualFleet(shape, policy, trace, seed=7)
    return fleet, fleet.run()


@pytest.mark.parametrize("policy", [KV, ROUND_ROBIN])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_request_ends_once_and_nothing_is_promised_any_more(policy: Policy, seed: int) -> None:
    trace = random_trace(seed)
    fleet, outcomes = played(trace, policy=policy)
    asked = Counter((each.arrival_s, each.isl_tokens, each.osl_tokens) for each in trace)
    assert Counter((each.arrival_s, each.isl_tokens, each.osl_tokens) for each in outcomes) == asked
    for load in fleet.state.loads().values():
        assert (load.active_requests, load.active_blocks, load.prefill_tokens_queued) == (0, 0, 0)
    assert fleet.state.core.expired_total == 0


@pytest.mark.parametrize(("block_size", "host_blocks"), [(64, 0), (512, 0), (512, 12)])
def test_in_the_end_the_index_holds_what_the_engines_hold_on_each_tier(block_size: int, host_blocks: int) -> None:
    trace, names = random_trace(4, requests=80), {}
    for each in trace:
        tokens, parent = (*prompt_tokens(each), *(ANSWER_TOKEN,) * each.osl_tokens), 0
        for at, sequence_hash in enumerate(sequence_hashes(tokens, block_size)):
            parent = named_block(tokens[at * block_size : (at + 1) * block_size], parent, Namespace())
            names[parent] = sequence_hash
    fleet, _ = played(trace, SHAPE._replace(engines=(describe(24 * 512, block_size),) * 3, host_blocks=host_blocks))
    for engine in fleet.engines:
        for tier in (Tier.GPU, Tier.HOST):
            held = {block.sequence_hash for block in fleet.index.held(engine.rank) if tier in block.tiers}
            assert held == {names[each] for each in held_hashes(engine.simulator.pool(), tier)}
            assert bool(held) == (tier is Tier.GPU or host_blocks > 0)


def test_a_router_that_starts_anew_knows_the_index_and_no_request() -> None:
    trace = [request(0.0, 1, 2, osl_tokens=400), request(1.0, 1, 2, 3)]
    _, before = played(trace)
    fleet, after = played(trace, SHAPE._replace(restart_s=0.5))
    assert [each.predicted_tokens for each in after] == [each.predicted_tokens for each in before]
    assert sum(each.predicted_tokens for each in after) > 0
    assert fleet.state.core.attempts_total == 1


def test_where_requests_do_not_meet_and_events_are_instant_the_router_counts_on_what_is_reused() -> None:
    trace = [each._replace(arrival_s=60.0 * number) for number, each in enumerate(random_trace(6))]
    _, outcomes = played(trace, SHAPE._replace(lag_s=0.0))
    assert [each.predicted_tokens for each in outcomes] == [each.cached_tokens for each in outcomes]
    assert sum(each.cached_tokens for each in outcomes) > 0


def test_where_events_never_come_the_router_counts_on_nothing() -> None:
    _, outcomes = played(random_trace(6), SHAPE._replace(lag_s=math.inf))
    assert [each.predicted_tokens for each in outcomes] == [0] * 40
    assert sum(each.cached_tokens for each in outcomes) > 0


def test_a_lone_request_takes_the_time_that_the_engine_model_says() -> None:
    _, (outcome,) = played([request(2.0, 1, 2, osl_tokens=2)])
    first_s = H200_8B.iteration_s(IterationWork(context_tokens=1024, attention_pairs=1024 * 512))
    second_s = H200_8B.iteration_s(IterationWork(decode_sequences=1, kv_tokens=1024))
    assert outcome.ttft_s == pytest.approx(H200_8B.request_s(1024) + first_s)
    assert outcome.itl_s == pytest.approx(second_s)


def line(**changed: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8], **changed}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + "\n")
    return path


def test_a_trace_is_read_as_it_is_written_with_ids_numbered_anew(tmp_path: Path) -> None:
    file = written(tmp_path / "t", line(), line(timestamp=1500, input_length=1024, hash_ids=[7, -3], more="x"))
    assert load_trace(file) == [TraceRequest(0.0, 600, 5, (0, 1)), TraceRequest(1.5, 1024, 5, (0, 2))]


def test_at_twice_the_rate_all_requests_come_in_half_the_time() -> None:
    assert at_rate([request(0.0, 1), request(3.0, 2)], 2.0) == [request(0.0, 1), request(1.5, 2)]
