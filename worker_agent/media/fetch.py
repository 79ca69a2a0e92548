"""Fetches media from URLs: each host is resolved once, all its addresses are checked, and only they are connected to.

target      checked as text (`urls.py`)
resolved    once; every address must be allowed; only they are connected to, so that a changed DNS answer has no effect
request     GET without credentials, cookies, proxies of the environment; `Accept-Encoding: identity`
redirect    checked like the first target; a bounded number
body        read up to the allowed size, whatever Content-Length is; an encoded body is refused
reading     in turns with other tasks; what comes on the wire is bounded, too (`pace`)
timeout     for all of it together
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

import aiohttp
from aiohttp import hdrs
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from kv_runtime.http.answers import bounded_body
from worker_agent.media.config import MediaSection
from worker_agent.media.refusals import MediaRefused, shown_url
from worker_agent.media.urls import Address, checked_addresses, http_target, redirected

Resolve = Callable[[str], Awaitable[list[Address]]]
FETCH_S = 10.0
"""Longest time for one of a request's media, redirects included: clients wait for their first token meanwhile."""
REDIRECTS_MAX = 3
"""As many as object stores and short links take; each is checked anew."""
_OK = 200
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {hdrs.ACCEPT_ENCODING: "identity", hdrs.USER_AGENT: "kv-router"}
_CHUNK_BYTES = 64 << 10
_LINE_BYTES_MAX = 8190


class MediaFetch:
    """Fetches media for requests. `resolve` returns all addresses of a name; it raises OSError if it finds none."""

    def __init__(self, rules: MediaSection, *, fetch_s: float = FETCH_S, resolve: Resolve | None = None) -> None:
        self._rules, self._fetch_s = rules, fetch_s
        self._resolve = resolve or system_addresses

    async def get(self, url: str, field: str, bytes_max: int) -> tuple[bytes, str | None]:
        """Return the content of `url`, 1 to `bytes_max` bytes, and its declared type or None; raise `MediaRefused`."""
        target = http_target(url, field, self._rules)
        try:
            async with asyncio.timeout(self._fetch_s):
                for _ in range(REDIRECTS_MAX + 1):
                    answer = await self._ask(target, field, bytes_max)
                    if not isinstance(answer, URL):
                        return answer
                    target = answer
        except TimeoutError as error:
            raise MediaRefused(
                "timeout", field, shown_url(str(target)), f"a whole answer within {self._fetch_s} s"
            ) from error
        raise MediaRefused("redirect_count", field, shown_url(url), f"at most {REDIRECTS_MAX} redirects")

    async def _ask(self, target: URL, field: str, bytes_max: int) -> tuple[bytes, str | None] | URL:
        addresses = checked_addresses(await self._addresses(target, field), target, field, self._rules)
        try:
            async with (
                _session(addresses, bytes_max) as session,
                session.get(target, allow_redirects=False) as response,
            ):
                if response.status in _REDIRECTS:
                    return redirected(target, response.headers.get(hdrs.LOCATION), field, self._rules)
                return await _body(response, target, field, bytes_max)
        except aiohttp.ClientPayloadError:
            raise MediaRefused("incomplete", field, shown_url(str(target)), "a whole body") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The texts of these errors have the complete URL: they must be neither shown nor chained.
            found = f"{shown_url(str(target))} ({type(error).__name__})"
            raise MediaRefused("unreachable", field, found, "a server that answers") from None

    async def _addresses(self, target: URL, field: str) -> list[Address]:
        host = target.raw_host or ""
        with suppress(ValueError):
            return [ip_address(host)]
        try:
            return await self._resolve(host)
        except (OSError, UnicodeError) as error:
            allowed = "a host that has an address"
            raise MediaRefused("address_unresolved", field, shown_url(str(target)), allowed) from error


