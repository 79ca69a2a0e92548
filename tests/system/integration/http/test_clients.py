"""Clients of the HTTP plane over real sockets: what they may send, how slowly, and what they are told."""

import asyncio
import socket
import struct
from typing import Any

import pytest
from structlog.testing import capture_logs

from kv_runtime.http.acceptor import PortUsed
from router.http.client import ClientConnection
from router.http.exchange import Exchange as ClientExchange
from router.http.plane import HttpPlane
from tests.system.integration.broker import WAIT_S
from tests.system.integration.http.serving import (
    WHOLE,
    Http,
    answered,
    dialing,
    get,
    in_two,
    post,
    running,
    until,
    with_worker,
)
from tests.unit.router.upstream import (
    STREAM_HEAD,
    Exchange,
    answers,
    chunked,
    completion,
    event,
    pours,
    says_and_waits,
    streams,
)

GOOD = answers(200, completion())


def unsent_bytes(client: ClientConnection) -> int:
    """Return what the router holds of answers that the client has not taken."""
    return client._transport.get_write_buffer_size()  # noqa: SLF001


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(200, b"%d" % len(worker.received))

    async with with_worker(script) as (http, worker):
        reader, _ = await http.dial(get("/a?q=1") + post() + get("/b") + post() + get("/c"))
        answers = [(await answered(reader)).body for _ in range(5)]
    assert answers == [b"/a?q=1", b"1", b"/b?", b"2", b"/c?"]


async def test_no_more_than_the_bound_is_read_ahead() -> None:
    async with running(pipelined_bytes_max=1024) as http:
        http.hold = True
        reader, writer = await http.dial(get())
        await until(lambda: len(http.exchanges) == 1)
        big = post(b"x" * 3_000_000)
        writer.write(big)
        await until(lambda: http.client().reading_paused)
        assert len(http.client().buffer) <= 1024 + 256 * 1024
        http.exchanges[0].answer(200, b"first")
        await until(lambda: len(http.exchanges) == 2)
        assert len(http.exchanges[1].body) == 3_000_000
        http.exchanges[1].answer(200, b"second")
        assert [(await answered(reader)).body for _ in range(2)] == [b"first", b"second"]


async def test_a_head_request_gets_no_body() -> None:
    async with running() as http:
        reader, _ = await http.dial(get("/a", method="HEAD") + get("/b"))
        first = await answered(reader, bodyless=True)
        assert (first.status, first.headers["content-length"]) == (200, "3")
        assert (await answered(reader)).body == b"/b?"


@pytest.mark.parametrize("request_", [get(headers=b"connection: close\r\n"), b"GET / HTTP/1.0\r\n\r\n"])
async def test_a_connection_that_is_to_end_ends_with_its_answer(request_: bytes) -> None:
    async with running() as http:
        said = await http.said(request_)
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in said


# ---------------------------------------------------------------- 100-continue


async def test_a_client_that_waits_for_a_word_gets_it() -> None:
    head = b"PUT / HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
    async with running() as http:
        http.hold = True
        reader, writer = await http.dial(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert http.exchanges == []
        writer.write(b"abc")
        await until(lambda: bool(http.exchanges))
        http.exchanges[0].answer(200, b"")
        assert (await answered(reader)).status == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"expect: 100-continue\r\ncontent-length: 2000\r\n", 413),
        (b"expect: the worst\r\ncontent-length: 2\r\n", 417),
        (b"expect: 100-continue\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n", 415),
    ],
)
async def test_a_client_that_waits_for_a_word_is_refused_instead(lines: bytes, status: int) -> None:
    async with running(body_bytes_max=1024) as http:
        reader, _ = await http.dial(b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\n" + lines + b"\r\n")
        assert (await answered(reader)).status == status
        assert await reader.read() == b""


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (post(b"x" * 1025), 413, "body_too_large"),
        (post(b"x" * 100_000_0), 413, "body_too_large"),
        (get("/", b"transfer-encoding: chunked\r\n") + b"401\r\n", 413, "body_too_large"),
        (get("/", b"transfer-encoding: chunked\r\n") + b"400\r\n" + b"x" * 1024 + b"\r\n1\r\n", 413, "body_too_large"),
        (get("/", b"transfer-encoding: chunked\r\n") + b"xyz\r\n", 400, None),
        (get("/", b"x: y\r\n" * 101), 431, "head_too_large"),
        (get("/" + "x" * 40_000), 431, "head_too_large"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, None),
        (b"GET / HTTP/1.1\r\n\r\n", 400, None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", 400, None),
        (b"\n" + get(), 400, None),
    ],
)
async def test_what_is_no_request_is_refused_and_its_sender_sent_away(
    sent: bytes, status: int, code: str | None
) -> None:
    async with running(body_bytes_max=1024) as http:
        reader, _ = await http.dial(sent)
        answer = await answered(reader)
        assert await reader.read() == b""
        assert http.plane.refusals == {status: 1}
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", code)
    assert http.exchanges == []


