"""The host tier of a pool."""

from typing import Any

import msgspec
import pytest

from kv_protocol.events import Tier
from tests.support.engine_description import described
from worker_agent.engines.simulated.identity import trtllm_block_hash
from worker_agent.engines.simulated.layout import CacheLayout
from worker_agent.engines.simulated.scheduler import Simulator, Step
from worker_agent.port.types import EngineRequest

ENGINE = described(total_kv_blocks=4)
A0 = trtllm_block_hash(range(4))
A1 = trtllm_block_hash(range(4, 8), A0)
UPDATED = CacheLayout(host_blocks=3)


class Engine:
    """A simulator that serves one request at a time, to its end."""

    def __init__(self, layout: CacheLayout, event_buffer_max_size: int = 100) -> None:
        self.simulator = Simulator(ENGINE, layout=layout, event_buffer_max_size=event_buffer_max_size)
        self.simulator.drain_events()
        self.requests = 0

    def serve(self, prompt: range, cache_salt: str | None = None, priority: int = 35) -> tuple[int, Step]:
        """Return how many tokens were cached, and the iteration that computed the prompt."""
        self.requests += 1
        request = EngineRequest(
            request_id=str(self.requests), prompt=tuple(prompt), max_tokens=1, cache_salt=cache_salt, priority=priority
        )
        self.simulator.submit(request, 0.0)
        step = self.simulator.step(0.0)
        self.simulator.flush_events()
        ((_, output),) = step.outputs
        return output.cached_tokens, step

    def told(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(event)["data"] for event in self.simulator.drain_events()]

    def held(self) -> tuple[frozenset[int], frozenset[int]]:
        return self.simulator.held_hashes(0), self.simulator.held_hashes(0, Tier.HOST)


def test_of_the_engine_s_full_host_the_oldest_block_is_dropped_for_good() -> None:
    engine = Engine(UPDATED)
    engine.serve(range(16))
    engine.serve(range(100, 116))
    a2 = trtllm_block_hash(range(8, 12), A1)
    assert engine.held()[1] == {A1, A0, a2}
    engine.told()
    engine.serve(range(200, 204))
    assert {"type": "removed", "block_hashes": [a2]} in engine.told()
    assert engine.held()[1] >= {A1, A0}


@pytest.mark.parametrize(("prompt", "priority"), [(range(6), 35), (range(4), 34)])
def test_partial_blocks_and_those_of_low_priority_are_not_worth_the_copy(prompt: range, priority: int) -> None:
    engine = Engine(UPDATED)
    engine.serve(prompt, priority=priority)
    partial_or_low = engine.told()[-1]["blocks"][-1]["block_hash"]
    engine.serve(range(100, 116), priority=90)
    assert partial_or_low in {block for event in engine.told() for block in event.get("block_hashes", ())}
    assert partial_or_low not in engine.held()[1]
