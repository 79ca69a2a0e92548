"""One connection to a worker, which is kept alive and lent to one call at a time.

    opened --> lent --the answer is read completely, and the worker keeps the connection open--> idle --> lent
                    --anything else--> closed
    idle --`worker_idle_s` passed, unexpected bytes, or the worker closed it--> closed

If a connection that was used before ends without a byte of an answer, the worker probably closed it before the request
came: the request is sent again, over a new one, unless it `is_once`.
"""

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from router.http.exchange import Exchange, OutboundCall, ResponseHandler, UpstreamStage
from router.http.heads import Malformed
from router.http.relay import DESERTED, NONE, AnswerRelay

if TYPE_CHECKING:
    from router.http.upstreams import UpstreamOrigin, Upstreams


class WorkerConnection(AnswerRelay):
    """One connection to a worker. It implements `asyncio.Protocol` without deriving from it."""

    __slots__ = ("_upstreams", "deadline", "due_s", "origin")

    deadline: asyncio.Timeout
    """Of the task that opens it."""

    def __init__(
        self,
        upstreams: "Upstreams",
        origin: "UpstreamOrigin",
        exchange: Exchange,
        call: OutboundCall,
        watcher: ResponseHandler,
        since_s: float,
    ) -> None:
        """It is to be opened for this call, which is forwarded since then."""
        super().__init__(upstreams.answers, exchange, call, watcher, since_s)
        exchange.relay = self
        self._upstreams, self.origin = upstreams, origin
        self.due_s = since_s
        """No check of timeouts is needed before this time; 0: it was lent, or became idle, since the last check."""
        self.is_fresh = self.is_odd = True
        self.paused = exchange.client is not None and exchange.client.writing_paused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established: send the call, unless it was given up meanwhile, or came too late."""
        opened = cast("asyncio.Transport", transport)
        exchange, call, upstreams, self.dial = self.exchange, self.call, self._upstreams, None
        if exchange is None or self.deadline.expired():
            opened.abort()
            return
        self.deadline.reschedule(None)  # uvloop tells of no connection's end that it closes as its task is cancelled
        self.deadline = NONE
        self.transport = opened
        upstreams.opened += 1
        upstreams.connections.add(self)
        self.is_open = True
        try:
            self.transport.writelines(self.origin.writer.request(call.method, call.path, call.headers, call.body))
            if self.paused:
                self.transport.pause_reading()
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandon`
            self.abandon(exchange)

    def not_opened(self, stage: UpstreamStage, reason: str) -> None:
        """The connection could not be opened."""
        exchange, self.dial = self.exchange, None
        if exchange is not None:
            self._step(exchange, self.fail, stage, reason)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the worker."""
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()
            return
        try:
            self.receive(exchange, data)
        except Malformed as error:
            self._step(exchange, self.fail, "first_byte" if self.body is None else "body", str(error))
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandon`
            self.abandon(exchange)

    def _step(self, exchange: Exchange, step: Callable[..., None], *arguments: object, **options: object) -> None:
        """Take a step of the call."""
        try:
            step(*arguments, **options)
        except Exception:  # noqa: BLE001 - a fault of the router: see `abandon`
            self.abandon(exchange)

    def pause_writing(self) -> None:
        """The worker reads slowly. Nothing has to be held back: a request is written once, when it is complete."""

    def resume_writing(self) -> None:
        """The worker reads again."""

    def eof_received(self) -> None:
        """The worker sends no more; asyncio then closes both directions."""
        self._ended(clean=True)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is lost either way
        """The connection is closed."""
        if not self.is_open:  # its call is given up, or fails as not opened
            return
        self.origin.idle.pop(self, None)
        self._upstreams.connections.discard(self)
        self._ended(clean=False)
        self.due_s = math.inf

    def _ended(self, *, clean: bool) -> None:
        exchange, body = self.exchange, self.body
        if exchange is None:
            return
        if body is None and not (self.is_fresh or self.has_part or self.call.is_once):
            call, watcher = self.call, self.watcher
            self.exchange, self.call, self.watcher = None, NONE, NONE
            since_s = self.since_s if self.due_s else 0.0
            self._step(exchange, self._upstreams.dial, self.origin, exchange, call, watcher, since_s)
        elif clean and body is not None and body.until_close and self.form != DESERTED:
            self._step(exchange, self.end, exchange, body, extra=True)
        else:
            self._step(exchange, self.fail, self.stage, "the connection closed before the answer's end")

    def check_timeouts(self, now_s: float) -> None:
        """Check the timeouts of the call, or how long the connection is idle."""
        if not self.due_s:
            self.since_s = now_s
        exchange, self.due_s = self.exchange, now_s
        if exchange is not None:
            self._step(exchange, self.check_call, exchange, now_s)
            return
        self.due_s = self.since_s + self._upstreams.limits.worker_idle_s
        if now_s > self.due_s:
            self.transport.abort()
