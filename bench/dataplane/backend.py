"""A process of the data plane bench: two cheap workers, each a port; and what any router wants of workers besides.

It reads of a request what `dataplane_wire` says and answers from ready bytes. To a router of ours it registers both,
with heartbeats and no KV events; to others it says on `/health` and the like that all is well.
"""

import asyncio
import time
from typing import NamedTuple, cast

import msgspec

from bench.dataplane.wire import CHUNK, JSON_ANSWER, MODEL, PATH, STREAM_END, STREAM_HEAD, json_answer
from bench.events.child import Answer, Commands, serve
from kv_protocol import fleet, subjects
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, Heartbeat, WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part, TaskSet, until
from kv_runtime.text import load_text

WORKERS = 2
BLOCK_SIZE = 64
_ROUTERS_MAX = 16
_CHAT = f"POST {PATH} ".encode()
"""Begins a request for an answer; a router may ask for other things below the same path."""
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


class Lost(NamedTuple):
    """A stream that the other side cut off: when, in ns since 1970, and the pause between its chunks."""

    at_ns: int
    pause_ms: int


class Worker(asyncio.Protocol):
    """One connection to a worker."""

    def __init__(self, lost: list[Lost]) -> None:
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._left = 0
        self._pause_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass

    def data_received(self, data: bytes) -> None:
        """Answer every whole request, one behind the other."""
        self._buffer += data
        while not self._left and self._buffer:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _length(self._buffer[:end])
            request_end = end + 4 + length
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
            self._go_on()

    def _go_on(self) -> None:
        later = (
            self._loop.call_later(self._pause_s, self._write_chunk)
            if self._pause_s
            else self._loop.call_soon(self._write_chunk)
        )
        self._timer = later

    def pause_writing(self) -> None:
        """The other side does not read: tell nothing more."""
        self._is_full = True

    def resume_writing(self) -> None:
        """It reads again."""
        self._is_full = False
        if self._left and self._timer is None:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """What is left of a stream was cut off by the other side."""
        del exc
        if self._timer is not None:
            self._timer.cancel()
        if self._left:
            self._lost.append(Lost(time.time_ns(), round(1000 * self._pause_s)))
            self._left = 0


def _length(head: bytes) -> int:
    _, found, behind = head.lower().partition(b"content-length:")
    return int(behind.split(b"\r\n", 1)[0]) if found else 0


class BackendRole:
    """The workers, and who was told of them."""

    def __init__(self) -> None:
        self._streams_lost: list[Lost] = []
        self._servers: list[asyncio.Server] = []
        self._logs: list[EventLog] = []
        self._clock = SystemClock()
        self._joined: asyncio.Queue[EventLog] = asyncio.Queue(_ROUTERS_MAX)

    @property
    def commands(self) -> Commands:
        """What it can be asked, by name."""
        return {"join": self._join, "lost": self._lost}

    async def begin(self) -> Answer:
        """Every worker listens."""
        loop = asyncio.get_running_loop()
        for _ in range(WORKERS):
            server = await loop.create_server(lambda: Worker(self._streams_lost), "127.0.0.1", 0, backlog=_BACKLOG)
            self._servers.append(server)
        return {"ports": self._ports()}

    def _ports(self) -> list[int]:
        return [server.sockets[0].getsockname()[1] for server in self._servers]

    def parts(self) -> list[Part]:
        """Return the heartbeats."""
        return [Part("heartbeats", self._beat, 1)]

    async def end(self) -> None:
        """Nobody is told any more."""
        for log in self._logs:
            await log.close()
        for server in self._servers:
            server.close()

    async def _join(self, url: str) -> Answer:
        """The router with this event log knows of the workers, and goes on hearing of them."""
        log = await EventLog.connect(url, name="bench-backend")
        self._logs.append(log)
        for worker in self._registrations():
            await log.publish(subjects.fleet(MODEL, worker.worker_id), fleet.encode(worker))
        self._joined.put_nowait(log)
        return {}

    def _registrations(self) -> list[WorkerRegistered]:
        text = load_text("byte")
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
                event_source="none",
            )
            for number, port in enumerate(self._ports())
        ]

    async def _beat(self, stop: asyncio.Event) -> None:
        async with TaskSet(_ROUTERS_MAX) as beating:
            while (log := await until(stop, self._joined.get())) is not None:
                beating.spawn(self._beat_to(log, stop))

    async def _beat_to(self, log: EventLog, stop: asyncio.Event) -> None:
        ranks = [(WorkerRank(worker.worker_id, 0), worker.instance) for worker in self._registrations()]
        while not stop.is_set() and log.is_connected:
            for rank, instance in ranks:
                heartbeat = Heartbeat(instance=instance, epoch=1, last_seq=0)
                await log.announce(subjects.heartbeat(MODEL, rank), fleet.encode(heartbeat))
            await until(stop, self._clock.sleep(HEARTBEAT_PERIOD_S))

    async def _lost(self, pause_ms: int) -> Answer:
        """Return when streams with this pause were cut off, since it was asked last."""
        lost, self._streams_lost[:] = self._streams_lost.copy(), []
        return {"lost_ns": [each.at_ns for each in lost if each.pause_ms == pause_ms]}


if __name__ == "__main__":
    serve(BackendRole)
