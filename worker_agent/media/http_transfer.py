"""Transfers embeddings over plain HTTP, if no faster transport is installed.

    GET /v1/embeddings/offer, `x-embedding-token: <token>`   200 and the bytes for the first request in time; else 404

The token is 256 random bits in a header, which access logs do not have. There is no other secret and no TLS: the
network between workers must be closed. An offer ends when its answer begins: a retry needs a new one.

Embeddings are fetched only from addresses, never host names, of `transfer.networks`, loopback by default: a forged
descriptor cannot name another target. The body is bounded while it is read, and its BLAKE3 is compared.
"""

import asyncio
import secrets
from ipaddress import ip_address

import aiohttp
from aiohttp import web
from yarl import URL

from kv_runtime.clock import Clock
from kv_runtime.http.access import require_token
from kv_runtime.http.answer_body import bounded_body
from kv_runtime.http.answers import openai_errors
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part
from worker_agent.media.addresses import Address, parsed_networks
from worker_agent.media.config import TransferSection
from worker_agent.media.embedding_stores import TTL_S, Offers
from worker_agent.media.parts import content_digest
from worker_agent.media.refusals import MediaReason, MediaRefused
from worker_agent.media.transfer import FETCH_S, STORE_BYTES_MAX, EmbeddingDescriptor, HttpDescriptor

PATH = "/v1/embeddings/offer"
TOKEN_HEADER = "x-embedding-token"  # noqa: S105 - its name
_FIELD = "embeddings"
_TOKEN_BYTES = 32
_OK = 200
_CHUNK_BYTES = 256 << 10


class HttpEmbeddingTransfer:
    """An `EmbeddingTransfer`. It serves offers while its `parts` run; fetching needs only the other worker's."""

    def __init__(
        self,
        section: TransferSection,
        clock: Clock,
        *,
        fetch_s: float = FETCH_S,
        store_bytes_max: int = STORE_BYTES_MAX,
    ) -> None:
        self._section, self._clock, self._fetch_s, self._store_bytes_max = section, clock, fetch_s, store_bytes_max
        self._networks = parsed_networks(section.networks)
        self.offers: Offers[bytes] = Offers(store_bytes_max)
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
        """Offer `embeddings`, which must not change any more, for `TTL_S` seconds; raise `NoRoom`."""
        assert embeddings
        digest = await asyncio.to_thread(content_digest, embeddings)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.offers.expire(self._clock.now())
        self.offers.offer(token, embeddings, self._clock.now())
        return HttpDescriptor(
            host=self._section.host,
            port=self._server.port,
            token=token,
            digest=digest,
            size_bytes=len(embeddings),
        )

    async def release(self, descriptor: EmbeddingDescriptor) -> None:
        """End the offer of `descriptor`."""
        self.offers.release(descriptor.token)

    async def fetch(self, descriptor: EmbeddingDescriptor) -> bytes:
        """Return the offered embeddings; raise `MediaRefused`."""
        if not isinstance(descriptor, HttpDescriptor):
            allowed = "embeddings over http: this worker has no nixl, or transfer.over says so"
            raise MediaRefused("unreachable", _FIELD, repr(descriptor), allowed)
        address = self._checked(descriptor)
        try:
            async with asyncio.timeout(self._fetch_s):
                data = await _read(address, descriptor)
        except TimeoutError as error:
            raise _refused("timeout", descriptor, f"a whole answer within {self._fetch_s} s") from error
        except aiohttp.ClientPayloadError as error:
            raise _refused("incomplete", descriptor, "all of the bytes") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _refused("unreachable", descriptor, "a worker that answers") from error
        if len(data) != descriptor.size_bytes:
            raise _refused("incomplete", descriptor, f"all of the bytes, not {len(data)}")
        if not secrets.compare_digest(await asyncio.to_thread(content_digest, data), descriptor.digest):
            raise _refused("digest", descriptor, "the bytes that were offered")
        return data

    def _checked(self, descriptor: HttpDescriptor) -> Address:
        if descriptor.size_bytes > self._store_bytes_max:
            raise _refused("too_large", descriptor, f"at most {self._store_bytes_max} bytes")
        try:
            address = ip_address(descriptor.host)
        except ValueError as error:
            raise _refused("url_host", descriptor, "an address") from error
        if not any(address in network for network in self._networks):
            raise _refused("address_network", descriptor, "addresses of transfer.networks")
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


async def _read(address: Address, descriptor: HttpDescriptor) -> bytes:
    """Return the body, at most one chunk longer than is allowed."""
    url = URL.build(scheme="http", host=str(address), port=descriptor.port, path=PATH)
    headers = {TOKEN_HEADER: descriptor.token, "Accept-Encoding": "identity"}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(url, headers=headers, allow_redirects=False) as response,
    ):
        if response.status != _OK:
            raise _refused("expired", descriptor, f"embeddings that wait; the answer is {response.status}")
        if (data := await bounded_body(response, descriptor.size_bytes)) is None:
            raise _refused("too_large", descriptor, "as many bytes as were offered")
    return data


def _refused(reason: MediaReason, descriptor: HttpDescriptor, allowed: str) -> MediaRefused:
    found = f"{descriptor.host}:{descriptor.port}, {descriptor.size_bytes} bytes"
    return MediaRefused(reason, _FIELD, found, allowed)
