"""The endpoint picker's server: its address, TLS, health checks, and a stream that a gateway gives up."""

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kv_runtime.config.loading import ConfigurationError
from kv_runtime.http.acceptor import PortUsed
from router.config.picker import PickerSection
from router.endpoint_picker.messages import Immediate
from router.endpoint_picker.schema import HEALTH, MESSAGES, PROCESSOR
from router.endpoint_picker.service import EndpointPicker
from router.http.limits import HttpLimits
from router.request.endpoints import endpoints
from tests.unit.router.plane import COMPLETIONS, PROMPT, Plane, encoded, running_plane, until
from tests.unit.router.samples import MODEL

SERVING, NOT_SERVING = 1, 2


def picker_of(
    plane: Plane, *, body_s: float = 30.0, body_total_s: float = 300.0, streams_max: int = 9, **settings: Any
) -> EndpointPicker:
    limits = HttpLimits(
        body_bytes_max=1 << 20, bodies_bytes_max=1 << 20, drain_s=0.0, body_s=body_s, body_total_s=body_total_s
    )
    return EndpointPicker(
        plane.serving,
        endpoints(plane.serving),
        PickerSection(port=0, **settings),
        limits,
        shares_port=False,
        streams_max=streams_max,
    )


@asynccontextmanager
async def running(picker: EndpointPicker) -> AsyncIterator[str]:
    """Run a picker; yield its address."""
    stop = asyncio.Event()
    await picker.start()
    serving = asyncio.ensure_future(picker.run(stop))
    try:
        yield f"127.0.0.1:{picker.port}"
    finally:
        stop.set()
        await serving


async def health(channel: Any, service: str) -> int:
    check = channel.unary_unary(
        f"/{HEALTH}/Check",
        MESSAGES["HealthCheckRequest"].SerializeToString,
        MESSAGES["HealthCheckResponse"].FromString,
    )
    status: int = (await check(MESSAGES["HealthCheckRequest"](service=service))).status
    return status


def asked(prompt: list[int]) -> list[Any]:
    """Return the messages of a request whose body is buffered."""
    head, body = MESSAGES["ProcessingRequest"](), MESSAGES["ProcessingRequest"]()
    for name, value in ((":method", "POST"), (":path", COMPLETIONS), (":authority", "gateway")):
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    head.protocol_config.request_body_mode = 2
    body.request_body.body = encoded({"model": MODEL, "prompt": prompt})
    body.request_body.end_of_stream = True
    return [head, body]


def process(channel: Any, messages: AsyncIterator[Any] | None = None) -> Any:
    call = channel.stream_stream(
        f"/{PROCESSOR}/Process",
        MESSAGES["ProcessingRequest"].SerializeToString,
        MESSAGES["ProcessingResponse"].FromString,
    )
    return call(messages)


