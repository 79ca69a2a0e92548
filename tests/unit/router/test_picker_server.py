"""The endpoint picker's server: its address, TLS, health checks, and a stream that a gateway gives up."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kv_runtime.http.acceptor import PortUsed
from router.config import PickerSection
from router.endpoint_picker.service import EndpointPicker
from router.endpoint_picker.wire import HEALTH, MESSAGES, PROCESSOR
from router.http.credentials import Credentials
from router.http.limits import HttpLimits
from router.http.plane import HttpPlane
from router.request.endpoints import endpoints
from tests.support.certificates import self_signed
from tests.unit.router.plane import COMPLETIONS, PROMPT, Plane, encoded, until
from tests.unit.router.samples import MODEL

SERVING, NOT_SERVING = 1, 2


def picker_of(plane: Plane, credentials: Credentials | None = None, **limits: float) -> EndpointPicker:
    bounds: dict[str, Any] = {"body_bytes_max": 1 << 20, "bodies_bytes_max": 1 << 20, "drain_s": 0.0, **limits}
    http = HttpPlane(endpoints(plane.serving), HttpLimits(**bounds), credentials=credentials)
    return EndpointPicker(plane.serving, http, PickerSection(port=0), shares_port=False)


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
        f"/{HEALTH}/Check", MESSAGES["HealthCheckRequest"].SerializeToString, MESSAGES["HealthCheckResponse"].FromString
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


async def test_health_checks_say_whether_requests_are_taken(plane: Plane) -> None:
    async with running(picker_of(plane)) as address, grpc.aio.insecure_channel(address) as channel:
        assert await health(channel, "liveness") == SERVING
        assert await health(channel, "readiness") == NOT_SERVING
        plane.join("w0", "http://127.0.0.1:1")
        for service in ("", "readiness", PROCESSOR):
            assert await health(channel, service) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health(channel, "nothing")
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_port_that_is_taken_is_named(plane: Plane) -> None:
    async with running(picker_of(plane)) as address:
        port = int(address.rpartition(":")[2])
        other = picker_of(plane)
        other.settings = PickerSection(port=port)
        with pytest.raises(PortUsed, match=f"picker: {address} cannot be bound"):
            await other.start()


async def is_served(address: str, certificate: str, own: tuple[str, str] | None = None) -> bool:
    """Return whether a new connection that trusts this certificate, and shows its own, is served."""
    chain, key = (None, None) if own is None else map(read, own)
    trusting = grpc.ssl_channel_credentials(read(certificate), key, chain)
    async with grpc.aio.secure_channel(address, trusting) as channel:
        try:
            await health(channel, "liveness")
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


def read(file: str) -> bytes:
    return Path(file).read_bytes()


async def test_a_new_certificate_counts_for_new_connections_and_ends_none(plane: Plane, tmp_path: Path) -> None:
    (certificate, key), (newer, newer_key) = self_signed(tmp_path, "first"), self_signed(tmp_path, "second")
    first, second = tmp_path / "served.pem", tmp_path / "served.key"
    first.write_bytes(read(certificate)), second.write_bytes(read(key))
    credentials = Credentials(certificate=str(first), key=str(second))
    async with (
        running(picker_of(plane, credentials)) as address,
        grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(read(certificate))) as open_before,
    ):
        assert await health(open_before, "liveness") == SERVING
        assert not await is_served(address, newer)
        first.write_bytes(read(newer)), second.write_bytes(read(newer_key))
        await credentials.check()
        assert await is_served(address, newer)
        assert not await is_served(address, certificate)
        assert await health(open_before, "liveness") == SERVING


async def test_with_an_authority_gateways_need_its_certificate(plane: Plane, tmp_path: Path) -> None:
    own, gateway, stranger = (self_signed(tmp_path, each) for each in ("own", "gateway", "stranger"))
    credentials = Credentials(certificate=own[0], key=own[1], client_ca=gateway[0])
    async with running(picker_of(plane, credentials)) as address:
        assert await is_served(address, own[0], gateway)
        assert not await is_served(address, own[0], stranger)
        assert not await is_served(address, own[0])


async def test_a_gateway_that_gives_up_ends_its_lease(plane: Plane) -> None:
    async with running(picker_of(plane)) as address:
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


async def test_a_second_request_on_a_stream_is_refused_and_no_lease_stays(plane: Plane) -> None:
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
        assert await stream.code() == grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: plane.serving.metrics.inflight == 0)
    assert (plane.outcomes(), picker.statistics.failed) == ({"cancelled": 1}, 1)


async def test_messages_that_are_none_are_refused_with_the_reason_and_logged_without_a_traceback(plane: Plane) -> None:
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
    assert picker.statistics.failed == 2


async def test_a_picker_that_is_full_refuses_streams_and_answers_health_checks(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.endpoint_picker.service.STREAMS_MAX", 1)
    picker = picker_of(plane)
    plane.join("w0", "http://127.0.0.1:1")
    async with running(picker) as address, grpc.aio.insecure_channel(address) as channel:
        first = process(channel)
        await first.write(asked(PROMPT)[0])
        await first.read()
        assert await process(channel).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await health(channel, "") == SERVING


async def test_bodies_beyond_the_bound_of_all_are_refused_until_there_is_room(plane: Plane) -> None:
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
        await until(lambda: picker.statistics.streams == 0)
        assert picker.statistics.body_bytes == 0
        assert dict(picker.statistics.outcomes) == {"placed": 2, "refused": 1}


BUFFERED, FULL_DUPLEX = 2, 4


async def replies_to(picker: EndpointPicker, message: Any) -> list[Any]:
    """Return what a gateway is sent that sends this message and does not end its stream."""

    async def messages() -> AsyncIterator[Any]:
        yield message
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
    plane: Plane, mode: int, limit: dict[str, Any]
) -> None:
    picker, head = picker_of(plane, **limit), asked(PROMPT)[0]
    head.protocol_config.request_body_mode = mode
    plane.join("w0", "http://127.0.0.1:1")
    *_, last = await replies_to(picker, head)
    assert last.immediate_response.status.code == 408
    assert b"not complete in time" in last.immediate_response.body
    assert dict(picker.statistics.outcomes) == {"refused": 1}
    assert (picker.statistics.streams, picker.statistics.failed, plane.serving.metrics.inflight) == (0, 0, 0)


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


async def test_the_read_that_came_too_late_is_not_cancelled(plane: Plane) -> None:
    picker = picker_of(plane, body_total_s=0.05)
    gateway = SilentGateway(asked(PROMPT)[0].SerializeToString())
    await picker._process(None, gateway)  # noqa: SLF001 - grpcio would call it
    assert gateway.written[-1].HasField("immediate_response")
    assert not any(each.cancelled() for each in gateway.reads)
    gateway.reads[1].cancel()
