"""What an agent makes of a simulated engine's sources is what the engine holds, whichever it hears first."""

from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.events import Tier
from kv_protocol.hashing import chain, hash_seed, local_block_hashes
from tests.support.amount import examples
from worker_agent.engines.simulated.events import render
from worker_agent.engines.simulated.identity import EngineNamespace
from worker_agent.engines.simulated.layout import CacheLayout
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.types import EngineDescription, EngineRequest
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import RankEvent
from worker_agent.events.mirror import RankMirror

BLOCK_SIZE = 2
ENGINE = EngineDescription(
    model="m",
    version="1",
    event_source="simulated",
    block_size=BLOCK_SIZE,
    total_kv_blocks=9,
    max_num_seqs=3,
    max_num_batched_tokens=6,
    max_seq_len=18,
)
LAYOUTS = {
    "no host": CacheLayout(),
    "told by the engine": CacheLayout(host_blocks=4),
    "told by a source": CacheLayout(host_blocks=4, host_events="source"),
    "two windows": CacheLayout(host_blocks=4, host_events="source", narrow_windows=(3,)),
}


def our_hash(tokens: Sequence[int], parent: int, namespace: EngineNamespace) -> int:
    """Return our own hash of a block, so that the engine's words and ours can be compared."""
    seed = hash_seed(None, namespace.cache_salt)
    return chain(local_block_hashes(tokens, len(tokens), seed=seed), parent or None)[0]


requests = st.builds(
    EngineRequest,
    request_id=st.just(""),
    prompt=st.builds(
        lambda length, at: tuple(int(i >= at) for i in range(length)), st.integers(1, 9), st.integers(0, 9)
    ),
    max_tokens=st.integers(1, 8),
    cache_salt=st.sampled_from([None, None, "salt"]),
    priority=st.sampled_from([35, 35, 0, 80]),
)
plans = st.lists(st.tuples(requests, st.integers(0, 6), st.booleans()), max_size=25)


def hear(mirror: RankMirror, source: str, events: Iterable[RankEvent]) -> None:
    for told in events:
        mirror.apply(told.event, source)


def held(mirror: RankMirror, tier: Tier) -> set[int]:
    return {block.sequence_hash for block in mirror.dump() if block.tier_bits >> tier & 1}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@settings(max_examples=examples(100), deadline=None)
@given(plan=plans)
def test_the_mirror_holds_what_the_engine_holds(
    layout: CacheLayout, plan: list[tuple[EngineRequest, int, bool]]
) -> None:
    simulator = Simulator(ENGINE, layout=layout, block_hash=our_hash)
    rules, mirror = TrtllmRules(BLOCK_SIZE), RankMirror(BLOCK_SIZE)
    for number, (asked, steps, is_host_first) in enumerate(plan):
        simulator.submit(msgspec.structs.replace(asked, request_id=str(number)), 0.0)
        for _ in range(steps if simulator.has_work else 0):
            simulator.step(0.0)
        simulator.flush_events()
        sources = {
            "engine": rules.translate(map(render, simulator.drain_events())),
            "host": simulator.drain_host_events(),
        }
        for source in sorted(sources, reverse=is_host_first):
            hear(mirror, source, sources[source])
        for tier in (Tier.GPU, Tier.HOST):
            assert held(mirror, tier) == simulator.held_hashes(0, tier)
    assert {counts.unknown_parent + counts.unknown_removal for counts in mirror.counts.values()} <= {0}


@settings(max_examples=examples(100), deadline=None)
@given(plan=plans)
def test_a_source_that_lost_events_tells_all_that_it_holds(plan: list[tuple[EngineRequest, int, bool]]) -> None:
    simulator = Simulator(ENGINE, layout=LAYOUTS["told by a source"], block_hash=our_hash, event_buffer_max_size=1)
    mirror = RankMirror(BLOCK_SIZE)
    for number, (asked, steps, is_heard) in enumerate(plan):
        simulator.submit(msgspec.structs.replace(asked, request_id=str(number)), 0.0)
        for _ in range(steps):
            simulator.step(0.0)
            simulator.flush_events()
        if is_heard:
            hear(mirror, "host", simulator.drain_host_events())
            assert held(mirror, Tier.HOST) == simulator.held_hashes(0, Tier.HOST)
