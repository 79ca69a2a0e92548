"""A stop loses no request of a client that does what it is told: nothing in a queue, in a race, or on an idle line."""

import asyncio
import socket

import pytest

from kv_runtime.http.acceptor import HANDSHAKE_S
from tests.system.integration.http.serving import WHOLE, Http, answered, get, in_two, post, running, until, with_worker
from tests.unit.router.upstream import STREAM_HEAD, chunked, completion, event

GRACE_S = 0.3
LAST = b"0\r\n\r\n"


async def test_after_a_stop_what_runs_goes_on_and_says_that_it_is_the_last() -> None:
    more = asyncio.Event()
    async with with_worker(in_two(more, b"", WHOLE)) as (http, worker):
        idle, _ = await http.dial(get())
        await answered(idle)
        reader, _ = await http.dial(post() + get("/later"))
        await until(lambda: bool(worker.received))
        http.stop.set()
        assert await idle.read() == b""
        with pytest.raises(ConnectionError):
            await http.dial()
        more.set()
        answer = await answered(reader)
        assert (answer.body, answer.headers["connection"]) == (completion(), "close")
        assert await reader.read() == b""


async def test_a_stream_of_which_nothing_was_sent_before_the_stop_says_that_it_is_the_last() -> None:
    more = asyncio.Event()
    async with with_worker(in_two(more, STREAM_HEAD, chunked(event("a")) + LAST)) as (http, _):
        reader, _ = await http.dial(post())
        await until(lambda: bool(http.watchers) and "head 200" in http.watcher.heard)
        http.stop.set()
        await until(lambda: http.plane.draining)
        more.set()
        answer = await answered(reader)
    assert answer.headers["connection"] == "close"


async def test_a_connection_whose_answer_did_not_say_close_may_bring_one_more_request() -> None:
    more = asyncio.Event()
    async with with_worker(in_two(more, STREAM_HEAD + chunked(event("a")), LAST), drain_idle_s=GRACE_S) as (http, _):
        reader, writer = await http.dial(post())
        streamed = await reader.readuntil(event("a"))
        http.stop.set()
        await until(lambda: http.plane.draining)
        more.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(get("/again"))
        answer = await answered(reader)
        assert await reader.read() == b""
    assert b"connection: close" not in streamed
    assert (answer.status, answer.body, answer.headers["connection"]) == (200, b"/again?", "close")


async def test_an_idle_connection_may_bring_a_request_for_a_while_after_the_stop() -> None:
    async with running(drain_idle_s=GRACE_S) as http:
        used, writer = await http.dial(get())
        unused, _ = await http.dial()
        await answered(used)
        http.stop.set()
        await until(lambda: http.plane.draining)
        writer.write(get("/late"))
        answer = await answered(used)
        assert (await used.read(), await unused.read()) == (b"", b"")
    assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_a_request_that_becomes_whole_after_a_stop_is_served() -> None:
    async with running() as http:
        reader, writer = await http.dial(get()[:10])
        await until(lambda: len(http.plane.connections) == 1)
        http.stop.set()
        await until(lambda: http.plane.draining)
        writer.write(get()[10:])
        answer = await answered(reader)
    assert (answer.status, answer.headers["connection"]) == (200, "close")


async def test_what_waits_in_the_systems_queue_at_the_stop_is_served() -> None:
    clients, http = 50, Http(drain_idle_s=GRACE_S)
    await http.plane.start("127.0.0.1", 0)
    waiting = [socket.create_connection(("127.0.0.1", http.plane.port)) for _ in range(clients)]
    for each in waiting:
        each.sendall(get())
    http.stop.set()
    await http.plane.run(http.stop)
    said = [each.recv(4096) for each in waiting]
    for each in waiting:
        each.close()
    assert [each[:15] for each in said] == [b"HTTP/1.1 200 OK"] * clients
    assert all(b"connection: close\r\n" in each for each in said)


async def test_two_planes_on_one_port_lose_no_handshake_when_one_stops() -> None:
    """Handshakes that come while one drains are completed by the other: by its own queue, or by the next SYN."""
    one, other = Http(drain_idle_s=0.1), Http(drain_idle_s=0.1)
    await one.plane.start("127.0.0.1", 0, reuse_port=True)
    port = one.plane.port
    await other.plane.start("127.0.0.1", port, reuse_port=True)

    async def request() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        answer = await answered(reader)
        writer.close()
        return answer.status

    async with asyncio.TaskGroup() as group:
        stopped = group.create_task(one.plane.run(one.stop))
        group.create_task(other.plane.run(other.stop))
        before = await asyncio.gather(*(request() for _ in range(50)))
        one.stop.set()
        await until(lambda: one.plane.draining)
        while not stopped.done():
            assert set(await asyncio.gather(*(request() for _ in range(20)))) == {200}
        served = len(one.exchanges)
        after = await asyncio.gather(*(request() for _ in range(50)))
        other.stop.set()
    assert set(before + after) == {200}
    assert served > 0
    assert len(one.exchanges) == served
    assert HANDSHAKE_S < 1.0, "the client's next SYN comes after a second"
