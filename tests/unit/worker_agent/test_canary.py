"""The canary: when an idle engine is asked, and what its answers do to its worker's place in the fleet."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from msgspec.structs import replace

from kv_protocol.fleet import WorkerLeft, decode_fleet_event
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.event_log import BrokerUnavailable, LogMessage
from tests.support.engine_description import described
from tests.support.manual_clock import ManualClock
from tests.unit.router.samples import registered
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.fleet.canary import BEGIN_ID, SALT, CanaryWatch
from worker_agent.fleet.membership import Membership
from worker_agent.fleet.worker_id import WorkerId
from worker_agent.port.types import EngineError, EngineOutput, EngineRequest

WAIT_S = 10.0
DESCRIPTION = described(total_kv_blocks=16, max_num_seqs=4, max_seq_len=64)


# ------------------------------------------------------------------------------------------------- the watch
class Log:
    """What a worker tells the fleet, kept, the newest to be read; `is_away`: nothing can be told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.is_away = False
        self._newest: LogMessage | None = None

    async def publish(self, subject: str, data: bytes, *, headers: Any, after_seq: int) -> int:
        if self.is_away:
            raise BrokerUnavailable("gone")
        assert after_seq == len(self.told)
        self.told.append(decode_fleet_event(data))
        self._newest = LogMessage(subject, data, len(self.told), headers=headers)
        return len(self.told)

    async def message_from(self, _: str, seq: int, _pattern: str) -> LogMessage | None:
        return self._newest if seq <= len(self.told) else None

    async def listen(self, *_: Any) -> None:
        pass


class Scripted(SimulatedEngine):
    """An engine that answers its canaries as a test says: `ok`, `error`, `broken` or, for ever, nothing."""

    def __init__(self, clock: ManualClock, dp_ranks: tuple[int, ...]) -> None:
        super().__init__(Simulator(replace(DESCRIPTION, dp_ranks=dp_ranks)), clock)
        self.answer, self.asked, self.aborted = "ok", list[EngineRequest](), 0

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        self.asked.append(request)
        if self.answer == "nothing":
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted += 1
        if self.answer == "error":
            raise EngineError("no")
        finish: Any = "error" if self.answer == "broken" else "length"
        yield EngineOutput(token_ids=(1,), cached_tokens=0, finish_reason=finish)


class Watched:
    """A worker with its canary, in a clock that only the test moves."""

    def __init__(self, wait_s: float = WAIT_S, dp_ranks: tuple[int, ...] = (0,)) -> None:
        self.clock, self.log, self.stop = ManualClock(), Log(), asyncio.Event()
        self.engine = Scripted(self.clock, dp_ranks)
        log: Any = self.log
        worker_id = WorkerId(log, self.clock, FleetGate(), worker_id="w", instance="i")
        self.membership = Membership(registered("w", instance="i"), worker_id, self.clock)
        self.watch = CanaryWatch(self.engine, self.clock, wait_s=wait_s, begin_id=None, is_decode=False)

    @property
    def told(self) -> list[str]:
        return [type(event).__name__ for event in self.log.told]

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def after(self, seconds: float) -> None:
        await self.clock.advance(seconds)
        await self.settle()

    async def run(self, group: asyncio.TaskGroup) -> None:
        group.create_task(self.membership.run(self.stop))
        group.create_task(self.watch.run(self.membership, self.stop))
        await self.settle()


async def test_an_idle_engine_is_asked_for_the_begin_token_s_successor() -> None:
    worker = Watched()
    async with asyncio.TaskGroup() as group:
        await worker.run(group)
        assert worker.engine.asked == []
        await worker.after(WAIT_S)
        (asked,) = worker.engine.asked
        assert (asked.prompt, asked.max_tokens, asked.dp_rank, asked.cache_salt) == ((BEGIN_ID,), 1, 0, SALT)
        assert (asked.sampling.passed["temperature"], asked.queue_priority, asked.is_context_and_generation) == (
            0.0,
            1.0,
            False,
        )
        worker.stop.set()
    assert worker.watch.requests_total == {"ok": 1, "failed": 0, "late": 0}
    assert worker.told == ["WorkerRegistered", "WorkerDraining"]


@pytest.mark.parametrize(("answer", "reason"), [("error", "no"), ("broken", "the generation failed")])
async def test_an_engine_that_fails_it_is_out_until_it_answers(answer: str, reason: str) -> None:
    worker = Watched()
    worker.engine.answer = answer
    async with asyncio.TaskGroup() as group:
        await worker.run(group)
        await worker.after(WAIT_S)
        left = worker.log.told[-1]
        assert isinstance(left, WorkerLeft)
        assert left.reason == f"canary at rank 0: {reason}"
        await worker.after(WAIT_S)
        assert worker.told == ["WorkerRegistered", "WorkerLeft"], "which is said once"
        worker.engine.answer = "ok"
        await worker.after(WAIT_S)
        assert worker.told == ["WorkerRegistered", "WorkerLeft", "WorkerRegistered"]
        worker.stop.set()
    assert worker.watch.requests_total == {"ok": 1, "failed": 2, "late": 0}


async def test_a_late_answer_is_none_and_its_generation_is_given_up() -> None:
    worker = Watched(wait_s=0.001)
    worker.engine.answer = "nothing"
    async with asyncio.TaskGroup() as group:
        await worker.run(group)
        await worker.after(0.001)
        while not worker.engine.aborted:
            await worker.settle()
        await worker.settle()
        assert worker.told == ["WorkerRegistered", "WorkerLeft"]
        worker.stop.set()
    assert (worker.watch.requests_total["late"], worker.engine.aborted) == (1, 1)


async def test_a_worker_that_is_out_when_it_stops_does_not_say_that_it_drains() -> None:
    worker = Watched()
    async with asyncio.TaskGroup() as group:
        await worker.run(group)
        worker.log.is_away = True
        worker.membership.withdraw("the engine is dead")
        await worker.settle()
        worker.log.is_away = False
        worker.stop.set()
    assert worker.told == ["WorkerRegistered", "WorkerLeft"]
    assert worker.log.told[-1].reason == "the engine is dead"


async def test_what_clients_are_answered_counts_as_life_unless_the_engine_is_out() -> None:
    worker = Watched()
    for is_fit, due_s in ((True, WAIT_S), (False, 1.0)):
        worker.watch.is_fit = is_fit
        await worker.clock.advance(9.0)
        worker.watch.on_output()
        assert worker.watch.due_s == due_s


async def test_ranks_are_asked_in_turn_and_one_that_failed_until_it_answers() -> None:
    worker = Watched(dp_ranks=(4, 5))
    async with asyncio.TaskGroup() as group:
        await worker.run(group)
        for answer in ("ok", "error", "broken", "ok", "ok"):
            worker.engine.answer = answer
            await worker.after(WAIT_S)
        worker.stop.set()
    assert [each.dp_rank for each in worker.engine.asked] == [4, 5, 5, 5, 4]