async def test_a_body_up_to_the_limit_is_served() -> None:
    async with running(body_bytes_max=1024) as http:
        reader, _ = await http.dial(
            get("/", b"content-length: 1024\r\n") + b"x" * 1024
            + get("/", b"transfer-encoding: chunked\r\n") + b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n"
        )  # fmt: skip
        assert [(await answered(reader)).status for _ in range(2)] == [200, 200]


async def test_all_bodies_together_have_a_bound_and_what_is_answered_counts_no_more() -> None:
    async with running(bodies_bytes_max=3000) as http:
        _, first = await http.dial(get("/", b"content-length: 4000\r\n") + b"x" * 2000)
        await until(lambda: http.plane.bodies_bytes == 2000)
        refused, _ = await http.dial(get("/", b"content-length: 4000\r\n") + b"x" * 2000)
        answer = await answered(refused)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error["message"].startswith("data.bodies_bytes_max: ")
        first.close()
        await until(lambda: http.plane.bodies_bytes == 0)
        served, writer = await http.dial(get("/", b"content-length: 2500\r\n") + b"x" * 2000)
        await until(lambda: http.plane.bodies_bytes == 2000)
        writer.write(b"x" * 500)
        assert (await answered(served)).status == 200
        assert http.plane.bodies_bytes == 0


async def test_a_fault_of_ours_is_a_500_that_tells_no_secret() -> None:
    async with running() as http:
        with capture_logs() as logs:
            reader, _ = await http.dial(get("/fault") + get("/b"))
            answer = await answered(reader)
        assert (answer.status, answer.error["message"]) == (500, "our fault: ValueError; see the log")
        assert (await answered(reader)).body == b"/b?"
    assert [each["event"] for each in logs] == ["request_failed"]


async def test_beyond_the_bound_connections_are_refused() -> None:
    async with running(connections_max=2) as http:
        kept = [await http.dial(get()) for _ in range(2)]
        for reader, _ in kept:
            await answered(reader)
        reader, _ = await http.dial(get())
        answer = await answered(reader)
        assert (answer.status, answer.headers["retry-after"], answer.error["type"]) == (503, "1", "server_error")
        assert await reader.read() == b""
        kept[0][1].close()
        await until(lambda: len(http.plane.connections) < 2)
        assert (await http.ask(get())).status == 200


# ---------------------------------------------------------------- slow clients


FLOOD = pours(STREAM_HEAD, chunked(b"data: " + b"x" * 60_000 + b"\n\n"))
"""Events without end, until the router goes."""


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\n", b"\r\n"])
async def test_a_head_that_does_not_come_is_not_awaited(sent: bytes) -> None:
    async with running(head_s=0.05) as http:
        answer = await http.ask(sent)
    assert (answer.status, answer.error["code"]) == (408, "timeout")


async def test_a_body_that_stops_is_not_awaited() -> None:
    async with running(body_s=0.05) as http:
        answer = await http.ask(post(b"x" * 100)[:-1])
    assert (answer.status, answer.error["message"]) == (408, "body: no byte for 0.05 s")


