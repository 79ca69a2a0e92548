"""Simulated prefill and decode engines that meet over HTTP: what the contract of all engines does not say."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from yarl import URL

from kv_protocol.fleet import Role
from kv_runtime.clock import Clock
from tests.contract.engines import DESCRIPTION, PROMPT, failure, outputs, request, tokens_of
from tests.system.integration.broker import eventually
from worker_agent.engines.simulated.engine import TRANSFERS_PATH, SimulatedEngine
from worker_agent.engines.simulated.handovers import HeldContexts, TransferRules
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import EngineError

SPEED = 1000.0
PATIENT: dict[str, Any] = {"timeout_s": 3600.0}


@dataclass
class Worker:
    """A running engine, and its end of the wire."""

    engine: SimulatedEngine

    @property
    def contexts(self) -> HeldContexts:
        return self.engine.contexts


def made(role: Role, **fields: Any) -> Worker:
    simulator = Simulator(DESCRIPTION, role=role, transfers=TransferRules(**(PATIENT | fields)))
    return Worker(SimulatedEngine(simulator, Clock(), speed=SPEED))


@asynccontextmanager
async def worker(role: Role, **fields: Any) -> AsyncIterator[Worker]:
    """Be where it runs; at the end it dies, whatever it has to do."""
    running = made(role, **fields)
    await running.engine.start()
    async with asyncio.TaskGroup() as group:
        driving = group.create_task(running.engine.run())
        try:
            yield running
        finally:
            driving.cancel()
            await running.engine.stop(0.0)


async def handed_over(prefill: Worker, **fields: Any) -> Handoff:
    (answer,) = await outputs(prefill.engine, request(**fields))
    assert answer.handoff is not None
    return answer.handoff


async def test_ids_sizes_and_completion_pass_and_both_ends_count_them() -> None:
    async with worker("prefill") as prefill, worker("decode", token_bytes=1000) as decode:
        handoff = await handed_over(prefill)
        assert handoff.ctx_info_endpoint == prefill.contexts.endpoint
        assert prefill.contexts.tokens == len(PROMPT)
        assert len(tokens_of(await outputs(decode.engine, request(handoff=handoff)))) == 4
    sent, got = prefill.contexts, decode.engine.fetches
    assert (len(sent), sent.handed_over_total, sent.expired_total) == (0, 1, 0)
    assert (got.by_outcome["done"], got.fetched_bytes) == (1, len(PROMPT) * 1000)
    assert got.seconds > 0


async def test_a_prefill_worker_that_dies_during_the_transfer_fails_the_request() -> None:
    async with AsyncExitStack() as prefills, worker("decode", latency_s=100.0) as decode:
        prefill = await prefills.enter_async_context(worker("prefill"))
        handoff = await handed_over(prefill)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(failure(outputs(decode.engine, request(handoff=handoff))))
            await eventually(lambda: decode.engine.fetching == 1)
            await prefills.aclose()
        assert type(waiting.result()) is EngineError
        assert decode.engine.fetches.by_outcome["lost"] == 1


async def test_a_decode_worker_that_goes_leaves_the_context() -> None:
    async with worker("prefill") as prefill:
        handoff = await handed_over(prefill)
        async with worker("decode", latency_s=3000.0) as decode, asyncio.TaskGroup() as group:
            group.create_task(failure(outputs(decode.engine, request(handoff=handoff))))
            await eventually(lambda: decode.engine.fetching == 1)
            await decode.engine.stop(0.0)
        assert (len(prefill.contexts), prefill.contexts.handed_over_total) == (1, 0)


@pytest.mark.parametrize("runs", [True, False])
async def test_the_address_is_free_once_the_engine_has_ended(runs: bool) -> None:
    prefill = made("prefill")
    await prefill.engine.start()
    endpoint = URL(prefill.contexts.endpoint or "")
    async with asyncio.TaskGroup() as group:
        if runs:
            group.create_task(prefill.engine.run())
            await asyncio.sleep(0)
        await prefill.engine.stop(0.0)
    socket.create_server((endpoint.host or "", endpoint.port or 0)).close()


# -------------------------------------------------------------------------------------------------------- wire
async def test_only_a_client_with_the_handoff_gets_the_context() -> None:
    async with worker("prefill") as prefill, aiohttp.ClientSession() as session:
        handoff = await handed_over(prefill, transfer_id=5)
        state = handoff.opaque_state
        for name, body, status in (
            *(("5", b"another", 404), ("6", state, 404), ("-5", state, 404), ("5", b" " * 5000, 413)),
            *(("5", state, 200), ("5", state, 404)),
        ):
            async with session.post(f"{prefill.contexts.endpoint}{TRANSFERS_PATH}{name}", data=body) as response:
                assert response.status == status, (name, body)
