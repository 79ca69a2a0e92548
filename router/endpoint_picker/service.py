"""The endpoint picker's gRPC server: Envoy's external processing, and gRPC's health check.

A stream is one request. It is an `Exchange` of the router like one that came over HTTP, with `_Stream` in the place of
the client's connection: a call that would be forwarded to a worker is told to the gateway, and what the gateway says of
the answer is told to the call's handler. So requests are read, queued, decided, booked and settled by the same code.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from kv_protocol.openai.endpoints import PATHS
from kv_runtime.http.acceptor import PortUsed
from kv_runtime.telemetry import RateLimitedLog
from router.config import PickerSection
from router.endpoint_picker import wire
from router.endpoint_picker.addresses import Addresses, alternatives, endpoint_of
from router.endpoint_picker.messages import AnswerCame, FromGateway, Immediate, Lines, ToGateway
from router.endpoint_picker.metrics import Outcome, PickerStatistics
from router.endpoint_picker.schema import HEALTH, MESSAGES, PROCESSOR
from router.endpoint_picker.stream import (
    Accepted,
    Answered,
    AnswerGoesOn,
    AnswerOver,
    Begin,
    GatewayStream,
    JudgeHead,
    Left,
    OutOfOrder,
    Placed,
    ToRouter,
)
from router.http import refusals
from router.http.credentials import Credentials, ServerTls
from router.http.exchange import Exchange, HeaderLines, OutboundCall, ResponseHandler
from router.http.limits import HttpLimits
from router.http.refusals import Refusal
from router.request.destination import Gateway
from router.request.replies import Replies
from router.request.serving import FleetRequest, Serving

if TYPE_CHECKING:
    from router.http.upstreams import Upstreams

_PATHS = frozenset(PATHS.values())
STREAMS_MAX = 4096
"""Requests of gateways that are read or served: half of what all clients' may be."""
_MESSAGE_BYTES_MORE = 1 << 20
"""Room in a message beside the body: heads and metadata."""
_CLIENT_ERROR = 400
_NOT_OURS = ("authorization", "x-dp-rank", "x-kv-continuable")
"""Headers that a worker gets from the router alone, or not at all."""
_SERVING, _NOT_SERVING = 1, 2
_READY_SERVICES = frozenset({"", "readiness", PROCESSOR})
_log = structlog.get_logger("picker")