async def test_a_slow_body_is_awaited_as_long_as_it_comes() -> None:
    request = get("/slow", b"content-length: 40\r\n") + b"x" * 40
    async with running(body_s=0.2, head_s=0.2, body_rate_min_bytes_s=0.0) as http:
        reader, writer = await http.dial(request[:-40])
        for _ in range(40):
            await until_later(0.01)
            writer.write(b"x")
        assert (await answered(reader)).body == b"/slow?"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"body_s": 0.1, "body_rate_min_bytes_s": 1000.0}, "allowed 1000 a second and more"),
        ({"body_s": 5.0, "body_total_s": 0.2}, "body: not whole within 0.2 s"),
    ],
)
@pytest.mark.parametrize("in_chunks", [False, True])
async def test_a_body_that_trickles_is_refused(limits: dict[str, Any], message: str, in_chunks: bool) -> None:
    head = get("/", b"transfer-encoding: chunked\r\n" if in_chunks else b"content-length: 100000\r\n")
    async with running(**limits) as http:
        reader, writer = await http.dial(head)
        answering = asyncio.ensure_future(answered(reader))
        while not answering.done():
            writer.write(b"1\r\nx\r\n" if in_chunks else b"x")
            await until_later(0.01)
        answer = await answering
        assert http.plane.refusals == {408: 1}
    assert (answer.status, answer.error["code"]) == (408, "timeout")
    assert message in answer.error["message"]
    assert http.exchanges == []


async def until_later(seconds: float) -> None:
    """The body's own pace, which is the fact of the test: it takes longer than one pause may."""
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    loop.call_later(seconds, passed.set_result, None)
    await passed


@pytest.mark.parametrize("sent", [b"", get()])
async def test_an_idle_connection_is_closed_after_its_time(sent: bytes) -> None:
    async with running(head_s=0.05, idle_s=0.05) as http:
        reader, _ = await http.dial(sent)
        said = await reader.read()
    assert said.startswith(b"HTTP/1.1 200") if sent else said == b""


async def test_a_connection_is_idle_although_its_timeouts_were_checked_between_two_requests() -> None:
    async with running(idle_s=0.05, pipelined_bytes_max=1024) as http:
        served: list[ClientExchange] = []

        def serve(exchange: ClientExchange) -> None:
            served.append(exchange)
            if len(served) == 2:
                http.plane.loop.call_soon(http.client().check_timeouts, http.plane.loop.time())
                exchange.answer(200, b"")

        http.plane.service = serve
        reader, writer = await http.dial(get())
        await until(lambda: bool(served))
        writer.write(get("/" + "x" * 2048))
        await until(lambda: http.client().reading_paused)
        served[0].answer(200, b"")
        said = await asyncio.wait_for(reader.read(), WAIT_S)
    assert said.count(b"HTTP/1.1 200") == 2


async def test_a_reset_between_two_requests_leaves_nothing() -> None:
    async with running() as http:
        served: list[ClientExchange] = []

        def serve(exchange: ClientExchange) -> None:
            served.append(exchange)
            if len(served) == 2:
                client = http.client()
                exchange.answer(200, b"")
                sock.close()
                client.check_timeouts(http.plane.loop.time())

        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        http.plane.service = serve
        sock.connect(("127.0.0.1", http.plane.port))
        sock.sendall(get() + get() + get())
        sock.shutdown(socket.SHUT_WR)
        await until(lambda: bool(served) and http.client().half_closed)
        served[0].answer(200, b"")
        await until(lambda: not http.plane.connections)


async def test_a_client_that_sends_no_more_and_reads_nothing_is_cut_off_too() -> None:
    body = b"x" * (16 << 20)
    async with running(write_bytes_max=64 << 20, write_s=0.1) as http:
        http.hold = True
        _, writer = await http.dial(get(), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: bool(http.exchanges))
        http.exchanges[0].answer(200, body)
        client = http.client()
        assert unsent_bytes(client)
        assert not client.writing_paused
        await until(lambda: client.due_s > 0)
        writer.write_eof()
        await until(lambda: not http.plane.connections)
        writer.transport.abort()


async def test_a_client_that_reads_nothing_costs_little_and_is_cut_off() -> None:
    async with with_worker(FLOOD, write_s=0.2) as (http, worker):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", http.plane.port))
        sock.sendall(post())
        await until(lambda: [each.writing_paused for each in http.plane.connections] == [True])
        most = 0
        while not worker.gone.is_set():
            most = max(most, *(unsent_bytes(each) for each in http.plane.connections), 0)
            await asyncio.sleep(0)
        sock.close()
    assert 64 << 10 < most < 1 << 20
    assert http.watcher.heard[-1] == "gone"


