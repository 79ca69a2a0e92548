"""A router before an agent of ours with a simulated engine: streamed or whole, an answer teaches the same of its times.

Router, agent and engine go by one clock, which a task moves on while they work.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.decision.policy import Policy
from tests.system.integration.agent_http import serving
from tests.system.integration.test_agent_api import ENGINE
from tests.unit.router.plane import Plane, running_plane
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.tokens import TokenSource

TOKENS = 100
STEP_S = 0.0002


@asynccontextmanager
async def router_before_an_agent() -> AsyncIterator[Plane]:
    async with running_plane(policy=Policy(mode="predicted-ttft")) as plane:
        engine = SimulatedEngine(Simulator(ENGINE, token_source=TokenSource(seed=3)), plane.clock, speed=1.0)

        async def move() -> None:
            while True:
                await plane.clock.advance(STEP_S)
                plane.hear("w0")

        async with serving(engine, now_s=plane.clock.now) as agent:
            plane.join("w0", f"http://127.0.0.1:{agent.port}")
            moving = asyncio.ensure_future(move())
            try:
                yield plane
            finally:
                moving.cancel()


@pytest.mark.asyncio
async def test_an_agents_unstreamed_answers_are_measured_like_its_streams() -> None:
    async with router_before_an_agent() as plane:
        body = {"model": "m", "max_tokens": TOKENS}
        whole, stream = [await plane.post(body | {"stream": is_streamed}) for is_streamed in (False, True)]
        outcomes = [plane.outcome(each.headers["x-decision-id"]) for each in (whole, stream)]
        shown = plane.metric("time_to_first_token_seconds_count", mode="predicted-ttft")
    assert b": tokens" not in stream.body
    assert "x-kv-decode-ms" not in whole.headers
    assert shown == 2
    (whole_ttft_s, stream_ttft_s), (whole_itl_s, stream_itl_s) = [
        [getattr(each, name) for each in outcomes] for name in ("ttft_s", "itl_s")
    ]
    assert whole_ttft_s == pytest.approx(stream_ttft_s, abs=0.03)
    assert whole_itl_s == pytest.approx(stream_itl_s, rel=0.2)
    assert all(each.duration_s is not None and each.duration_s > 5 * each.ttft_s for each in outcomes if each.ttft_s)
