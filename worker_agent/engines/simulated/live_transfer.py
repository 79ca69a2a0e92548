"""A simulated engine's KV transfers in wall time, both ends, over HTTP. No KV is moved.

    fetch   the receiver: requests the KV from the sender, which answers when all is sent
    send    the sender: the transfer's time passes; then the context is released

    POST /v1/kv_transfers {"transfer_id", "state", "tokens"}    200 {"transfer_id", "size_bytes"}, once all is sent
                                                                404: not held, or being sent to another engine
                                                                503: too many transfers

The receiver gives up after the transfers' timeout, the sender when the receiver disconnects. A context whose sending
was interrupted stays held, until it is fetched or expires. `state` is base64. A fetch needs no other secret, and there
is no TLS: the network between workers must be closed. An engine fetches only from IP addresses (no host names) within
`transfer.networks`, by default loopback, so that a forged handoff cannot name any other target.
"""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from ipaddress import ip_address
from typing import Annotated, Literal

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Meta
from yarl import URL

from kv_protocol.errors import UNDECODABLE
from kv_runtime.clock import Clock
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import error_response, json_response, openai_errors
from kv_runtime.http.server import HttpServer
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.transfer import Fetch
from worker_agent.media.addresses import parsed_networks
from worker_agent.media.config import TransferSection
from worker_agent.port.types import EngineError, RequestRefused

PATH = "/v1/kv_transfers"
IN_FLIGHT_MAX = 10_000
"""Most transfers from this engine at a time; more than its ranks have requests."""
_BODY_BYTES_MAX = 4096
_DRAIN_S = 0.5
"""The engine ends before the server, so that no transfer is in progress."""
_FIELD = "disaggregated_params.ctx_info_endpoint"

Send = Callable[[int, bytes, int], Awaitable[int]]
"""Send so many tokens of the context of a name and a state, and return the bytes; raise `FetchRefused`."""


class TransferFailed(EngineError):
    """A prompt's KV did not come to the decode engine, before any output."""


class FetchRefused(Exception):
    """The fetch failed: the sender does not hold the context (gone), or does not answer (lost)."""

    def __init__(self, outcome: Literal["gone", "lost"], why: str) -> None:
        super().__init__(why)
        self.outcome: Literal["gone", "lost"] = outcome


class CarrierRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requested context, and the number of its tokens."""

    transfer_id: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    state: Annotated[bytes, Meta(max_length=1024)]
    tokens: Annotated[int, Meta(ge=1, le=1 << 24)]


class KvSent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer once all bytes are sent."""

    transfer_id: int
    size_bytes: int