class EndpointPicker:
    """The picker of one process. `replies` answers requests that no worker serves, such as `/v1/models`."""

    def __init__(
        self,
        serving: Serving,
        replies: Replies,
        settings: PickerSection,
        limits: HttpLimits,
        credentials: Credentials,
        *,
        shares_port: bool,
        streams_max: int = STREAMS_MAX,
    ) -> None:
        """`credentials` are the data plane's: the certificate, and what signs those of gateways.

        `shares_port`: other processes of the same router bind the port, too.
        """
        self.serving, self.replies, self.settings, self.limits = serving, replies, settings, limits
        self._credentials = credentials
        self.addresses = Addresses(serving.routing.state.fleet)
        self.port = 0
        self._shares_port, self._streams_max = shares_port, streams_max
        self._outcomes = Counter[Outcome]()
        self._streams = self._body_bytes = self._moved = self._failed = 0
        self._refused = RateLimitedLog(_log, serving.routing.clock)
        self._server: grpc.aio.Server

    async def start(self) -> None:
        """Bind the address; requests are taken from now on.

        Raises:
            PortUsed: it cannot be bound.
        """
        options = (
            ("grpc.max_receive_message_length", self.limits.body_bytes_max + _MESSAGE_BYTES_MORE),
            ("grpc.so_reuseport", int(self._shares_port)),
        )
        self._server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(self._process, None, wire.encode)
        check = grpc.unary_unary_rpc_method_handler(
            self._check, MESSAGES["HealthCheckRequest"].FromString, MESSAGES["HealthCheckResponse"].SerializeToString
        )
        handlers = {PROCESSOR: {"Process": process}, HEALTH: {"Check": check}}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, methods) for name, methods in handlers.items()]
        )
        self._bind()
        await self._server.start()

    def _bind(self) -> None:
        settings = self.settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.port}"
        try:
            if self._credentials.tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _server_credentials(self._credentials))
        except RuntimeError as error:
            raise PortUsed(f"picker: {address} cannot be bound: {error}") from error

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then requests on their way may take `data.drain_s`."""
        await stop.wait()
        await self._server.stop(self.limits.drain_s)

    def in_progress(self) -> dict[str, int]:
        """Return what is drained at the stop."""
        return {"picked requests": self._streams}

    def statistics(self) -> PickerStatistics:
        """Return the present figures."""
        return PickerStatistics(self._streams, self._body_bytes, dict(self._outcomes), self._moved, self._failed)

    # ------------------------------------------------------------------------------------------- called by streams

    def account(self, more: int) -> bool:
        """Count `more` bytes of bodies in memory, negative once they are freed; return whether they fit."""
        self._body_bytes += more
        return more <= 0 or self._body_bytes <= self.limits.bodies_bytes_max

    def answered(self, outcome: Outcome) -> None:
        """Count what a gateway was told."""
        self._outcomes[outcome] += 1

    def moved(self) -> None:
        """Count a request that another worker answered."""
        self._moved += 1

    # ------------------------------------------------------------------------------------------- the services

    async def _process(self, _messages: object, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
        if self._streams >= self._streams_max:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._streams_max} streams are open; try again")
        stream = _Stream(self)
        self._streams += 1
        try:
            while not stream.is_answered:
                message = await _next_message(context, stream.pause_max_s())
                if message is grpc.aio.EOF:
                    break
                replies = stream.refuse(_TOO_SLOW) if message is None else await stream.replies(message)
                for reply in replies:
                    await context.write(reply)
        except (OutOfOrder, wire.UnknownMessage) as error:
            self._failed += 1
            self._refused.warning("picker_message_refused", reason=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            self._failed += 1
            _log.exception("picker_stream_failed")
            raise
        finally:
            self._streams -= 1
            stream.close()

    async def _check(self, request: Any, context: Any) -> object:  # noqa: ANN401
        """Answer a health check. Source: the endpoint picker protocol, "Health Check Services"."""
        if request.service == "liveness":
            is_serving = True
        elif request.service in _READY_SERVICES:
            is_serving = self.serving.routing.readiness().ready
        else:
            await context.abort(grpc.StatusCode.NOT_FOUND, "allowed: liveness, readiness, or the processor's name")
        return MESSAGES["HealthCheckResponse"](status=_SERVING if is_serving else _NOT_SERVING)


def _server_credentials(credentials: Credentials) -> Any:  # noqa: ANN401 - grpcio has no types
    """Return what each handshake takes the newest certificate from."""
    known = credentials.tls
    assert known is not None, "a certificate is configured"

    def changed() -> Any:  # noqa: ANN401
        """Return the new certificate; None: it is still the last one. Called in a thread of gRPC."""
        nonlocal known
        last, known = known, credentials.tls
        return None if known is None or known is last else _certificate(known)

    return grpc.dynamic_ssl_server_credentials(_certificate(known), changed, bool(known.client_ca))


def _certificate(tls: ServerTls) -> Any:  # noqa: ANN401
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.client_ca or None)


async def _next_message(context: Any, pause_max_s: float | None) -> Any:  # noqa: ANN401
    """Return the gateway's next message, `EOF` at the end of the stream; None if none comes within `pause_max_s`."""
    if pause_max_s is None:
        message = await context.read()
    else:
        # The read ends with the stream. If it were cancelled, grpcio 1.85 would never free a message that came later.
        reading = asyncio.ensure_future(context.read())
        reading.add_done_callback(_retrieved)
        await asyncio.wait((reading,), timeout=pause_max_s)
        if not reading.done():
            return None
        message = reading.result()
    return message if message is grpc.aio.EOF else wire.decode(message)


def _retrieved(reading: "asyncio.Future[Any]") -> None:
    """Take the error of a read that the stream did not wait for."""
    if not reading.cancelled():
        reading.exception()


