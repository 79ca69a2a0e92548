"""The real HTTP plane on a port that the system chose, with a service that records what it is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec

from kv_runtime.files import OpenFiles
from router.http.client import ClientConnection
from router.http.credentials import Credentials
from router.http.exchange import CallLimits, Exchange, OutboundCall, UpstreamStage
from router.http.heads import Headers
from router.http.limits import HttpLimits
from router.http.plane import HttpPlane
from router.http.sites import Sites
from router.http.stream_replay import StreamReplayBuffer
from router.native import built
from tests.system.integration.broker import WAIT_S
from tests.unit.router.upstream import Exchange as UpstreamExchange
from tests.unit.router.upstream import Script, Upstream, completion

OURS = b"x-decision-id: d1\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(completion()) + completion()
LIMITS = CallLimits(first_byte_s=30.0, between_bytes_s=30.0, total_s=60.0)
MANY_FILES = OpenFiles(used=20, allowed=1 << 20)


class Recorded:
    """A watcher that writes down what it hears, and does what the plane's service would."""

    def __init__(self, http: "Http", exchange: Exchange, tries: int) -> None:
        self.http, self.exchange, self.tries = http, exchange, tries
        self.heard: list[str] = []
        self.tail, self.later_events = b"", 0
        self.retry_after = b""

    def on_head(self, status: int, headers: Headers, is_stream: bool) -> bytes | None:  # noqa: ARG002
        self.heard.append(f"head {status}")
        self.retry_after = headers.get(b"retry-after", b"")
        return None if status in self.http.unwanted else OURS

    def on_dropped(self) -> None:
        self.heard.append("dropped")
        self.exchange.answer(503, b"{}")

    def on_first_byte(self) -> None:
        self.heard.append("first byte")

    def on_bytes(self) -> None:
        if self.heard[-1] != "bytes":
            self.heard.append("bytes")

    def on_end(self, tail: bytes, later_events: int) -> None:
        self.heard.append("end")
        self.tail, self.later_events = tail, later_events

    def reason_to_stop(self, quiet_s: float, begun: bool) -> str:  # noqa: ARG002
        return ""

    def on_cut(self, phase: UpstreamStage, reason: str) -> bytes | None:
        self.heard.append(f"cut {phase}: {reason}")
        answer = self.http.at_cut.pop(0) if self.http.at_cut else None
        if answer == b"":
            self.http.forward(self.exchange, self.tries)
        return answer

    def on_failed(self, phase: UpstreamStage, reason: str, begun: bool) -> None:
        self.heard.append(f"failed {phase}{' begun' if begun else ''}: {reason}")
        if begun:
            return
        if self.tries:
            self.http.forward(self.exchange, self.tries - 1)
        else:
            self.exchange.answer(502, b"{}")

    def on_gone(self, later_events: int) -> None:  # noqa: ARG002 - of no interest here
        self.heard.append("gone")
        self.http.gone.append(self.exchange)


