"""A simulated engine's KV transfers in wall time, both ends, over HTTP. No KV is moved.

    fetch     the decode engine waits for the time of the transfer, then tells the prefill engine that all has come
    answer    the prefill engine frees the blocks of the context that was fetched

    POST /v1/kv_transfers/ID    the body is the handoff's state; the answer is 200, or 404 if the prefill engine holds
                                no context with this id and state

The state is the only secret of a fetch, and there is no TLS: all engines of a fleet are on one machine, and use its
loopback address (`handovers.ENDPOINT`), so that a forged handoff cannot name another machine.
"""

import asyncio
from collections.abc import Callable

import aiohttp
from aiohttp import web
from yarl import URL

from kv_runtime.clock import Clock
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import error_response, openai_errors
from kv_runtime.http.server import HttpServer
from worker_agent.engines.simulated.handovers import HOST, TransferOutcome
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.port.handoff import Handoff
from worker_agent.port.types import EngineError, KvFetches

PATH = "/v1/kv_transfers/"
_BODY_BYTES_MAX = 4096
_DRAIN_S = 0.5
"""How long the stopping server waits for running requests; an engine that was drained holds no context by then."""
_OUTCOMES: dict[int, TransferOutcome] = {200: "done", 404: "gone"}


class TransferFailed(EngineError):
    """The decode engine could not fetch a prompt's KV, and generated no output."""


class LiveTransfers:
    """One engine's transfers.

    `changed` is called when another engine has fetched a context: the simulator may have work again.
    """

    def __init__(
        self,
        simulator: Simulator,
        clock: Clock,
        speed: float,
        fetches: KvFetches,
        changed: Callable[[], None],
    ) -> None:
        self._simulator, self._clock, self._speed = simulator, clock, speed
        self._fetches, self._changed = fetches, changed
        app = web.Application(middlewares=[openai_errors, require_token("")], client_max_size=_BODY_BYTES_MAX)
        app.add_routes([web.post(PATH + "{name:[0-9]{1,19}}", self._answer)])
        self._server = HttpServer(app, HOST, 0, drain_s=_DRAIN_S, handler_cancellation=True)
        self.run = self._server.run
        """Serve until a stop, after which the address is free."""

    async def start(self) -> None:
        """Bind a free port, which handoffs name from now on."""
        await self._server.start()
        self._simulator.contexts.endpoint = f"http://{HOST}:{self._server.port}"

    async def fetch(self, handoff: Handoff, tokens: int) -> bool:
        """Wait for the transfer time of `tokens` tokens, then tell the prefill engine that they have come.

        Return whether the outcome is `done` (`handovers.py`).
        """
        rules, began_s = self._simulator.transfers, self._clock.now()
        outcome: TransferOutcome = "timeout"
        try:
            async with asyncio.timeout(rules.timeout_s / self._speed):
                await self._clock.sleep(rules.duration_s(tokens) / self._speed)
                outcome = await _told(handoff)
        except TimeoutError:
            pass
        self._fetches.by_outcome[outcome] += 1
        if outcome == "done":
            self._fetches.fetched_bytes += tokens * rules.token_bytes
            self._fetches.seconds += (self._clock.now() - began_s) * self._speed
        return outcome == "done"

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        name = http.match_info["name"]
        if not self._simulator.hand_over(int(name), await http.read()):
            return error_response(404, f"transfer {name}: not held here", code=_OUTCOMES[404])
        self._changed()
        return web.Response()


async def _told(handoff: Handoff) -> TransferOutcome:
    """Tell the prefill engine that its context has been fetched; return the outcome that its answer means."""
    try:
        url = URL(handoff.ctx_info_endpoint or "").with_path(f"{PATH}{handoff.ctx_request_id}")
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url, data=handoff.opaque_state, allow_redirects=False) as response,
        ):
            return _OUTCOMES.get(response.status, "lost")
    except (aiohttp.ClientError, OSError, ValueError):  # a forged handoff may name no valid port
        return "lost"
