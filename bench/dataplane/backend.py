"""A process of the data plane bench: two cheap workers, each on a port, with the endpoints that other routers need.

It reads the keys of a request that `load.py` names and answers with prepared bytes. It registers both workers at our
router, with heartbeats and without KV events; to other routers it answers `/health` and the like with success.
"""

import asyncio
import time
from typing import cast

import msgspec

from bench.child import Answer, Role
from bench.dataplane.load import CHUNK, JSON_ANSWER, MODEL, PATH, STREAM_END, STREAM_HEAD, content_length, json_answer
from kv_protocol import fleet, subjects
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, Heartbeat, WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part, until
from kv_runtime.text.loading import load_text
from kv_runtime.text.model import Text

WORKERS = 2
BLOCK_SIZE = 64
_CHAT = f"POST {PATH} ".encode()
"""The start of a chat request; other requests get the health answer."""
_BACKLOG = 4096
_WELL = json_answer(
    b'{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"bench","max_model_len":131072}],'
    b'"status":"ok","model_path":"bench","served_model_name":"bench","tokenizer_path":"bench","is_generation":true,'
    b'"version":"0","tp_size":1,"dp_size":1,"max_total_num_tokens":1048576}'
)


class _ChatRequest(msgspec.Struct, frozen=True, gc=False):
    max_tokens: int = 1
    max_completion_tokens: int = 0
    seed: int = 0
    stream: bool = False


_decode = msgspec.json.Decoder(_ChatRequest).decode


CutStream = tuple[int, int]
"""A stream that the client cut off: the pause between its chunks in ms, and the time in ns since 1970."""


class BackendConnection(asyncio.Protocol):
    """One connection to a worker."""

    def __init__(self, lost: list[CutStream]) -> None:
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._left = 0
        self._pause_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass

    def data_received(self, data: bytes) -> None:
        """Answer every complete request, one after another."""
        self._buffer += data
        while not self._left and self._buffer:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            request_end = end + 4 + (content_length(self._buffer[:end].lower()) or 0)
            if len(self._buffer) < request_end:
                return
            is_chat = self._buffer.startswith(_CHAT)
            body, self._buffer = self._buffer[end + 4 : request_end], self._buffer[request_end:]
            self._answer(_decode(body) if is_chat else None)

    def _answer(self, request: _ChatRequest | None) -> None:
        if request is None:
            self._transport.write(_WELL)
        elif not request.stream:
            self._transport.write(JSON_ANSWER)
        else:
            self._left, self._pause_s = request.max_completion_tokens or request.max_tokens, request.seed / 1000
            self._transport.write(STREAM_HEAD)
            self._write_chunk()

    def _write_chunk(self) -> None:
        self._timer = None
        self._transport.write(CHUNK)
        self._left -= 1
        if not self._left:
            self._transport.write(STREAM_END)
            self.data_received(b"")
        elif not self._is_full:
            self._timer = self._loop.call_later(self._pause_s, self._write_chunk)

    def pause_writing(self) -> None:
        """Stop writing: the client does not read."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Continue: the client reads again."""
        self._is_full = False
        if self._left and self._timer is None:
            self._timer = self._loop.call_later(self._pause_s, self._write_chunk)

    def connection_lost(self, exc: Exception | None) -> None:
        """Record an unfinished stream as cut off by the client."""
        del exc
        if self._timer is not None:
            self._timer.cancel()
        if self._left:
            self._lost.append((round(1000 * self._pause_s), time.time_ns()))
            self._left = 0


class BackendRole(Role):
    """The workers, and the routers that know them. `event_source` is what the workers register."""

    def __init__(self, *, event_source: str = "none") -> None:
        self._event_source = event_source
        self._streams_lost: list[CutStream] = []
        self._servers: list[asyncio.Server] = []
        self._logs: list[EventLog] = []
        self._clock = Clock()

    async def begin(self) -> Answer:
        """Start every worker."""
        loop = asyncio.get_running_loop()
        for _ in range(WORKERS):
            server = await loop.create_server(
                lambda: BackendConnection(self._streams_lost), "127.0.0.1", 0, backlog=_BACKLOG
            )
            self._servers.append(server)
        return {"ports": self._ports()}

    def _ports(self) -> list[int]:
        return [server.sockets[0].getsockname()[1] for server in self._servers]

    def parts(self) -> list[Part]:
        """Return the heartbeats."""
        return [Part("heartbeats", self._beat, 1)]

    async def end(self) -> None:
        """Close the event logs and the workers."""
        for log in self._logs:
            await log.close()
        for server in self._servers:
            server.close()

    async def join(self, url: str, text: str) -> Answer:
        """Register the workers at the router with this event log, and start their heartbeats.

        `text` is the setting `tokens.text` of that router.
        """
        log = await EventLog.connect(url, name="bench-backend")
        for worker in self._registrations(load_text(text)):
            await log.publish(subjects.fleet(MODEL, worker.worker_id), fleet.encode(worker))
        self._logs.append(log)
        return {}

    def _registrations(self, text: Text) -> list[WorkerRegistered]:
        return [
            WorkerRegistered(
                worker_id=f"w{number}",
                instance=f"bench-{number}",
                model=MODEL,
                served_names=(MODEL,),
                base_url=f"http://127.0.0.1:{port}",
                block_size=BLOCK_SIZE,
                hash_scheme=HASH_SCHEME,
                tokenizer_digest=text.tokenizer_digest,
                template_digest=text.template_digest,
                canary=canary(BLOCK_SIZE),
                total_kv_blocks=1 << 16,
                event_source=self._event_source,
            )
            for number, port in enumerate(self._ports())
        ]

    async def _beat(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for log in [each for each in self._logs if each.is_connected]:
                for number in range(WORKERS):
                    heartbeat = Heartbeat(instance=f"bench-{number}", epoch=1, last_seq=0)
                    await log.announce(subjects.heartbeat(MODEL, WorkerRank(f"w{number}", 0)), fleet.encode(heartbeat))
            await until(stop, self._clock.sleep(HEARTBEAT_PERIOD_S))

    async def lost(self) -> Answer:
        """Return the streams that were cut off since the last call."""
        lost, self._streams_lost[:] = self._streams_lost.copy(), []
        return {"lost": lost}