class Http:
    """The plane, and what its service did. `GET` is answered with what was asked for; all else is forwarded."""

    def __init__(
        self,
        files: OpenFiles = MANY_FILES,
        sites: Sites | None = None,
        credentials: Credentials | None = None,
        **limits: Any,
    ) -> None:
        limits = {"sweep_s": 0.02, "drain_s": 5.0, "drain_idle_s": 0.0} | limits
        self.plane = HttpPlane(
            self.serve,
            HttpLimits(**limits),
            posts={"/v1/completions": self.serve},
            sites=sites,
            credentials=credentials,
            files=lambda: files,
        )
        self.stop = asyncio.Event()
        self.worker = ""
        self.call_limits = LIMITS
        self.tries = 0
        self.unwanted: set[int] = set()
        self.kept_bytes: int | None = None
        """How much is kept of each stream; None: streams are not kept."""
        self.kept: list[StreamReplayBuffer] = []
        self.is_engines = False
        """Whether the workers are attached engines that tell ids."""
        self.is_once = False
        self.at_cut: list[bytes | None] = []
        """What follows each stream in turn that is cut; nothing: the call is sent again."""
        self.watchers: list[Recorded] = []
        self.exchanges: list[Exchange] = []
        self.gone: list[Exchange] = []
        self.hold = False
        """Whether requests are left unanswered, for the test to answer."""
        self._writers: list[asyncio.StreamWriter] = []

    def serve(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        exchange.when_gone = lambda _: self.gone.append(exchange)
        if exchange.path == "/fault":
            raise ValueError("planted")
        if self.hold:
            return
        if exchange.method in {"GET", "HEAD"}:
            exchange.answer(200, f"{exchange.path}?{exchange.query}".encode(), content_type=b"text/plain")
        else:
            self.forward(exchange, self.tries)

    def forward(self, exchange: Exchange, tries: int = 0) -> None:
        watcher = Recorded(self, exchange, tries)
        self.watchers.append(watcher)
        headers = b"content-type: application/json\r\n"
        kept = None
        if self.kept_bytes is not None:
            kept = StreamReplayBuffer(kept=built.KeptEvents(self.kept_bytes), is_engines=self.is_engines)
            self.kept.append(kept)
        exchange.when_gone = watcher.on_gone
        call = OutboundCall(self.worker, exchange.path, headers, (exchange.body,), self.call_limits, kept, self.is_once)
        exchange.forward(call, watcher)

    @property
    def watcher(self) -> Recorded:
        (watcher,) = self.watchers
        return watcher

    def client(self) -> ClientConnection:
        """Return the only connection."""
        (client,) = self.plane.connections
        return client

    async def dial(self, data: bytes = b"", **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send these bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.plane.port, **options)
        self._writers.append(writer)
        if data:
            writer.write(data)
        return reader, writer

    async def ask(self, data: bytes, **options: Any) -> "Answered":
        """Return the first answer to these bytes, on a connection of their own."""
        reader, _ = await self.dial(data, **options)
        return await answered(reader)

    async def said(self, data: bytes) -> bytes:
        """Return all that the plane says to these bytes, until it closes the connection."""
        reader, _ = await self.dial(data)
        return await reader.read()

    async def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def in_two(more: asyncio.Event, first: bytes, rest: bytes) -> Script:
    """Send the one at once, and the other when there may be more."""

    async def script(exchange: UpstreamExchange) -> None:
        await exchange.send(first)
        await more.wait()
        await exchange.send(rest)

    return script


class Answered(NamedTuple):
    """An answer as the client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = msgspec.json.decode(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


async def answered(reader: asyncio.StreamReader, *, bodyless: bool = False) -> Answered:
    """Read one answer, whatever its framing."""
    status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert status_line.startswith("HTTP/1.1 ")
    if bodyless:
        body = b""
    elif "content-length" in headers:
        assert "transfer-encoding" not in headers
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
    else:
        body = await reader.read()
    return Answered(int(status_line.split(" ")[1]), headers, body)


def post(body: bytes = b'{"model":"m"}', path: str = "/v1/completions", headers: bytes = b"") -> bytes:
    """Return a request's bytes."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


def get(path: str = "/health", headers: bytes = b"", method: str = "GET") -> bytes:
    """Return a request's bytes."""
    return f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n".encode() + headers + b"\r\n"


async def until(holds: Callable[[], bool]) -> None:
    """Let other tasks run until something holds; fail where it does not come to hold."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not holds():  # noqa: ASYNC110 - sums have no event
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_S} s: {holds}") from None


@contextlib.asynccontextmanager
async def running(
    files: OpenFiles = MANY_FILES, sites: Sites | None = None, credentials: Credentials | None = None, **limits: Any
) -> AsyncIterator[Http]:
    """Run a plane; when it is over nothing of it may be left."""
    http = Http(files, sites, credentials, **limits)
    await http.plane.start("127.0.0.1", 0)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(http.plane.run(http.stop))
        try:
            yield http
        finally:
            await http.hang_up()
            http.stop.set()
            await serving
    assert_nothing_is_left(http.plane)


def dialing(plane: HttpPlane) -> int:
    """Return how many connections to workers are being opened."""
    return len(plane.upstreams.dials or ())


@contextlib.asynccontextmanager
async def with_worker(
    script: Script, files: OpenFiles = MANY_FILES, **options: Any
) -> AsyncIterator[tuple[Http, Upstream]]:
    """Run a plane before a worker that does what the script says."""
    async with Upstream(script) as worker, running(files, **options) as http:
        http.worker = worker.base_url
        yield http, worker


def assert_nothing_is_left(plane: HttpPlane) -> None:
    """No connection, request or dial."""
    assert (len(plane.connections), plane.inflight) == (0, 0)
    assert (len(plane.upstreams.connections), plane.upstreams.idle, dialing(plane)) == (0, 0, 0)
