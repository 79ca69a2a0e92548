"""The real nats-server as a child: it serves, its end is seen, and it leaves nothing behind."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import nats
import pytest
import uvloop
from nats.js.errors import NotFoundError

from kv_runtime.nats_server import MAX_PAYLOAD_BYTES, EmbeddedNats, NatsServerError
from kv_runtime.supervise import Part, run_parts
from tests.support.paths import ROOT


def port_of(server: EmbeddedNats) -> int:
    return int(server.url.rsplit(":", 1)[1])


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def publish(url: str, payload: bytes = b"x") -> int:
    """Publish to a stream of its own, which is made where missing; return the message's place in it."""
    client = await nats.connect(url)
    stream = client.jetstream()
    try:
        await stream.stream_info("TEST")
    except NotFoundError:
        await stream.add_stream(name="TEST", subjects=["test"])
    ack = await stream.publish("test", payload)
    await client.close()
    return ack.seq


@pytest.mark.asyncio
async def test_it_serves_streams_on_a_port_of_the_systems_choice() -> None:
    async with EmbeddedNats(port=0) as server:
        assert await publish(server.url) == 1


@pytest.mark.asyncio
async def test_its_payloads_are_bounded() -> None:
    async with EmbeddedNats(port=0) as server:
        client = await nats.connect(server.url)
        assert client.max_payload == MAX_PAYLOAD_BYTES
        await client.close()


@pytest.mark.asyncio
async def test_stop_leaves_neither_process_nor_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with EmbeddedNats(port=0) as server:
        pid = server.pid
        await publish(server.url)
        assert len(names_in(tmp_path)) == 1
    assert (exists(pid), names_in(tmp_path)) == (False, [])


@pytest.mark.asyncio
async def test_a_store_that_was_given_outlives_the_server(tmp_path: Path) -> None:
    store = tmp_path / 'a "store" for ünicode'
    seqs = []
    for _ in range(2):
        async with EmbeddedNats(port=0, store_dir=store) as server:
            seqs.append(await publish(server.url))
    assert seqs == [1, 2]


@pytest.mark.asyncio
async def test_one_store_serves_one_server(tmp_path: Path) -> None:
    async with EmbeddedNats(port=0, store_dir=tmp_path):
        with pytest.raises(NatsServerError, match=f"store {tmp_path} is used by another"):
            await EmbeddedNats(port=0, store_dir=tmp_path).start()


@pytest.mark.asyncio
async def test_a_used_port_is_an_error_that_names_the_way_out() -> None:
    async with EmbeddedNats(port=0) as server:
        port = port_of(server)
        with pytest.raises(NatsServerError) as raised:
            await EmbeddedNats(port=port).start()
    assert f"port {port} of 127.0.0.1 is in use; pass --nats-url nats://127.0.0.1:{port}" in str(raised.value)


@pytest.mark.asyncio
async def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(NatsServerError, match="was not ready after"):
        await EmbeddedNats(port=0, start_s=0.0).start()
    with pytest.raises(NatsServerError, match="could not be started"):
        await EmbeddedNats(port=0, store_dir=Path("/proc/none")).start()
    assert names_in(tmp_path) == []


@pytest.mark.asyncio
async def test_a_failed_start_tells_the_last_log_lines(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("in the way")
    with pytest.raises(NatsServerError, match=r"ended; its log:(.|\n)*\[FTL\]"):
        await EmbeddedNats(port=0, store_dir=tmp_path).start()


@pytest.mark.asyncio
async def test_its_death_is_a_failure_of_the_process_that_needs_it() -> None:
    async with EmbeddedNats(port=0) as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(NatsServerError, match=r"ended \(exit status -9\)(.|\n)*Server is ready"):
            await run_parts([Part("nats-server", server.run)], stop=asyncio.Event(), drain_s=1.0)


@pytest.mark.asyncio
async def test_watching_ends_with_stop_and_the_server_stays_up() -> None:
    stop = asyncio.Event()
    stop.set()
    async with EmbeddedNats(port=0) as server:
        await run_parts([Part("nats-server", server.run)], stop=stop, drain_s=1.0)
        assert await publish(server.url) == 1


@pytest.mark.asyncio
async def test_waiting_ends_when_the_server_is_stopped() -> None:
    server = EmbeddedNats(port=0)
    await server.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.wait())
        await asyncio.sleep(0)
        await server.stop()


@pytest.mark.asyncio
async def test_a_server_that_does_not_listen_is_killed() -> None:
    async with EmbeddedNats(port=0, stop_s=0.0) as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
    assert not exists(pid)


@pytest.mark.asyncio
async def test_a_server_may_be_started_again() -> None:
    server = EmbeddedNats(port=0)
    for _ in range(2):
        async with server:
            assert await publish(server.url) == 1


@pytest.mark.asyncio
async def test_its_log_can_be_heard() -> None:
    lines: list[str] = []
    async with EmbeddedNats(port=0, on_log_line=lines.append):
        pass
    assert [line for line in lines if "Server is ready" in line or "Server Exiting" in line] == [
        line for line in lines if line.endswith(("Server is ready", "Server Exiting.."))
    ]


def test_it_runs_under_uvloop() -> None:
    async def main() -> int:
        async with EmbeddedNats(port=0) as server:
            return await publish(server.url)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == 1


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


@pytest.mark.asyncio
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
async def test_it_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    await killed(*await started_by(PARENT, tmp_path))


@pytest.mark.asyncio
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