class _Stream:
    """One stream, in the place of a client's connection."""

    http_1_1 = True
    writing_paused = False

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker
        self._core = GatewayStream(picker.limits.body_bytes_max)
        self._exchange: Exchange | None = None
        self._request: FleetRequest | None = None
        self._handler: ResponseHandler | None = None
        self._replies: list[ToGateway] = []
        self._spoke = asyncio.Event()
        """The router said what the gateway waits for."""
        self.is_answered = False
        """The gateway gets an answer for its client, after which it sends nothing more: the stream ends."""
        self._is_moving = False
        self._is_told = False
        self._gathered = 0
        self._began_s = perf_counter()

    async def replies(self, message: FromGateway) -> Sequence[ToGateway]:
        """Take a message; return what the gateway is sent, once the router has said it."""
        self._spoke.clear()
        commands = self._core.receive(message)
        self._perform(commands if self._gathers() else self._core.refuse(_TOO_MUCH))
        if self._core.awaits_router:
            await self._spoke.wait()
        return self._taken()

    def pause_max_s(self) -> float | None:
        """Return how long the gateway's next message may take; None: no more of the request is expected."""
        limits, core = self._picker.limits, self._core
        if not core.reads_request:
            return None
        left_s = self._began_s + limits.body_total_s - perf_counter()
        return max(0.0, left_s if core.body_comes_whole else min(limits.body_s, left_s))

    def refuse(self, refusal: Refusal) -> Sequence[ToGateway]:
        """Return what the gateway is sent instead of a decision."""
        self._perform(self._core.refuse(refusal))
        return self._taken()

    def _taken(self) -> Sequence[ToGateway]:
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """The gateway closed the stream, or gave it up."""
        self._perform(self._core.closed())
        self._picker.account(-self._gathered)
        if not self._is_told:
            self._picker.answered("left")

    def _gathers(self) -> bool:
        more, self._gathered = self._core.body_bytes - self._gathered, self._core.body_bytes
        return not more or self._picker.account(more)

    def _perform(self, commands: Sequence[ToGateway | ToRouter]) -> None:
        for command in commands:
            if isinstance(command, ToRouter):
                self._act(command)
                continue
            self._replies.append(command)
            if isinstance(command, Immediate):
                self.is_answered = True
                self._said("refused" if command.status >= _CLIENT_ERROR else "answered")

    def _act(self, command: ToRouter) -> None:
        if isinstance(command, Begin):
            self._begin(command)
        elif isinstance(command, JudgeHead):
            self._judge(command.head)
        elif isinstance(command, Left):
            if self._exchange is not None:
                self._exchange.leave()
        elif self._handler is not None:
            self._answer(self._handler, command)

    # ------------------------------------------------------------------------------------------- the request

    def _begin(self, begin: Begin) -> None:
        picker, head = self._picker, begin.head
        parts = head.method, head.path, head.query, head.headers, begin.body
        exchange = self._exchange = _Placed(self, *parts, self._began_s)
        if head.path not in _PATHS or head.method != "POST":
            picker.replies(exchange)
            return
        allowed = picker.addresses.now().allowed(head.subset)
        gateway = Gateway(allowed, partial(alternatives, count=picker.settings.fallbacks))
        self._request = picker.serving.serve(exchange, gateway=gateway)

    def place(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """The router chose a worker: tell the gateway."""
        self._handler = watcher
        urls = (call.base_url, *call.alternatives)
        destination = ",".join(endpoint for each in urls if (endpoint := endpoint_of(each)) is not None)
        lines = _lines(call.headers)
        named = {name.decode("latin-1").lower() for name, _ in lines}
        removed = tuple(name for name in _NOT_OURS if name not in named)
        body = call.body if isinstance(call.body, bytes) else b"".join(call.body)
        self._said("placed")
        self._perform(self._core.receive(Placed(destination, lines, removed, body, call.token_mark)))
        self._spoke.set()

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """The router answers itself: tell the gateway."""
        self._handler = None
        if self._is_moving:  # the worker that answered is not eligible by now: its answer is passed on all the same
            return
        self._perform(self._core.receive(Answered(status, ((b"content-type", content_type), *headers), body)))
        self._spoke.set()

    def _said(self, outcome: Outcome) -> None:
        if not self._is_told:
            self._is_told = True
            self._picker.answered(outcome)

    @property
    def outward(self) -> "Upstreams":
        """Nothing is sent from here."""
        raise AssertionError("the gateway sends the requests")

    def write(self, data: bytes) -> None:
        """Never called: no stream is resumed."""
        raise AssertionError(f"{len(data)} bytes for a gateway's client")

    def finish(self) -> None:
        """Never called."""

    def cut(self) -> None:
        """Never called."""

    # ------------------------------------------------------------------------------------------- the answer

    def _judge(self, head: AnswerCame) -> None:
        request = self._request
        if head.served and request is not None:
            self._is_moving = True
            worker_id = self._picker.addresses.now().workers.get(head.served)
            if worker_id is not None and request.served_elsewhere(worker_id):
                self._picker.moved()
            self._is_moving = False
        handler = self._handler
        if handler is None:
            self._perform(self._core.receive(Accepted()))
            return
        if head.failure:
            handler.on_failed("connect", head.failure, False)  # noqa: FBT003 - a callback's fact
            return
        lines = handler.on_head(head.status, head.headers)
        if lines is None:
            handler.on_dropped()
        else:
            self._perform(self._core.receive(Accepted(_lines(lines))))

    def _answer(self, handler: ResponseHandler, command: AnswerGoesOn | AnswerOver) -> None:
        if isinstance(command, AnswerOver):
            self._handler = None
            handler.on_end(command.tail, command.later_events)
            if self._exchange is not None:
                self._exchange.close()
        elif command.is_first:
            handler.on_first_byte()
        else:
            handler.on_bytes()


class _Placed(Exchange, eq=False):
    """A request of the endpoint picker: the gateway, not the router, calls the worker."""

    def forward(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Tell the gateway where to send the call; if the stream is closed, call `watcher.on_gone`."""
        if isinstance(self.client, _Stream):
            self.client.place(call, watcher)
        else:
            watcher.on_gone(0)


_TOO_SLOW = refusals.invalid("request: not complete in time", "body", "timeout", 408)
_TOO_MUCH = refusals.unavailable("data.bodies_bytes_max: no room for the body; try again", "overloaded")


def _lines(lines: bytes) -> Lines:
    """Return header lines, each ended by CRLF, as names and values."""
    parted = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return tuple((name, value) for name, _, value in parted)
