"""The endpoint picker's gRPC server: Envoy's external processing, and gRPC's health check.

A stream is one request. It is an `Exchange` of the router like one that came over HTTP, with `GatewayStream` in the
place of the client's connection: it sends a call's destination to the gateway instead of a worker, and passes the
gateway's messages about the answer to the call's handler. So the same code reads, queues, decides and settles requests.
"""

import asyncio
from typing import Any

import grpc
import structlog

from kv_runtime.http.acceptor import PortUsed
from kv_runtime.http.hosts import url_of
from kv_runtime.telemetry import RateLimitedLog
from router.config import PickerSection
from router.endpoint_picker import wire
from router.endpoint_picker.addresses import FleetAddresses, addresses_of
from router.endpoint_picker.stream import GatewayStream
from router.endpoint_picker.wire import HEALTH, MESSAGES, PROCESSOR
from router.http.credentials import Credentials, ServerTls
from router.http.plane import HttpPlane
from router.metrics import PickerStatistics
from router.request.serving import Serving

STREAMS_MAX = 4096
"""Requests of gateways that are read or served: half of the default of `queue.inflight_requests_max`."""
_MESSAGE_BYTES_MORE = 1 << 20
"""Room in a message beside the body: heads and metadata."""
_SERVING, _NOT_SERVING = 1, 2
_READY_SERVICES = frozenset({"", "readiness", PROCESSOR})
_log = structlog.get_logger("picker")


class EndpointPicker:
    """The picker of one process."""

    def __init__(self, serving: Serving, plane: HttpPlane, settings: PickerSection, *, shares_port: bool) -> None:
        """`plane` has the limits, the certificates, and the answers to what no worker serves, such as `/v1/models`.

        `shares_port`: other processes of the same router bind the port, too.
        """
        self.serving, self.replies, self.settings, self.limits = serving, plane.service, settings, plane.limits
        self._credentials = plane.credentials
        self._fleet_changes, self._addresses = -1, FleetAddresses({}, is_complete=True)
        self.port = 0
        self._shares_port = shares_port
        self.statistics = PickerStatistics()
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
        process = grpc.stream_stream_rpc_method_handler(
            self._process, None, MESSAGES["ProcessingResponse"].SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, MESSAGES["HealthCheckRequest"].FromString, MESSAGES["HealthCheckResponse"].SerializeToString
        )
        handlers = {PROCESSOR: {"Process": process}, HEALTH: {"Check": check}}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, methods) for name, methods in handlers.items()]
        )
        address = url_of(self.settings.host, self.settings.port).removeprefix("http://")
        try:
            if self._credentials.tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _server_credentials(self._credentials))
        except RuntimeError as error:
            raise PortUsed(f"picker: {address} cannot be bound: {error}") from error
        await self._server.start()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then requests in flight may take `data.drain_s` more."""
        await stop.wait()
        await self._server.stop(self.limits.drain_s)

    def in_progress(self) -> dict[str, int]:
        """Return what is drained at the stop."""
        return {"picked requests": self.statistics.streams}

    # ------------------------------------------------------------------------------------------- called by streams

    def addresses(self) -> FleetAddresses:
        """Return the present endpoints of the fleet's workers."""
        fleet = self.serving.routing.state.fleet
        if self._fleet_changes != fleet.changes:
            self._fleet_changes = fleet.changes
            self._addresses = addresses_of([worker.registration for worker in fleet.workers()])
        return self._addresses

    def account(self, more: int) -> bool:
        """Count `more` bytes of bodies in memory, negative once they are freed; return whether they fit."""
        self.statistics.body_bytes += more
        return more <= 0 or self.statistics.body_bytes <= self.limits.bodies_bytes_max

    # ------------------------------------------------------------------------------------------- the services

    async def _process(self, _messages: object, context: Any) -> None:  # noqa: ANN401 - grpcio has no types
        if self.statistics.streams >= STREAMS_MAX:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAMS_MAX} streams are open; try again")
        stream = GatewayStream(self)
        self.statistics.streams += 1
        try:
            while not stream.is_answered:
                message = await _next_message(context, stream.pause_max_s())
                if message is grpc.aio.EOF:
                    break
                replies = stream.too_slow() if message is None else await stream.replies(*message)
                for reply in replies:
                    await context.write(reply)
        except wire.MessageRefused as error:
            self.statistics.failed += 1
            self._refused.warning("picker_message_refused", reason=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            self.statistics.failed += 1
            _log.exception("picker_stream_failed")
            raise
        finally:
            self.statistics.streams -= 1
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
    """Return credentials that take the newest certificate for each handshake."""
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
