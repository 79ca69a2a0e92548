"""The soak itself: a short one finds nothing; cut answers and a router that ends are found."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from bench.soak.answers import AnswerOutcome
from bench.soak.run import SoakPlan, SoakRun

CUT_EVERY = 100
PROGRAMS = Path(sys.executable).parent


class CuttingProxy:
    """Stands between clients and a router; closes each hundredth request's connection when its answer begins."""

    def __init__(self) -> None:
        self._requests = 0
        self.cuts = 0

    @asynccontextmanager
    async def before(self, port: int) -> AsyncIterator[int]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(reader, writer, port)

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        onwards, outwards = await asyncio.open_connection("127.0.0.1", port)
        is_marked = False

        async def requests() -> None:
            nonlocal is_marked
            try:
                while data := await reader.read(1 << 16):
                    if data.startswith(b"POST "):
                        self._requests += 1
                        is_marked = self._requests % CUT_EVERY == 0
                    outwards.write(data)
            finally:
                outwards.transport.abort()

        async def answers() -> None:
            while data := await onwards.read(1 << 16):
                if is_marked:
                    self.cuts += 1
                    outwards.transport.abort()
                    break
                writer.write(data)
            writer.transport.abort()

        await asyncio.gather(requests(), answers(), return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_a_short_soak_loses_nothing(tmp_path: Path) -> None:
    soak = await SoakRun(SoakPlan(1_200, PROGRAMS, workers=4, fault_every=110, rounds=2), tmp_path, print).run()
    assert soak.tally.lost() == {}, soak.tally.examples
    assert soak.tally.requests == 1_200
    assert {each.fault.kind for each in soak.faults} >= {"worker killed", "nats-server killed"}
    assert [each.verified for each in soak.quiet] == [""] * 2
    assert soak.complaints == []


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_every_answer_that_is_cut_is_found(tmp_path: Path) -> None:
    proxy = CuttingProxy()
    plan = SoakPlan(1_000, PROGRAMS, workers=3, fault_every=1_000, rounds=1, entrance=proxy.before)
    soak = await SoakRun(plan, tmp_path, print).run()
    assert proxy.cuts == 1_000 // CUT_EVERY
    assert soak.tally.lost() == {AnswerOutcome.CUT: proxy.cuts}


@asynccontextmanager
async def killing_the_router(port: int) -> AsyncIterator[int]:
    """Kill the process that listens at `port` soon after the clients have begun."""

    async def kill() -> None:
        listening = [each for each in psutil.net_connections("tcp") if each.laddr and each.laddr[1] == port]
        os.kill(next(each.pid for each in listening if each.status == psutil.CONN_LISTEN and each.pid), signal.SIGKILL)

    task = asyncio.ensure_future(kill())
    try:
        yield port
    finally:
        await task


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_a_router_that_ends_ends_the_soak_and_is_named(tmp_path: Path) -> None:
    plan = SoakPlan(600, PROGRAMS, workers=3, fault_every=100, rounds=1, entrance=killing_the_router)
    soak = await SoakRun(plan, tmp_path, print).run()
    assert any(each.startswith("router ended with exit code -9: ") for each in soak.complaints), soak.complaints
