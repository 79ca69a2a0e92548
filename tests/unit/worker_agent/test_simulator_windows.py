"""Sliding windows: narrow pools beside the widest."""

from typing import Any

import msgspec
import pytest

from worker_agent.engines.simulated.events import render
from worker_agent.engines.simulated.layout import CacheLayout
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.statistics import render as render_statistics
from worker_agent.engines.simulated.windows import narrow_blocks_max
from worker_agent.engines.types import EngineDescription, EngineRequest, RequestRefused

ENGINE = EngineDescription(
    model="m",
    version="1",
    event_source="simulated",
    block_size=4,
    total_kv_blocks=32,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_seq_len=128,
)
LAYOUT = CacheLayout(narrow_windows=(8,), narrow_blocks=12)


def serve(simulator: Simulator, name: str, prompt: range, max_tokens: int = 1) -> int:
    """Return how many tokens were cached."""
    simulator.submit(EngineRequest(request_id=name, prompt=tuple(prompt), max_tokens=max_tokens), 0.0)
    cached_tokens = set()
    while simulator.has_work:
        cached_tokens |= {output.cached_tokens for _, output in simulator.step(0.0).outputs}
    simulator.flush_events()
    return cached_tokens.pop()


def told(simulator: Simulator) -> list[tuple[int, dict[str, Any]]]:
    return [(event.window_size, render(event)["data"]) for event in simulator.drain_events()]


def test_each_window_s_pool_is_created_first_with_numbers_of_one_sequence() -> None:
    simulator = Simulator(ENGINE, layout=CacheLayout(narrow_windows=(8, 16), narrow_blocks=12))
    events = [render(event) for event in simulator.drain_events()]
    assert [
        (event["event_id"], event["window_size"], event["data"]["num_blocks_per_cache_level"]) for event in events
    ] == [(0, 128, [32, 0]), (1, 8, [12, 0]), (2, 16, [12, 0])]


def test_both_pools_tell_of_a_block_by_the_same_hash_and_parent() -> None:
    simulator = Simulator(ENGINE, layout=LAYOUT)
    simulator.drain_events()
    serve(simulator, "a", range(9))
    stored = {
        window: [
            (block["block_hash"], len(block["tokens"]))
            for size, data in events
            if size == window
            for block in data["blocks"]
        ]
        for events in [told(simulator)]
        for window in (128, 8)
    }
    assert [tokens for _, tokens in stored[128]] == [4, 4, 1]
    assert stored[8] == stored[128][:2]


@pytest.mark.parametrize(
    ("others", "prompt_tokens", "cached_tokens"), [(0, 41, 40), (0, 13, 12), (1, 41, 40), (1, 13, 0), (2, 41, 0)]
)
def test_a_prefix_is_reused_where_the_narrow_pool_has_the_window_before_its_end(
    others: int, prompt_tokens: int, cached_tokens: int
) -> None:
    simulator = Simulator(ENGINE, layout=LAYOUT)
    serve(simulator, "a", range(40))
    held = simulator.held_hashes(0)
    for index in range(others):  # 7 of the narrow pool's 12 blocks each: its oldest give way, the first of the prompt
        serve(simulator, f"other {index}", range(100 * (index + 1), 100 * (index + 1) + 28))
    assert held <= simulator.held_hashes(0)
    assert serve(simulator, "b", range(prompt_tokens)) == cached_tokens


def test_what_fell_out_of_the_window_is_cached_there_and_can_be_reused() -> None:
    simulator = Simulator(ENGINE, layout=LAYOUT)
    serve(simulator, "a", range(40))
    assert [serve(simulator, f"b{n}", range(n)) for n in (13, 21, 41)] == [12, 20, 40]


def test_a_decoding_sequence_keeps_no_more_than_its_window() -> None:
    simulator = Simulator(ENGINE, layout=CacheLayout(narrow_windows=(8,), narrow_blocks=3))
    assert serve(simulator, "a", range(9), max_tokens=100) == 0
    with pytest.raises(RequestRefused, match="at most the 3 blocks of window 8's pool"):
        simulator.submit(EngineRequest(request_id="b", prompt=tuple(range(13)), max_tokens=1), 0.0)


def test_blocks_that_a_narrow_pool_cannot_promise_keep_a_request_waiting() -> None:
    simulator = Simulator(ENGINE, layout=LAYOUT)
    for name, first in (("a", 0), ("b", 100)):
        simulator.submit(EngineRequest(request_id=name, prompt=tuple(range(first, first + 28)), max_tokens=3), 0.0)
    (row,) = simulator.step(0.0).statistics
    assert (row.num_active_requests, row.num_queued_requests) == (1, 1)
    while simulator.has_work:
        simulator.step(0.0)


@pytest.mark.parametrize(
    ("prompt_tokens", "tokens_max", "blocks"), [(4, 4, 1), (5, 8, 2), (9, 100, 3), (40, 100, 10), (5, 100, 3)]
)
def test_a_request_wants_its_prompt_s_blocks_or_a_window_s(prompt_tokens: int, tokens_max: int, blocks: int) -> None:
    assert narrow_blocks_max(prompt_tokens, tokens_max, 8, 4) == blocks


def test_held_hashes_are_those_of_the_widest_window() -> None:
    windowed, plain = Simulator(ENGINE, layout=LAYOUT), Simulator(ENGINE)
    for index in range(3):
        for simulator in (windowed, plain):
            serve(simulator, str(index), range(100 * index, 100 * index + 40))
    assert windowed.held_hashes(0) == plain.held_hashes(0)


def test_the_layers_memory_is_shared_out_among_the_windows() -> None:
    simulator = Simulator(ENGINE, layout=CacheLayout(narrow_windows=(8,), narrow_blocks=16, host_blocks=8))
    (row,) = simulator.step(0.0).statistics
    found = render_statistics(row)
    block_bytes = 4 * 144 * 1024 // 2
    assert (found["gpuMemUsage"], found["pinnedMemUsage"]) == (48 * block_bytes, 8 * block_bytes)


def test_a_window_as_wide_as_a_request_forbids_nothing() -> None:
    description = msgspec.structs.replace(ENGINE, total_kv_blocks=16)
    windowed = Simulator(description, layout=CacheLayout(narrow_windows=(127,)))
    plain = Simulator(description)
    prompts = [range(100 * (index % 3), 100 * (index % 3) + 20 + index) for index in range(12)]
    found = [[serve(each, str(index), prompt) for index, prompt in enumerate(prompts)] for each in (windowed, plain)]
    assert found[0] == found[1]