async def system_addresses(host: str) -> list[Address]:
    """Return the addresses of `host` from the system's resolver; raise OSError if it knows none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(address[0]) for *_, address in found))


async def _body(response: aiohttp.ClientResponse, target: URL, field: str, bytes_max: int) -> tuple[bytes, str | None]:
    if response.status != _OK:
        raise MediaRefused("status", field, f"{response.status} from {shown_url(str(target))}", f"{_OK}, or a redirect")
    encoding = response.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if encoding != "identity":
        allowed = "a body as it is: a few bytes may unpack to any number"
        raise MediaRefused("encoding", field, encoding, allowed)
    allowed = f"at most {bytes_max} bytes"
    if response.content_length is not None and response.content_length > bytes_max:
        raise MediaRefused("too_large", field, f"{response.content_length} bytes, by Content-Length", allowed)
    data = await bounded_body(response, bytes_max)
    if data is None:
        raise MediaRefused("too_large", field, f"more than {bytes_max} bytes", allowed)
    if not data:
        raise MediaRefused("content", field, "0 bytes", f"1..{bytes_max} bytes")
    return data, response.headers.get(hdrs.CONTENT_TYPE)


def _session(addresses: tuple[Address, ...], bytes_max: int) -> aiohttp.ClientSession:
    """Return a session for one request, which connects only to `addresses` and reads `bytes_max` bytes at most."""
    connector = aiohttp.TCPConnector(
        resolver=_Checked(addresses),
        use_dns_cache=False,
        force_close=True,
        limit=1,
    )
    pace(connector, bytes_max)
    return aiohttp.ClientSession(
        connector=connector,
        headers=_HEADERS,
        auto_decompress=False,
        trust_env=False,
        timeout=aiohttp.ClientTimeout(),
        max_line_size=_LINE_BYTES_MAX,
        max_field_size=_LINE_BYTES_MAX,
        read_bufsize=_CHUNK_BYTES,
    )


class _Checked(AbstractResolver):
    """A resolver that returns the checked addresses for every name."""

    def __init__(self, addresses: tuple[Address, ...]) -> None:
        self._addresses = addresses

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=str(address), port=port, family=family, proto=0, flags=0)
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


INTERIM_MAX = 16
CODING_FACTOR = 8
_HEAD_BYTES_MAX = 64 << 10
_INTERIM = range(100, 200)


class _PacedAnswer(ResponseHandler):
    """The protocol of one answer, whose body has at most `bytes_max` bytes; the loop serves others between two reads.

    The connection is aborted after more than `INTERIM_MAX` interim answers (1xx), or more than `CODING_FACTOR` bytes on
    the wire for each allowed byte of the body: chunked coding adds some.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int) -> None:
        super().__init__(loop)
        self._turns, self._interim_left = loop, INTERIM_MAX
        self._bytes_left = _HEAD_BYTES_MAX + CODING_FACTOR * bytes_max

    def data_received(self, data: bytes) -> None:
        """Take bytes, unless there are too many; then let the loop turn once."""
        transport = self.transport
        self._bytes_left -= len(data)
        if transport is not None and (self._bytes_left < 0 or self._interim_left < 0):
            transport.abort()
            return
        super().data_received(data)
        if transport is not None and not transport.is_closing() and transport.is_reading():
            transport.pause_reading()
            self._turns.call_soon(_resume, transport)

    def feed_data(self, data: Any, size: int = 0) -> None:  # noqa: ANN401 - as the base class has it
        """Take an answer of the server, unless it is an interim answer too many."""
        self._interim_left -= data[0].code in _INTERIM
        if self._interim_left >= 0:
            super().feed_data(data, size)
        elif self.transport is not None:
            self.transport.abort()


def _resume(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()


def pace(connector: aiohttp.TCPConnector, bytes_max: int) -> None:
    """Make the connector read by `_PacedAnswer`; raise `AttributeError` if this aiohttp has no such factory."""
    made = connector._factory  # noqa: SLF001 - the library has no other place for it
    connector._factory = partial(_PacedAnswer, bytes_max=bytes_max, **made.keywords)  # type: ignore[assignment]  # noqa: SLF001