class HttpCarrier:
    """Serves this engine's contexts while it runs; fetching needs only the other engine's carrier."""

    def __init__(self, section: TransferSection) -> None:
        self._section = section
        self._networks = parsed_networks(section.networks)
        self._send: Send | None = None
        self.in_flight = 0
        """Transfers from this engine now."""
        app = web.Application(middlewares=[openai_errors, require_token("")], client_max_size=_BODY_BYTES_MAX)
        app.add_routes([web.post(PATH, self._answer)])
        self._server = HttpServer(app, section.host, section.port, drain_s=_DRAIN_S, handler_cancellation=True)
        self.start, self.run = self._server.start, self._server.run
        """Bind the address, or raise `PortUsed`; serve until a stop, after which the address is free."""

    @property
    def endpoint(self) -> str:
        """The address for other engines to fetch this engine's contexts from."""
        return str(URL.build(scheme="http", host=self._section.host, port=self._server.port))

    def serve(self, send: Send) -> None:
        """Serve fetches with `send`."""
        self._send = send

    def check(self, endpoint: str) -> None:
        """Raise `RequestRefused` unless `endpoint` is http://address:port of an allowed network."""
        try:
            url = URL(endpoint)
            address, port = ip_address(url.host or ""), url.explicit_port
        except ValueError as error:
            raise RequestRefused(_FIELD, endpoint, "http://address:port") from error
        if url != URL.build(scheme="http", host=str(address), port=port):
            raise RequestRefused(_FIELD, endpoint, "http://address:port")
        if not any(address in network for network in self._networks):
            raise RequestRefused(_FIELD, endpoint, f"addresses of transfer.networks: {self._section.networks}")

    async def fetch(self, fetch: Fetch) -> None:
        """Return once all KV has come; raise `FetchRefused`."""
        request = CarrierRequest(transfer_id=fetch.transfer_id, state=fetch.state, tokens=fetch.tokens)
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(
                    URL(fetch.endpoint).with_path(PATH),
                    data=msgspec.json.encode(request),
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                ) as response,
            ):
                size_bytes = response.content_length
                data = b"" if size_bytes is None or size_bytes > _BODY_BYTES_MAX else await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise FetchRefused("lost", f"{fetch.endpoint}: {type(error).__name__}") from error
        if response.status == HTTPStatus.NOT_FOUND:
            raise FetchRefused("gone", f"{fetch.endpoint}: transfer {fetch.transfer_id} is not held")
        try:
            sent = msgspec.json.decode(data, type=KvSent)
        except UNDECODABLE as error:
            raise FetchRefused("lost", f"{fetch.endpoint}: {response.status}, and no account") from error
        if sent.transfer_id != fetch.transfer_id:
            raise FetchRefused("lost", f"{fetch.endpoint}: {sent.transfer_id} sent, not {fetch.transfer_id}")

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        try:
            request = msgspec.json.decode(await http.read(), type=CarrierRequest)
        except UNDECODABLE as error:
            return error_response(400, f"body: {error}", "invalid_request_error")
        if self._send is None or self.in_flight >= IN_FLIGHT_MAX:
            return error_response(
                503, f"{self.in_flight} transfers are asked for, allowed {IN_FLIGHT_MAX}", "server_error"
            )
        self.in_flight += 1
        try:
            size_bytes = await self._send(request.transfer_id, request.state, request.tokens)
        except FetchRefused as refused:
            return error_response(404, str(refused), "invalid_request_error", code=refused.outcome)
        finally:
            self.in_flight -= 1
        return json_response(KvSent(transfer_id=request.transfer_id, size_bytes=size_bytes))


class Transfers:
    """One engine's transfers; `changed` is called whenever the simulator may have work again."""

    def __init__(
        self, simulator: Simulator, carrier: HttpCarrier, clock: Clock, speed: float, changed: Callable[[], None]
    ) -> None:
        self._simulator, self._carrier, self._clock, self._speed = simulator, carrier, clock, speed
        self._changed = changed
        self._rules = simulator.transfers
        self._sending: set[int] = set()

    async def fetch(self, fetch: Fetch) -> None:
        """Fetch a request's KV and report the outcome to the simulator."""
        began_s = self._clock.now()
        try:
            async with asyncio.timeout(self._rules.timeout_s / self._speed):
                await self._carrier.fetch(fetch)
        except TimeoutError:
            self._simulator.fetch_failed(fetch, "timeout")
        except FetchRefused as refused:
            self._simulator.fetch_failed(fetch, refused.outcome)
        else:
            self._simulator.fetched(fetch, (self._clock.now() - began_s) * self._speed)
        self._changed()

    async def send(self, name: int, state: bytes, tokens: int) -> int:
        """Return the bytes sent; raise `FetchRefused` if the context is not held, or being sent to another engine."""
        if name in self._sending or not self._simulator.holds(name, state, tokens):
            raise FetchRefused("gone", f"transfer {name}: not held here, or being sent")
        self._sending.add(name)
        try:
            await self._clock.sleep(self._rules.duration_s(tokens) / self._speed)
        finally:
            self._sending.remove(name)
        if not self._simulator.hand_over(name):
            raise FetchRefused("gone", f"transfer {name}: given up meanwhile")
        self._changed()
        return tokens * self._rules.token_bytes