async def test_health_checks_say_whether_requests_are_taken() -> None:
    async with (
        running_plane() as plane,
        running(picker_of(plane)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert await health(channel, "liveness") == SERVING
        assert await health(channel, "readiness") == NOT_SERVING
        plane.join("w0", "http://127.0.0.1:1")
        for service in ("", "readiness", PROCESSOR):
            assert await health(channel, service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health(channel, "nothing")
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_port_that_is_taken_is_named() -> None:
    async with running_plane() as plane, running(picker_of(plane)) as address:
        port = int(address.rpartition(":")[2])
        other = picker_of(plane)
        other.settings = PickerSection(port=port)
        with pytest.raises(PortUsed, match=f"picker: {address} cannot be bound"):
            await other.start()


async def test_with_a_certificate_clients_speak_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=picker", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *subject]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)  # noqa: ASYNC221
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    async with (
        running_plane() as plane,
        running(picker_of(plane, tls_certificate=str(certificate), tls_key=str(key))) as address,
        grpc.aio.secure_channel(address, credentials) as channel,
    ):
        assert await health(channel, "liveness") == SERVING


async def test_a_certificate_that_is_not_there_is_named() -> None:
    async with running_plane() as plane:
        picker = picker_of(plane, tls_certificate="/nowhere/c.pem", tls_key="/nowhere/k.pem")
        with pytest.raises(ConfigurationError, match=r"picker\.tls_key: .*'/nowhere/k\.pem'"):
            await picker.start()


async def test_a_gateway_that_gives_up_ends_its_lease() -> None:
    async with running_plane() as plane, running(picker_of(plane)) as address:
        plane.join("w0", "http://127.0.0.1:1")
        async with grpc.aio.insecure_channel(address) as channel:
            stream = process(channel)
            head, body = asked(PROMPT)
            await stream.write(head)
            assert (await stream.read()).HasField("request_headers")
            await stream.write(body)
            placed = (await stream.read()).request_body.response.header_mutation.set_headers
            named = {each.header.key: each.header.raw_value for each in placed}
            assert named["x-gateway-destination-endpoint"] == b"127.0.0.1:1"
            assert plane.serving.metrics.inflight == 1
            stream.cancel()
            await until(lambda: plane.serving.metrics.inflight == 0)
        assert plane.outcomes() == {"cancelled": 1}


async def test_a_second_request_on_a_stream_is_refused_and_no_lease_stays() -> None:
    async with running_plane() as plane:
        picker = picker_of(plane)
        plane.join("w0", "http://127.0.0.1:1")
        async with running(picker) as address, grpc.aio.insecure_channel(address) as channel:
            stream = process(channel)
            head, body = asked(PROMPT)
            for message in (head, body):
                await stream.write(message)
                await stream.read()
            assert plane.serving.metrics.inflight == 1
            await stream.write(head)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stream.read()
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            await until(lambda: plane.serving.metrics.inflight == 0)
        assert plane.outcomes() == {"cancelled": 1}
        assert picker.statistics().failed == 1


async def test_messages_that_are_none_are_refused_with_the_reason_and_logged_without_a_traceback() -> None:
    async with running_plane() as plane:
        picker = picker_of(plane)
        with capture_logs() as logged:
            async with running(picker) as address, grpc.aio.insecure_channel(address) as channel:
                for data in (b"", b"\xff"):  # a message of no kind, and no message
                    stream = channel.stream_stream(f"/{PROCESSOR}/Process")()
                    await stream.write(data)
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stream.read()
                    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                    assert "found none of request_headers" in (refused.value.details() or "")
        (line,) = [each for each in logged if each["event"].startswith("picker_")]
        assert (line["event"], line["log_level"]) == ("picker_message_refused", "warning")
        assert picker.statistics().failed == 2


async def test_a_picker_that_is_full_refuses_streams_and_answers_health_checks() -> None:
    async with running_plane() as plane:
        picker = picker_of(plane, streams_max=1)
        plane.join("w0", "http://127.0.0.1:1")
        async with running(picker) as address, grpc.aio.insecure_channel(address) as channel:
            first = process(channel)
            await first.write(asked(PROMPT)[0])
            await first.read()
            assert await process(channel).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await health(channel, "") == SERVING


async def test_bodies_beyond_the_bound_of_all_are_refused_until_there_is_room() -> None:
    async with running_plane() as plane:
        picker = picker_of(plane)
        plane.join("w0", "http://127.0.0.1:1")
        async with running(picker) as address, grpc.aio.insecure_channel(address) as channel:
            streams = [process(channel) for _ in range(3)]
            long = [number % 250 for number in range(85_000)]  # more than a third of the bound, each
            statuses = []
            for stream, message in itertools.product(streams, asked(long)):
                await stream.write(message)
                statuses.append((await stream.read()).immediate_response.status.code)
            assert [status for status in statuses if status] == [503]
            for stream in streams:
                stream.cancel()
            await until(lambda: picker.statistics().streams == 0)
            assert picker.statistics().body_bytes == 0
            assert dict(picker.statistics().outcomes) == {"placed": 2, "refused": 1}


BUFFERED, FULL_DUPLEX = 2, 4


async def replies_to(picker: EndpointPicker, message: Any, *more: Any) -> list[Any]:
    """Return what a gateway is sent that sends these messages and does not end its stream."""

    async def messages() -> AsyncIterator[Any]:
        for each in (message, *more):
            yield each
        await over.wait()

    over = asyncio.Event()
    async with running(picker) as address, grpc.aio.insecure_channel(address) as channel:
        replies = [reply async for reply in process(channel, messages())]
        over.set()
    return replies


@pytest.mark.parametrize(
    ("mode", "limit"),
    [(BUFFERED, {"body_total_s": 0.05}), (FULL_DUPLEX, {"body_total_s": 0.05}), (FULL_DUPLEX, {"body_s": 0.05})],
)
async def test_a_request_that_is_not_completed_in_time_is_refused_and_its_stream_ends(
    mode: int, limit: dict[str, Any]
) -> None:
    async with running_plane() as plane:
        picker, head = picker_of(plane, **limit), asked(PROMPT)[0]
        head.protocol_config.request_body_mode = mode
        plane.join("w0", "http://127.0.0.1:1")
        *_, last = await replies_to(picker, head)
        assert last.immediate_response.status.code == 408
        assert b"not complete in time" in last.immediate_response.body
        assert dict(picker.statistics().outcomes) == {"refused": 1}
        assert (picker.statistics().streams, picker.statistics().failed, plane.serving.metrics.inflight) == (0, 0, 0)


async def test_a_body_that_is_too_large_ends_the_stream_and_frees_its_bytes() -> None:
    async with running_plane() as plane:
        picker = picker_of(plane)
        head, body = asked([7] * 400_000)
        *_, last = await replies_to(picker, head, body)
        assert last.immediate_response.status.code == 413
        assert (picker.statistics().streams, picker.statistics().body_bytes) == (0, 0)


class SilentGateway:
    """A stream's context as grpcio passes it: the head comes, and then nothing."""

    def __init__(self, head: bytes) -> None:
        self.written = list[Any]()
        self.reads: list[asyncio.Future[Any]] = [asyncio.Future(), asyncio.Future()]
        self.reads[0].set_result(head)
        self._next = iter(self.reads)

    async def read(self) -> Any:
        return await next(self._next)

    async def write(self, message: Any) -> None:
        self.written.append(message)


async def test_the_read_that_came_too_late_is_not_cancelled() -> None:
    async with running_plane() as plane:
        picker = picker_of(plane, body_total_s=0.05)
        gateway = SilentGateway(asked(PROMPT)[0].SerializeToString())
        await picker._process(None, gateway)  # noqa: SLF001 - grpcio would call it
        assert isinstance(gateway.written[-1], Immediate)
        assert not any(each.cancelled() for each in gateway.reads)
        gateway.reads[1].cancel()
