"""Sliding windows: narrow pools beside the widest."""

import msgspec
import pytest

from tests.support.engine_description import described
from worker_agent.engines.simulated.layout import CacheLayout
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.windows import narrow_blocks_max
from worker_agent.port.types import EngineRequest, RequestRefused

ENGINE = described(total_kv_blocks=32, max_seq_len=128)
LAYOUT = CacheLayout(narrow_windows=(8,), narrow_blocks=12)


def serve(simulator: Simulator, name: str, prompt: range, max_tokens: int = 1) -> int:
    """Return how many tokens were cached."""
    simulator.submit(EngineRequest(request_id=name, prompt=tuple(prompt), max_tokens=max_tokens), 0.0)
    cached_tokens = set()
    while simulator.has_work:
        cached_tokens |= {output.cached_tokens for _, output in simulator.step(0.0).outputs}
    simulator.flush_events()
    return cached_tokens.pop()


def test_each_window_s_pool_is_created_first_with_numbers_of_one_sequence() -> None:
    simulator = Simulator(ENGINE, layout=CacheLayout(narrow_windows=(8, 16), narrow_blocks=12))
    events = [msgspec.to_builtins(event) for event in simulator.drain_events()]
    assert [
        (event["event_id"], event["window_size"], event["data"]["num_blocks_per_cache_level"]) for event in events
    ] == [(0, 128, [32, 0]), (1, 8, [12, 0]), (2, 16, [12, 0])]


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
