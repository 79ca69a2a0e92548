import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from kv_runtime.clock import Clock
from tests.contract.engines import failure, outputs
from tests.support.engine_description import described
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.timing import H200_8B
from worker_agent.port.sampling import Sampling
from worker_agent.port.types import EngineRequest, EngineStopped, RequestRefused

ENGINE = described()
CONTEXT_S = H200_8B.context_floor_s


class LeapingClock(Clock):
    """Moves on to a sleeper's time when all others have come to rest; `lag_s` is how late the next one wakes."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lag_s = 0.0
        self.slept_s: list[float] = []

        self.now = lambda: self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        for _ in range(10):
            await asyncio.sleep(0)
        self.now_s += seconds + self.lag_s
        self.lag_s = 0.0


def request(name: str = "a", max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tuple(range(10)), max_tokens=max_tokens)


@asynccontextmanager
async def running(clock: LeapingClock, speed: float = 1.0, **limits: Any) -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(Simulator(ENGINE), clock, speed=speed, **limits)
    await engine.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        yield engine
        await engine.stop(0.0)


async def arrivals_s(engine: SimulatedEngine, clock: LeapingClock, asked: EngineRequest) -> list[float]:
    began_s = clock.now()
    return [clock.now() - began_s async for _ in engine.generate(asked)]


async def test_tokens_arrive_when_their_iterations_have_passed() -> None:
    clock = LeapingClock()
    async with running(clock) as engine:
        arrived_s = await arrivals_s(engine, clock, request(max_tokens=2))
    decode_s = H200_8B.base_s + 10 * H200_8B.kv_token_s
    assert arrived_s == pytest.approx([CONTEXT_S, CONTEXT_S + decode_s])


async def test_speed_divides_wall_time() -> None:
    clock = LeapingClock()
    async with running(clock, speed=10.0) as engine:
        assert await arrivals_s(engine, clock, request(max_tokens=1)) == pytest.approx([CONTEXT_S / 10])


@pytest.mark.parametrize(("lag_s", "given_up_s"), [(H200_8B.base_s / 2, 0.0), (1.0, 1.0)])
async def test_a_late_wake_up_shortens_the_next_wait_unless_it_is_of_more_than_an_iteration(
    lag_s: float, given_up_s: float
) -> None:
    clock = LeapingClock()
    async with running(clock) as engine:
        clock.lag_s = lag_s
        arrived_s = await arrivals_s(engine, clock, request(max_tokens=2))
    assert arrived_s[1] == pytest.approx(CONTEXT_S + given_up_s + H200_8B.base_s, rel=1e-3)


async def test_an_idle_engine_does_not_sleep() -> None:
    clock = LeapingClock()
    async with running(clock) as engine:
        await arrivals_s(engine, clock, request("a", max_tokens=1))
        for _ in range(10):
            await asyncio.sleep(0)
        clock.now_s += 50.0
        assert await arrivals_s(engine, clock, request("b", max_tokens=1)) == pytest.approx([CONTEXT_S])
    assert len(clock.slept_s) == 2


async def test_events_are_visible_with_the_outputs_of_their_iteration() -> None:
    async with running(LeapingClock()) as engine:
        assert [event["data"]["type"] for event in engine.kv_events(0)] == ["created"]
        async with aclosing(engine.generate(request())) as outputs:
            await anext(outputs)
            assert [event["data"]["type"] for event in engine.kv_events(0)] == ["stored"]


async def test_requests_are_batched() -> None:
    clock = LeapingClock()
    async with running(clock) as engine, asyncio.TaskGroup() as group:
        streams = [group.create_task(arrivals_s(engine, clock, request(name))) for name in "abc"]
    first, *others = [stream.result() for stream in streams]
    assert others == [first, first]


async def test_a_choice_does_not_take_the_id_of_a_request_whose_stream_is_open() -> None:
    several = msgspec.structs.replace(request("a"), sampling=Sampling(choices=2))
    async with running(LeapingClock()) as engine:
        async with aclosing(engine.generate(request("a#1", max_tokens=1))) as ended:
            await anext(ended)
            with pytest.raises(RequestRefused, match=r"^request_id: "):
                await anext(engine.generate(several))
        assert [output.choice async for output in engine.generate(several)] == [0, 1] * 4


async def test_an_engine_that_is_not_driven_stops_at_once() -> None:
    engine = SimulatedEngine(Simulator(ENGINE), LeapingClock())
    await engine.start()
    async with asyncio.TaskGroup() as group:
        cut = group.create_task(failure(outputs(engine, request())))
        await asyncio.sleep(0)
        await engine.stop(60.0)
    assert isinstance(cut.result(), EngineStopped)
