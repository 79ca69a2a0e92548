"""Turns the load topic of an SGLang into load reports: a rank publishes a reading at each change, or once a second.

    frames  = "load" | sequence, 8 bytes big-endian | payload, one PUB socket a rank
    payload = msgpack ["LoadStat", running, waiting, KV tokens in use, KV tokens (0: unknown), rank, ...]

The rank is that of the socket. The newest reading of a rank counts; it is announced at most every `REPORT_PERIOD_S`.
Source: sgl-project/sglang 0.5.23, `python/sglang/srt/managers/scheduler_components/load_publisher.py`,
`python/sglang/srt/disaggregation/kv_events.py` (`resolve_load_pub_range`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

import msgspec
import structlog
import zmq
import zmq.asyncio

from kv_protocol.errors import UNDECODABLE
from kv_protocol.load import COUNT_MAX, LoadReport
from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from kv_runtime.telemetry import RateLimitedLog
from worker_agent.load.reports import REPORT_PERIOD_S

_READINGS_WAITING_MAX = 64
_BYTES_MAX = 4096

_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]

_log = structlog.get_logger("load_topic")


class _LoadStat(msgspec.Struct, array_like=True, tag="LoadStat"):
    running: _Count
    waiting: _Count
    tokens: _Count
    tokens_max: _Count


_decode = msgspec.msgpack.Decoder(_LoadStat).decode


class LoadTopic:
    """A part of a process, `run`. `endpoints` are the ranks' sockets; `total_blocks`: where a reading has none."""

    def __init__(
        self,
        endpoints: Mapping[int, str],
        context: zmq.asyncio.Context,
        clock: Clock,
        announce: Callable[[int, LoadReport], Awaitable[None]],
        *,
        instance: str,
        block_size: int,
        total_blocks: int,
    ) -> None:
        self._endpoints, self._context, self._clock = endpoints, context, clock
        self._announce, self._instance = announce, instance
        self._block_size, self._total_blocks = block_size, total_blocks
        self._log = RateLimitedLog(_log, clock)
        self._readings = 0
        self.newest: dict[int, LoadReport] = {}
        """The newest report of each rank."""

    async def run(self, stop: asyncio.Event) -> None:
        """Read and announce until `stop` is set."""
        sockets = {dp_rank: self._connected(endpoint) for dp_rank, endpoint in self._endpoints.items()}
        try:
            while not stop.is_set():
                for dp_rank, socket in sockets.items():
                    if await self._is_read(dp_rank, socket):
                        await self._announce(dp_rank, self.newest[dp_rank])
                await until(stop, self._clock.sleep(REPORT_PERIOD_S))
        finally:
            for socket in sockets.values():
                socket.close()

    def _connected(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, _BYTES_MAX), (zmq.RCVHWM, _READINGS_WAITING_MAX)):
            socket.set(option, value)
        socket.subscribe(b"")
        socket.connect(endpoint)
        return socket

    async def _is_read(self, dp_rank: int, socket: zmq.asyncio.Socket) -> bool:
        """Read what waits; return whether the rank has a new report."""
        before = self._readings
        for _ in range(_READINGS_WAITING_MAX):
            if not await socket.poll(timeout=0):
                break
            try:
                stat = _decode((await socket.recv_multipart())[-1])
            except UNDECODABLE as error:
                self._log.warning("load_reading_refused", rank=dp_rank, reason=str(error))
                continue
            self._readings += 1
            self.newest[dp_rank] = LoadReport(
                instance=self._instance,
                iteration=self._readings,
                running_requests=stat.running,
                waiting_requests=stat.waiting,
                used_blocks=-(-stat.tokens // self._block_size),
                total_blocks=stat.tokens_max // self._block_size or self._total_blocks,
            )
        return self._readings > before
