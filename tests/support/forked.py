"""Python commands in processes of their own, forked from one that has imported what commands import.

Python takes a second to import a command, and a fork milliseconds. A process is as one that was started: it has its own
session, environment, directory and standard streams, threads and event loop, and it ends by itself. But all have one
seed of hashes, the process that forks them is their parent, and their command line is its.

As a program, `python -m tests.support.forked SOCKET`, this is that process; it ends when its last client does.
"""

import asyncio
import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.processes import started

WITHIN_S = 100.0
_IMPORTED = (
    "router.cli.serve",
    "router.cli.journals",
    "router.cli.doctor",
    "worker_agent.commands.serve",
    "bench.what_if.command",
)
_REQUEST_BYTES_MAX = 1 << 17
_NUMBER = struct.Struct("<i")
_STARTING = threading.Lock()


class Ended(NamedTuple):
    """The exit status (minus the signal that ended it), and what stood on standard output and standard error."""

    code: int | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value that was printed."""
        assert self.out, self.err
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """The JSON values that were printed, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]


def forked(*arguments: str | Path, **variables: str) -> Ended:
    """Run Python with these arguments, `-m MODULE ...` or `-c CODE ...`; of our settings, it has only these variables.

    Raises:
        TimeoutError: it has not ended in time, and was killed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTER_")}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid, status = _fork(arguments, environment | variables, out.fileno(), err.fileno())
        try:
            if not select.select([status], [], [], WITHIN_S)[0]:
                os.kill(pid, signal.SIGKILL)
                raise TimeoutError(f"{arguments} had not ended after {WITHIN_S:g} s")
            code = _number(status)
        finally:
            os.close(status)
        return Ended(code, *((each.seek(0), each.read().decode())[1] for each in (out, err)))


class Running:
    """A forked process that runs, with what is used of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, status: int, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._status = status
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(status, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._status)
        self.returncode = _number(self._status)
        os.close(self._status)
        self._ended.set()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


async def begun(command: list[str], environment: Mapping[str, str]) -> Running | asyncio.subprocess.Process:
    """Fork what `bench.processes.started` would start; start what is no module of Python."""
    if command[:2] != [sys.executable, "-m"]:
        return await started(command, environment)
    output, theirs = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(output, "rb"))
    try:
        pid, status = _fork(command[1:], environment, theirs, theirs)
    finally:
        os.close(theirs)
    return Running(pid, status, reader)


def _fork(arguments: Any, environment: Mapping[str, str], out: int, err: int) -> tuple[int, int]:
    """Return the process's id, and the pipe that will have its exit status."""
    request = json.dumps([list(map(str, arguments)), dict(environment), str(Path.cwd())]).encode()
    assert len(request) < _REQUEST_BYTES_MAX
    status, theirs = os.pipe()
    with _STARTING:  # threads may fork first at once, and `cache` calls for each
        parent = _parent()[0]
    socket.send_fds(parent, [request], [theirs, out, err])
    os.close(theirs)
    return _number(status), status


def _number(pipe: int) -> int:
    number: int = _NUMBER.unpack(os.read(pipe, _NUMBER.size))[0]
    return number


@cache
def _parent() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process that forks; return the way to it, and it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    return ours, process


def _serve(requests: socket.socket) -> tuple[list[str], Mapping[str, str], str, list[int]]:
    """Fork for each request. Return it in the process that was forked; never return in this one."""
    for module in _IMPORTED:
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(module)
    listener = requests.fileno()
    ends = dict[int, tuple[int, int]]()
    """The pid and the pipe to its client, by the descriptor that is readable once the process has ended."""
    while True:
        for ready in select.select([listener, *ends], [], [])[0]:
            if ready != listener:
                os.close(ready)
                pid, status = ends.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, _NUMBER.pack(code))
                os.close(status)
                continue
            request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 3)
            if not request:
                os._exit(0)
            status, *streams = descriptors
            pid = os.fork()
            if not pid:
                for each in (requests.detach(), status, *ends, *(pipe for _, pipe in ends.values())):
                    os.close(each)
                return (*json.loads(request), streams)
            os.write(status, _NUMBER.pack(pid))
            ends[os.pidfd_open(pid)] = pid, status
            for each in streams:
                os.close(each)


def _become(command: list[str], environment: Mapping[str, str], directory: str, streams: list[int]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[0] = directory
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    for target, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, target)
        os.close(stream)
    kind, what, *rest = command
    sys.argv = [what, *rest]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<command>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c`
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except Exception:
        _leave(1)
        raise
    _leave(0)


def _leave(code: int) -> None:
    """Once all threads have ended, end with this code: to take apart what was imported costs half a second."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)


if __name__ == "__main__":
    _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
