"""Transfers embeddings over plain HTTP, if no faster transport is installed.

    GET /v1/embeddings/offer, `x-embedding-token: <token>`   200 and the bytes for the first request in time; else 404

The token is in a header, which access logs do not have. There is no other secret and no TLS: the
network between workers must be closed. An offer ends when its answer begins: a retry needs a new one.

Embeddings are fetched only from addresses, never host names, of `transfer.networks`, loopback by default: a forged
descriptor cannot name another target. The body is bounded while it is read, and its BLAKE3 is compared.
"""

import asyncio
from ipaddress import ip_address
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from kv_runtime.clock import Clock
from kv_runtime.http.access import require_token
from kv_runtime.http.answer_body import bounded_body
from kv_runtime.http.answers import openai_errors
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part
from worker_agent.media.config import TransferSection, parsed_networks
from worker_agent.media.embedding_transfer import TTL_S, EmbeddingTransfer, new_token, refused
from worker_agent.media.encode_wire import HttpDescriptor
from worker_agent.media.parts import content_digest
from worker_agent.media.urls import Address

PATH = "/v1/embeddings/offer"
TOKEN_HEADER = "x-embedding-token"  # noqa: S105 - its name
_OK = 200
_CHUNK_BYTES = 256 << 10


class HttpEmbeddingTransfer(EmbeddingTransfer[bytes, HttpDescriptor]):
    """It serves offers while its `parts` run; fetching needs only the other worker's."""

    kind = HttpDescriptor
    wrong_kind = "embeddings over http: this worker has no nixl, or transfer.over says so"

    def __init__(self, section: TransferSection, clock: Clock, **bounds: Any) -> None:  # noqa: ANN401 - as the base has them
        super().__init__(clock, **bounds)
        self._host, self._networks = section.host, parsed_networks(section.networks)
        app = web.Application(middlewares=[openai_errors, require_token("")])
        app.add_routes([web.get(PATH, self._give, allow_head=False)])
        self._server = HttpServer(app, section.host, section.port)
        self.start = self._server.start
        """Binds the address; raises `PortUsed` if it is in use."""

    def parts(self, stage: int) -> tuple[Part, ...]:
        """Return the parts that serve offers; after `start`."""
        return (
            Part("embeddings-http", self._server.run, stage),
            Part("embeddings-expiry", self._expire, stage),
        )

    async def offer(self, embeddings: bytes) -> HttpDescriptor:
        """Offer `embeddings` themselves."""
        digest, token = await asyncio.to_thread(content_digest, embeddings), new_token()
        self.offers.expire(self._clock.now())
        self.offers.offer(token, embeddings, self._clock.now())
        return HttpDescriptor(
            host=self._host, port=self._server.port, token=token, digest=digest, size_bytes=len(embeddings)
        )

    async def _read(self, descriptor: HttpDescriptor) -> bytes:
        address = self._checked(descriptor)
        try:
            data = await _body(address, descriptor)
        except aiohttp.ClientPayloadError as error:
            raise refused("incomplete", descriptor, "all of the bytes") from error
        except (aiohttp.ClientError, OSError) as error:
            raise refused("unreachable", descriptor, "a worker that answers") from error
        if len(data) != descriptor.size_bytes:
            raise refused("incomplete", descriptor, f"all of the bytes, not {len(data)}")
        return data

    def _checked(self, descriptor: HttpDescriptor) -> Address:
        try:
            address = ip_address(descriptor.host)
        except ValueError as error:
            raise refused("url_host", descriptor, "an address") from error
        if not any(address in network for network in self._networks):
            raise refused("address_network", descriptor, "addresses of transfer.networks")
        return address

    async def _give(self, request: web.Request) -> web.StreamResponse:
        data = self.offers.take(request.headers.get(TOKEN_HEADER, ""), self._clock.now())
        if data is None:
            raise web.HTTPNotFound
        response = web.StreamResponse()
        response.content_type, response.content_length = "application/octet-stream", len(data)
        await response.prepare(request)
        view = memoryview(data)
        for at in range(0, len(data), _CHUNK_BYTES):  # other tasks run between the chunks
            await response.write(view[at : at + _CHUNK_BYTES])
        await response.write_eof()
        return response

    async def _expire(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._clock.wait(stop, TTL_S)
            self.offers.expire(self._clock.now())


async def _body(address: Address, descriptor: HttpDescriptor) -> bytes:
    """Return the body, at most one chunk longer than is allowed."""
    url = URL.build(scheme="http", host=str(address), port=descriptor.port, path=PATH)
    headers = {TOKEN_HEADER: descriptor.token, "Accept-Encoding": "identity"}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(url, headers=headers, allow_redirects=False) as response,
    ):
        if response.status != _OK:
            raise refused("expired", descriptor, f"embeddings that wait; the answer is {response.status}")
        if (data := await bounded_body(response, descriptor.size_bytes)) is None:
            raise refused("too_large", descriptor, "as many bytes as were offered")
    return data
