"""The forwarding seam: one request to one worker, its answer as a stream of bytes.

    async with forward(request, target) as answer:    the head has come
        async for chunk in answer.chunks: ...         bytes as they come, unparsed

Every failure is an `UpstreamFailed` that names its phase; leaving the block early closes the worker's connection.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal, NamedTuple, Protocol

import aiohttp

from router.config import FailuresSection

Phase = Literal["connect", "first_byte", "body"]
_CONNECTIONS_MAX = 10_000
_KEEPALIVE_S = 4.0
"""Less than servers' own (uvicorn: 5 s): a worker that closes an idle connection as we use it would seem to fail."""


class UpstreamFailed(Exception):
    """The worker did not answer as it should: not reached, no head, or cut off in its answer.

    `busy_s` is set where it merely has too much to do, to how long it wants to be left alone.
    """

    def __init__(self, phase: Phase, reason: str, busy_s: float | None = None) -> None:
        super().__init__(f"{phase}: {reason}")
        self.phase = phase
        self.reason = reason
        self.busy_s = busy_s


class ForwardRequest(NamedTuple):
    """What is sent on, to `path` of the target."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    """A worker's answer: `chunks` raises `UpstreamFailed` where it is cut off, `first_byte` of it before any came."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]
    retry_after: str = ""


class Forwarder(Protocol):
    """Whoever carries requests to workers."""

    def forward(self, request: ForwardRequest, base_url: str) -> AbstractAsyncContextManager[Answer]:
        """Send `request` to the worker at `base_url`."""


class HttpForwarder:
    """A `Forwarder` over pooled keep-alive connections, between `start` and `stop`."""

    def __init__(self, limits: FailuresSection, worker_token: str = "") -> None:
        self._limits = limits
        self._authorization = {"Authorization": f"Bearer {worker_token}"} if worker_token else {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Requests can be sent."""
        limits = self._limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS_MAX, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are not another's
            # The answer is read for its usage, and passed on as it is.
            headers={"Accept-Encoding": "identity", **self._authorization},
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_s, sock_read=max(limits.first_byte_s, limits.between_bytes_s)
            ),
            auto_decompress=False,
            raise_for_status=False,
        )

    async def stop(self) -> None:
        """All connections are closed."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def forward(self, request: ForwardRequest, base_url: str) -> AsyncIterator[Answer]:
        """Yield the answer once its head has come; see `Forwarder`."""
        assert self._session is not None
        begin_by_s = asyncio.get_running_loop().time() + self._limits.first_byte_s
        posting = self._session.post(
            base_url + request.path, data=request.body, headers=request.headers, allow_redirects=False
        )
        try:
            async with asyncio.timeout_at(begin_by_s):
                response = await posting
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamFailed("connect", _reason(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamFailed("first_byte", _reason(error)) from error
        try:
            chunks = self._chunks(response, begin_by_s)
            yield Answer(response.status, response.content_type, chunks, response.headers.get("Retry-After", ""))
        finally:
            response.close() if not response.content.at_eof() else response.release()

    async def _chunks(self, response: aiohttp.ClientResponse, begin_by_s: float) -> AsyncIterator[bytes]:
        phase: Phase = "first_byte"
        pause_s = self._limits.between_bytes_s
        try:
            while True:
                async with asyncio.timeout(pause_s) if phase == "body" else asyncio.timeout_at(begin_by_s):
                    chunk = await response.content.readany()
                if not chunk:
                    return
                phase = "body"
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UpstreamFailed(phase, _reason(error)) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection closed before the answer's end"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