async def test_a_worker_whose_client_reads_slowly_is_not_late() -> None:
    part = b"data: " + b"x" * 60_000 + b"\n\n"

    async with with_worker(streams(*[part] * 100)) as (http, _):
        reader, writer = await http.dial(post(), limit=4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport can
        await until(lambda: [each.writing_paused for each in http.plane.connections] == [True])
        (connection,) = http.plane.upstreams.connections
        now_s = asyncio.get_running_loop().time()
        for later_s in (0.0, http.call_limits.between_bytes_s + 1.0):
            connection.check_timeouts(now_s + later_s)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await answered(reader)).body == part * 100


async def test_a_client_that_reads_no_answers_is_served_no_more_requests() -> None:
    async with running(write_bytes_max=1000) as http:
        _, writer = await http.dial()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        request = get("/" + "x" * 10_000)
        for _ in range(3000):
            writer.write(request)
        await until(lambda: [each.writing_paused for each in http.plane.connections] == [True])
        assert unsent_bytes(http.client()) < 1 << 20
        await until(lambda: http.client().reading_paused)
        kept_bytes, served = len(http.client().buffer), len(http.exchanges)
        writer.transport.abort()
    assert kept_bytes <= (64 << 10) + 2 * (256 << 10), "the bound, and two reads of the loop"
    assert served < 3000


# ---------------------------------------------------------------- the address


async def test_an_address_in_use_is_named_and_may_be_shared_where_all_agree() -> None:
    async with running() as http:
        plane = HttpPlane(http.serve)
        with pytest.raises(PortUsed, match=f"127.0.0.1:{http.plane.port}"):
            await plane.start("127.0.0.1", http.plane.port)
    first, second = HttpPlane(http.serve), HttpPlane(http.serve)
    await first.start("127.0.0.1", 0, reuse_port=True)
    await second.start("127.0.0.1", first.port, reuse_port=True)
    assert first.port == second.port
    stop = asyncio.Event()
    stop.set()
    await first.run(stop)
    await second.run(stop)


async def test_what_is_said_before_the_plane_runs_is_answered_when_it_does() -> None:
    http = Http()
    await http.plane.start("localhost", 0)
    reader, writer = await http.dial(get())
    async with asyncio.TaskGroup() as group:
        group.create_task(http.plane.run(http.stop))
        assert (await answered(reader)).status == 200
        writer.close()
        http.stop.set()


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_client_that_closes_its_sending_side_gets_its_answers(version: str) -> None:
    more = asyncio.Event()
    sent = post() + post() if version == "1.1" else post().replace(b"HTTP/1.1", b"HTTP/1.0")
    async with with_worker(in_two(more, b"", WHOLE)) as (http, _):
        reader, writer = await http.dial(sent)
        writer.write_eof()
        await until(lambda: any(each.half_closed for each in http.plane.connections))
        more.set()
        said = await reader.read()
        assert http.plane.gone == 0
    answers = said.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 200 ")[1:]
    assert [each.partition(b"\r\n\r\n")[2] for each in answers] == [completion()] * (2 if version == "1.1" else 1)
    assert [b"connection: close\r\n" in each for each in answers] == ([False, True] if version == "1.1" else [True])
    assert said.count(b"100 Continue") == (1 if version == "1.1" else 0)


async def test_a_client_that_closes_its_sending_side_in_a_stream_gets_the_rest() -> None:
    more = asyncio.Event()
    rest = chunked(event("b")) + b"0\r\n\r\n"
    async with with_worker(in_two(more, STREAM_HEAD + chunked(event("a")), rest)) as (http, _):
        reader, writer = await http.dial(post())
        await reader.readuntil(event("a"))
        writer.write_eof()
        await until(lambda: any(each.half_closed for each in http.plane.connections))
        more.set()
        rest = (await reader.read()).removeprefix(b"\r\n")
    assert rest.startswith(chunked(b":\n\n") + chunked(event("b")))
    assert rest.endswith(b"0\r\n\r\n")
    assert b"100 Continue" not in rest


