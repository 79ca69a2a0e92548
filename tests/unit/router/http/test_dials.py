"""Connections to workers that open just as the time for it runs out, on the event loop of the router's process."""

import asyncio
from time import monotonic

import uvloop

from kv_runtime.supervise import TaskSet
from router.http.exchange import BufferedResponse, CallLimits, OutboundCall, UpstreamStage
from router.http.heads import Headers
from router.http.limits import HttpLimits
from router.http.upstreams import Upstreams
from router.http.worker import WorkerConnection
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


class Handler:
    """A handler of one call."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: Headers, is_stream: bool) -> bytes | None:  # noqa: ARG002
        """Take any answer."""
        return b""

    def on_end(self, tail: bytes, later_events: int) -> None:
        """The answer came."""
        assert (tail, later_events) == (b"{}", 0)
        self.over.set()

    def on_failed(self, stage: UpstreamStage, reason: str, begun: bool) -> None:
        """It did not."""
        raise AssertionError(stage, reason, begun)

    def on_dropped(self) -> None:
        """Not called: any answer is taken."""

    def on_cut(self, stage: UpstreamStage, reason: str) -> bytes | None:
        """Not called: the answer is no stream."""

    on_first_byte = on_bytes = on_dropped

    def reason_to_stop(self, quiet_s: float, begun: bool) -> str:  # noqa: ARG002
        """Return nothing: the worker is there."""
        return ""


async def opened_late() -> None:
    upstreams, handler = Upstreams(HttpLimits()), Handler()
    upstreams.connections = SlowlyFilled()
    async with Upstream(answers()) as worker:
        async with asyncio.timeout(60), TaskSet(1) as upstreams.dials:
            call = OutboundCall(worker.base_url, "/v1/completions", b"", b"{}", CallLimits(CONNECT_S, 60, 60, 60))
            BufferedResponse(upstreams).ask(call, handler)
            await handler.over.wait()
        assert upstreams.idle == 1
        upstreams.abort()
        await until(lambda: not upstreams.connections)


def test_a_connection_that_opens_as_its_time_runs_out_is_used() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(opened_late())
