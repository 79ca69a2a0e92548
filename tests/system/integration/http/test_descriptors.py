"""File descriptors: the plane serves as many connections as there are descriptors for, and says so when it cannot."""

import asyncio
import socket

import pytest
from structlog.testing import capture_logs

from kv_runtime.files import RESERVED, OpenFiles
from router.http.limits import CLIENTS_MIN, TooFewFiles
from router.http.plane import REFUSED_MAX
from tests.support.descriptors import no_descriptors_left
from tests.system.integration.http.serving import Http, answered, get, post, running, until, with_worker
from tests.unit.router.upstream import Upstream, answers, completion, says_and_waits

GOOD = answers(200, completion())
FEW_FILES = OpenFiles(used=20, allowed=20 + RESERVED + 2 * CLIENTS_MIN)


async def test_no_more_clients_are_served_than_there_are_descriptors_for() -> None:
    with capture_logs() as logs:
        async with with_worker(GOOD, FEW_FILES) as (http, _):
            kept = [await http.dial() for _ in range(CLIENTS_MIN)]
            refused = [(await http.dial(get()))[0] for _ in range(REFUSED_MAX)]
            assert [(await answered(each)).status for each in refused] == [503] * REFUSED_MAX
            for reader, writer in kept:
                writer.write(post())
                assert (await answered(reader)).status == 200
            assert http.plane.capacity == (CLIENTS_MIN, CLIENTS_MIN)
    (line,) = [each for each in logs if each["event"] == "connections_bound_lowered"]
    assert (line["clients"], line["open_files"]) == (CLIENTS_MIN, FEW_FILES.allowed)


async def test_clients_far_beyond_the_bound_are_refused_at_once() -> None:
    async with running(FEW_FILES, linger_s=30.0) as http:
        kept = [await http.dial() for _ in range(CLIENTS_MIN + REFUSED_MAX)]
        await until(lambda: len(http.plane.connections) == CLIENTS_MIN + REFUSED_MAX)
        reader, _ = await http.dial()
        answer = await answered(reader)
        assert await reader.read() == b""
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error["message"].startswith("16 connections are open")
        assert len(http.plane.connections) == len(kept)


async def test_with_room_for_hardly_any_client_the_plane_does_not_start() -> None:
    http = Http(FEW_FILES._replace(allowed=FEW_FILES.allowed - 1))
    with pytest.raises(TooFewFiles, match=r"open files: found a limit of 147, allowed 148 and more: raise the hard"):
        await http.plane.start("127.0.0.1", 0)


async def test_while_nothing_can_be_accepted_clients_wait_and_it_is_said() -> None:
    async with running() as http:
        await http.ask(get())
        late = socket.socket()
        late.setblocking(False)
        with capture_logs() as logs, no_descriptors_left():
            with pytest.raises(BlockingIOError):
                late.connect(("127.0.0.1", http.plane.port))
            await until(lambda: http.plane.acceptor.failures.get("EMFILE", 0) >= 2)
        await asyncio.get_running_loop().sock_sendall(late, get())
        said = await asyncio.get_running_loop().sock_recv(late, 4096)
        late.close()
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert [(each["event"], each["error"]) for each in logs] == [("accept_failed", "EMFILE")]


async def test_a_worker_is_not_to_blame_for_a_connection_that_we_cannot_open() -> None:
    async with with_worker(GOOD) as (http, _):
        reader, writer = await http.dial(get())
        await answered(reader)
        with no_descriptors_left():
            writer.write(post())
            answer = await answered(reader)
        assert answer.status == 502, "the test's service answers every failure so"
        assert http.watcher.heard == [
            "failed local: the router has no resources for another connection to a worker; try again"
        ]


async def test_an_idle_connection_to_one_worker_makes_room_for_another_worker() -> None:
    async with Upstream(GOOD) as one, Upstream(GOOD) as other, running(worker_connections_max=1) as http:
        for worker in (one, other, one):
            http.worker = worker.base_url
            assert (await http.ask(post())).status == 200
        await until(lambda: len(http.plane.upstreams.connections) == 1)


async def test_beyond_the_bound_of_workers_connections_no_worker_is_to_blame() -> None:
    async with with_worker(says_and_waits(b""), worker_connections_max=1) as (http, worker):
        await http.dial(post())
        await until(lambda: bool(worker.received))
        await http.ask(post())
        assert http.watchers[1].heard == ["failed local: 1 connections to workers are open; try again"]