async def test_a_reset_after_a_probe_is_noticed_before_the_next_sweep() -> None:
    async with with_worker(says_and_waits(STREAM_HEAD + chunked(event("a"))), sweep_s=1e6) as (http, worker):
        reader, writer = await http.dial(post())
        await reader.readuntil(event("a"))
        writer.close()
        await worker.gone.wait()
        assert http.plane.gone == 1


async def test_while_nothing_is_forwarded_the_service_is_told_that_the_client_left() -> None:
    async with running() as http:
        http.hold = True
        _, writer = await http.dial(post())
        await until(lambda: bool(http.exchanges))
        writer.close()
        await until(lambda: bool(http.gone))
        (exchange,) = http.exchanges
        assert exchange.client is None
        exchange.answer(200, b"too late")
        http.forward(exchange)
        assert http.watcher.heard == []
        assert http.gone == [exchange]


async def test_a_client_that_leaves_in_its_own_request_leaves_nothing() -> None:
    async with running() as http:
        for sent in (post()[:10], post()[:-1], get("/", b"transfer-encoding: chunked\r\n") + b"5\r\nab"):
            _, writer = await http.dial(sent)
            await until(lambda: len(http.plane.connections) == 1)
            writer.close()
            await until(lambda: not http.plane.connections)
    assert http.exchanges == []


async def test_a_thousand_streams_cut_midway_leave_nothing() -> None:
    async with with_worker(says_and_waits(STREAM_HEAD)) as (http, worker):
        writers = []
        for count in range(50, 1001, 50):
            writers += [writer for _, writer in await asyncio.gather(*(http.dial(post()) for _ in range(50)))]
            await until(lambda count=count: len(worker.received) == count)  # type: ignore[misc]
        for each, writer in enumerate(writers):
            writer.transport.abort() if each % 2 else writer.close()
        await until(lambda: not http.plane.connections)
        await until(lambda: not http.plane.upstreams.connections)
        assert (http.plane.inflight, dialing(http.plane)) == (0, 0)
    assert {watcher.heard[-1] for watcher in http.watchers} == {"gone"}
    assert not any(watcher.exchange.client for watcher in http.watchers)


async def test_a_client_that_leaves_while_a_worker_is_dialed_leaves_nothing() -> None:
    async with with_worker(says_and_waits(STREAM_HEAD)) as (http, _):
        for turns in range(60):
            _, writer = await http.dial(post())
            for _ in range(turns % 6):
                await asyncio.sleep(0)
            writer.transport.abort()
        await until(lambda: http.plane.accepted == 60)
        await until(lambda: not http.plane.connections)
        await until(lambda: not (http.plane.upstreams.connections or dialing(http.plane)))


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("sent", "seen"), [(b"", b"shutting_down"), (STREAM_HEAD + b"9\r\ndata: x\n\n\r\n", b"[DONE]")]
)
async def test_what_takes_longer_than_the_drain_is_ended(sent: bytes, seen: bytes) -> None:
    async with with_worker(says_and_waits(sent), drain_s=0.05) as (http, worker):
        reader, _ = await http.dial(post())
        await until(lambda: bool(worker.received))
        if sent:
            await reader.readuntil(b"data: x\n\n")
        http.stop.set()
        said = await reader.read()
        await worker.gone.wait()
    assert seen in said
    assert b"shutting_down" in said
    assert http.watcher.heard[-1] == "gone"


async def test_what_waits_when_the_drain_is_over_is_told_and_its_service_too() -> None:
    async with running(drain_s=0.05) as http:
        http.hold = True
        reader, _ = await http.dial(post())
        await until(lambda: bool(http.exchanges))
        http.stop.set()
        answer = await answered(reader)
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert http.gone == http.exchanges


async def test_a_client_that_reads_nothing_does_not_hold_up_the_end() -> None:
    async with with_worker(FLOOD, drain_s=0.05, linger_s=0.05) as (http, _):
        _, writer = await http.dial(post())
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport can
        await until(lambda: [each.writing_paused for each in http.plane.connections] == [True])
        http.stop.set()
        await until(lambda: not http.plane.connections)
