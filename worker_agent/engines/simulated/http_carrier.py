"""Messages of simulated KV transfers over HTTP; no KV is sent: the sender waits for the time of the transfer.

    POST /v1/kv_transfers {"transfer_id", "state", "tokens"}    200 {"transfer_id", "size_bytes"}, once all is sent
                                                                404: not held, or being sent to another engine
                                                                503: too many transfers

If a receiver disconnects, its transfer ends and the context stays held. `state` is base64. A fetch
needs no other secret, and there is no TLS: the network between workers must be closed. An engine fetches only
from IP addresses (no host names) within `transfer.networks`, by default loopback, so that a forged handoff cannot name
any other target.
"""

import asyncio
from http import HTTPStatus
from ipaddress import ip_address
from typing import Annotated

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Meta
from yarl import URL

from kv_protocol.errors import UNDECODABLE
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import error_response, json_response, openai_errors
from kv_runtime.http.server import HttpServer
from worker_agent.engines.simulated.live_transfer import FetchRefused, Send
from worker_agent.engines.simulated.transfer import Fetch
from worker_agent.media.addresses import parsed_networks
from worker_agent.media.config import TransferSection
from worker_agent.port.types import RequestRefused

PATH = "/v1/kv_transfers"
IN_FLIGHT_MAX = 10_000
"""Most transfers from this engine at a time; more than its ranks have requests."""
_BODY_BYTES_MAX = 4096
_DRAIN_S = 0.5
"""The engine ends before the server, so that no transfer is in progress."""
_FIELD = "disaggregated_params.ctx_info_endpoint"


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
    """A `Carrier`. It serves this engine's contexts while it runs; fetching needs only the other engine's carrier."""

    def __init__(self, section: TransferSection) -> None:
        self._section = section
        self._networks = parsed_networks(section.networks)
        self._send: Send | None = None
        self._in_flight = 0
        app = web.Application(middlewares=[openai_errors, require_token("")], client_max_size=_BODY_BYTES_MAX)
        app.add_routes([web.post(PATH, self._answer)])
        self._server = HttpServer(app, section.host, section.port, drain_s=_DRAIN_S, handler_cancellation=True)

    async def start(self) -> None:
        """Bind the address; raise `PortUsed` if it is in use."""
        await self._server.start()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; the address is free afterwards."""
        await self._server.run(stop)

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
        if self._send is None or self._in_flight >= IN_FLIGHT_MAX:
            return error_response(
                503, f"{self._in_flight} transfers are asked for, allowed {IN_FLIGHT_MAX}", "server_error"
            )
        self._in_flight += 1
        try:
            size_bytes = await self._send(request.transfer_id, request.state, request.tokens)
        except FetchRefused as refused:
            return error_response(404, str(refused), "invalid_request_error", code=refused.outcome)
        finally:
            self._in_flight -= 1
        return json_response(KvSent(transfer_id=request.transfer_id, size_bytes=size_bytes))
