"""The users of a soak: each has a connection to the router and one request at a time, over and over."""

import asyncio
import time
from collections import Counter
from typing import Literal, cast

from bench.soak.answers import AS_DUE, AnswerInvalid, AnswerOutcome, AnswerReader, Tally, judged, judged_when_left
from bench.soak.requests import SoakRequest, User

_HOST = "127.0.0.1"
_REOPEN_S = 0.05
_DETAIL_BYTES = 300

End = Literal["complete", "cut", "left", "invalid"]


class SoakConnection(asyncio.Protocol):
    """One connection; `send` a request, and await how its answer ended. `was_hit`: see `Tally`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[End] | None = None
        self._leaves_after = 0
        self.answer = AnswerReader()
        self._killed: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def worker(self) -> str:
        """Return the worker whose answer is on its way here; empty where there is none."""
        return "" if self._ended is None else self.answer.header(b"x-worker-instance-id").decode()

    @property
    def was_hit(self) -> bool:
        """Whether the last answer's worker was killed while it was on its way. See `hit`."""
        return self.answer.header(b"x-worker-instance-id").decode() in self._killed

    def hit(self, worker: str) -> None:
        """Note that the worker is killed now. The head of its answer may still be on its way from the router."""
        if self._ended is not None:
            self._killed.add(worker)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass

    def send(self, request: SoakRequest) -> "asyncio.Future[End]":
        """Send a request; the one before has ended."""
        assert self._transport is not None
        self.answer, self._leaves_after = AnswerReader(), request.leaves_after
        self._killed.clear()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request.data)
        return self._ended

    def data_received(self, data: bytes) -> None:
        """Read the answer; bytes without a pending request close the connection."""
        if self._ended is None:
            self.close()
            return
        try:
            is_complete = self.answer.feed(data)
        except AnswerInvalid:
            self._end("invalid")
            self.close()
            return
        if is_complete:
            if self.answer.header(b"connection") == b"close":
                self.close()
            self._end("complete")
        elif self._leaves_after and self.answer.events >= self._leaves_after:
            self._end("left")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a pending answer as cut."""
        del exc
        self._end("cut")

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, end: End) -> None:
        ended, self._ended = self._ended, None
        if ended is not None and not ended.done():
            ended.set_result(end)


class Clients:
    """All users; `port` is the router's."""

    def __init__(self, port: int, *, users: int, seed: int, patience_s: float) -> None:
        self._port, self._patience_s = port, patience_s
        self._users = [User(seed, number) for number in range(users)]
        self._connections = [SoakConnection() for _ in range(users)]
        self._left, self._begun = 0, 0
        self._milestone: tuple[int, asyncio.Event] | None = None
        self.tally = Tally()

    @property
    def begun(self) -> int:
        """Return how many requests have begun."""
        return self._begun

    @property
    def open_connections(self) -> int:
        """Return how many connections are open."""
        return sum(connection.is_open for connection in self._connections)

    async def send(self, requests: int) -> None:
        """Send so many requests; return when all have ended."""
        self._left = requests
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._users)):
                group.create_task(self._go(number))
        if self._milestone is not None:
            self._milestone[1].set()

    async def until_begun(self, requests: int) -> None:
        """Return when so many requests have begun since the start, or no more will; one may wait at a time."""
        if self._begun < requests:
            self._milestone = requests, asyncio.Event()
            await self._milestone[1].wait()
            self._milestone = None

    def answers_by_worker(self) -> Counter[str]:
        """Return how many answers of each worker are on their way."""
        return Counter(worker for each in self._connections if (worker := each.worker))

    def hit(self, worker: str) -> None:
        """Mark the pending answers of a worker that is killed now."""
        for connection in self._connections:
            connection.hit(worker)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()

    async def _go(self, number: int) -> None:
        while self._left > 0:
            self._left -= 1
            self._begun += 1
            if self._milestone is not None and self._begun >= self._milestone[0]:
                self._milestone[1].set()
            connection = self._connections[number]
            if not connection.is_open:
                connection = self._connections[number] = await self._open()
            await self._send_one(connection, self._users[number].next())

    async def _open(self) -> SoakConnection:
        async with asyncio.timeout(self._patience_s):
            while True:
                try:
                    _, connection = await asyncio.get_running_loop().create_connection(
                        SoakConnection, _HOST, self._port
                    )
                except OSError:
                    await asyncio.sleep(_REOPEN_S)
                else:
                    return connection

    async def _send_one(self, connection: SoakConnection, request: SoakRequest) -> None:
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._patience_s):
                end = await connection.send(request)
        except TimeoutError:
            outcome = AnswerOutcome.HUNG
            connection.close()
        else:
            outcome = _outcome(request, connection.answer, end)
        self.tally.add(
            request.kind,
            outcome,
            tokens=request.tokens * request.kind.choices,
            took_s=time.perf_counter() - began_s,
            was_hit=connection.was_hit,
            detail="" if outcome in AS_DUE else _detail(connection.answer, request),
        )


def _outcome(request: SoakRequest, answer: AnswerReader, end: End) -> AnswerOutcome:
    match end:
        case "complete":
            return judged(request, answer)
        case "left":
            return judged_when_left(request, answer)
        case "cut":
            return AnswerOutcome.CUT
        case "invalid":
            return AnswerOutcome.WRONG


def _detail(answer: AnswerReader, request: SoakRequest) -> str:
    head, payload = answer.head[:_DETAIL_BYTES], bytes(answer.payload[-_DETAIL_BYTES:])
    return f"{head!r} ... {payload!r}, expected {request.status} {[text[-64:] for text in request.texts]}"
