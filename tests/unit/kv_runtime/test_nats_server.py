"""The real nats-server as a child: it serves, its end is seen, and it leaves nothing behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import nats
import pytest
from nats.js.errors import NotFoundError
from structlog.testing import capture_logs

from kv_runtime import nats_server
from kv_runtime.nats_server import MAX_PAYLOAD_BYTES, EmbeddedNats, NatsServerError
from kv_runtime.supervise import Part, run_parts
from tests.support.paths import ROOT


def port_of(server: EmbeddedNats) -> int:
    return int(server.url.rsplit(":", 1)[1])


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def publish(url: str, payload: bytes = b"x", answer_s: float = 5.0) -> int:
    """Publish to a stream of its own, which is made where missing; return the message's place in it."""
    client = await nats.connect(url)
    stream = client.jetstream(timeout=answer_s)
    try:
        await stream.stream_info("TEST")
    except NotFoundError:
        await stream.add_stream(name="TEST", subjects=["test"])
    try:
        return (await stream.publish("test", payload)).seq
    finally:
        await client.close()


async def test_stop_leaves_neither_process_nor_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with EmbeddedNats(port=0) as server:
        pid = server.pid
        await publish(server.url)
        assert len(names_in(tmp_path)) == 1
    assert (exists(pid), names_in(tmp_path)) == (False, [])


async def test_one_store_serves_one_server(tmp_path: Path) -> None:
    async with EmbeddedNats(port=0, store_dir=tmp_path):
        with pytest.raises(NatsServerError, match=f"store {tmp_path} is used by another"):
            await EmbeddedNats(port=0, store_dir=tmp_path).start()


async def test_a_used_port_is_an_error_that_names_the_way_out() -> None:
    async with EmbeddedNats(port=0) as server:
        port = port_of(server)
        with pytest.raises(NatsServerError) as raised:
            await EmbeddedNats(port=port).start()
    assert f"port {port} of 127.0.0.1 is in use; pass --nats-url nats://127.0.0.1:{port}" in str(raised.value)


async def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(nats_server, "START_S", 0.0)
    with pytest.raises(NatsServerError, match="was not ready after"):
        await EmbeddedNats(port=0).start()
    with pytest.raises(NatsServerError, match="could not be started"):
        await EmbeddedNats(port=0, store_dir=Path("/proc/none")).start()
    assert names_in(tmp_path) == []


async def test_a_failed_start_tells_the_last_log_lines(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("in the way")
    with pytest.raises(NatsServerError, match=r"ended; its log:(.|\n)*\[FTL\]"):
        await EmbeddedNats(port=0, store_dir=tmp_path).start()


@asynccontextmanager
async def running(server: EmbeddedNats) -> AsyncIterator[None]:
    """Start a server, and keep it running within the block."""
    stop = asyncio.Event()
    async with server, asyncio.TaskGroup() as group:
        group.create_task(run_parts([Part("nats-server", server.run)], stop=stop, drain_s=1.0))
        try:
            yield
        finally:
            stop.set()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - a state without an event
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("has_store", [True, False])
async def test_one_that_ends_is_started_again_on_its_port_with_its_store(tmp_path: Path, *, has_store: bool) -> None:
    server = EmbeddedNats(port=0, store_dir=tmp_path if has_store else None)
    async with running(server):
        url = server.url
        for killed_before in range(2):
            assert await publish(url) == 1 + killed_before
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda restarts=1 + killed_before: (server.is_up, server.restarts_total) == (True, restarts))  # type: ignore[misc]
    assert (server.url, (server.is_up, server.restarts_total)) == (url, (False, 2))


async def test_one_that_cannot_be_started_again_is_tried_again(tmp_path: Path) -> None:
    server = EmbeddedNats(port=0, store_dir=tmp_path / "store")
    with capture_logs() as log:
        async with running(server):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                os.kill(server.pid, signal.SIGKILL)
                await until(lambda: not server.is_up)
                other.bind(("127.0.0.1", port_of(server)))
                other.listen()
                await until(lambda: any(line["event"] == "nats_server_not_started" for line in log))
                assert (server.is_up, server.restarts_total) == (False, 0)
            await until(lambda: (server.is_up, server.restarts_total) == (True, 1))
    events = [(line["event"], line.get("exit_status")) for line in log]
    assert events[0] == ("nats_server_ended", -9)
    assert events[-1] == ("nats_server_started_again", None)
    assert {event for event, _ in events[1:-1]} == {"nats_server_not_started"}


@contextmanager
def small_disk(at: Path) -> Iterator[None]:
    """Mount a file system of 12 MiB."""
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(at)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system that gets full")
async def test_one_whose_disk_was_full_is_started_again_once_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    server = EmbeddedNats(port=0, store_dir=disk / "store")
    with small_disk(disk), capture_logs() as logs:
        async with running(server):
            assert await publish(server.url) == 1
            with suppress(OSError), (disk / "other").open("wb", buffering=0) as other:
                while True:
                    other.write(b"x" * 4096)
            while not any(each["event"] == "nats_server_disk_full" for each in logs):
                with suppress(TimeoutError):
                    await publish(server.url, b"x" * 8192, answer_s=0.1)
            assert (server.is_up, server.restarts_total) == (True, 0)
            (disk / "other").unlink()
            await until(lambda: (server.is_up, server.restarts_total) == (True, 1))
            assert await publish(server.url) > 1


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_its_payloads_are_bounded_and_it_gets_no_secret_of_our_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVROUTER_CONTROL__TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    async with EmbeddedNats(port=0) as server:
        assert b"secret" not in environment_of(server.pid)
        client = await nats.connect(server.url)
        assert client.max_payload == MAX_PAYLOAD_BYTES
        await client.close()


async def test_watching_ends_with_stop_and_the_server_stays_up() -> None:
    stop = asyncio.Event()
    stop.set()
    async with EmbeddedNats(port=0) as server:
        await run_parts([Part("nats-server", server.run)], stop=stop, drain_s=1.0)
        assert await publish(server.url) == 1


async def test_a_server_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server, "STOP_S", 0.0)
    async with EmbeddedNats(port=0) as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
    assert not exists(pid)


PARENT = """
import asyncio
from kv_runtime.nats_server import EmbeddedNats

async def main():
    async with EmbeddedNats(port=0) as server:
        print(server.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def started_by(script: str, directory: Path) -> tuple[asyncio.subprocess.Process, int]:
    """Return a process that started a server, with this temporary directory, and the server's id."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(directory), "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    return parent, int(await parent.stdout.readline())


async def killed(parent: asyncio.subprocess.Process, pid: int) -> None:
    """Kill a process and return once its server is gone, too."""
    server = os.pidfd_open(pid)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(server, ended.set)
    try:
        parent.kill()
        await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(server)
        os.close(server)
        await parent.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the server survives, and its directory stays")
async def test_what_a_killed_parent_left_is_removed_at_the_next_start_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "kv-nats-of-another-program").mkdir()
    living, living_pid = await started_by(PARENT, tmp_path)
    parent, pid = await started_by(PARENT, tmp_path)
    assert len(names_in(tmp_path)) == 3
    await killed(parent, pid)
    assert len(names_in(tmp_path)) == 3
    async with EmbeddedNats(port=0) as own, EmbeddedNats(port=0) as other:
        assert len(names_in(tmp_path)) == 4, "of those that live, and what has no lock"
        assert (await publish(own.url), await publish(other.url)) == (1, 1)
    assert exists(living_pid)
    assert len(names_in(tmp_path)) == 2
    await killed(living, living_pid)
