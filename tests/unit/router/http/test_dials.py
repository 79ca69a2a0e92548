"""Connections to workers that open just as the time for it runs out, on the event loop of the router's process."""

import asyncio
from time import monotonic
from unittest.mock import create_autospec

import pytest
import uvloop

from kv_runtime.supervise import TaskSet
from router.http.exchange import BufferedResponse, CallLimits, OutboundCall, ResponseHandler
from router.http.limits import HttpLimits
from router.http.upstreams import Upstreams, WorkerConnection
from tests.unit.router.plane import until
from tests.unit.router.upstream import Upstream, answers

CONNECT_S = 0.1


class SlowlyFilled(set[WorkerConnection]):
    """Takes so long to add a connection that no time is left to open it."""

    def add(self, connection: WorkerConnection) -> None:
        """Keep the event loop busy, then add it."""
        until_s = monotonic() + CONNECT_S
        while monotonic() < until_s:
            pass
        super().add(connection)


async def opened_late() -> None:
    upstreams, handler, over = Upstreams(HttpLimits()), create_autospec(ResponseHandler, instance=True), asyncio.Event()
    upstreams.connections = SlowlyFilled()
    handler.on_head.return_value = b""
    handler.on_end.side_effect = handler.on_failed.side_effect = lambda *_, **__: over.set()
    async with Upstream(answers()) as worker:
        async with asyncio.timeout(60), TaskSet(1) as upstreams.dials:
            call = OutboundCall(worker.base_url, "/v1/completions", b"", b"{}", CallLimits(60, 60, 60))
            BufferedResponse(upstreams).ask(call, handler)
            await over.wait()
        handler.on_end.assert_called_once_with(b"{}", 0)
        assert upstreams.idle == 1
        upstreams.abort()
        await until(lambda: not upstreams.connections)


def test_a_connection_that_opens_as_its_time_runs_out_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.http.upstreams.CONNECT_S", CONNECT_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(opened_late())
