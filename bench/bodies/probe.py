"""What one body does to one process: how long it blocks other answers, its CPU time, and its peak memory.

`/live` is requested over a separate connection, one request after another, by a thread that only sends these.

    pause     the longest wait for an answer, by the clock. On a shared machine most of it is other processes' turns
    held      the most CPU time that the process itself used during one such wait, by the kernel's accounts
              (`schedstat`): what the pause is on a machine that has nothing else to do. Other processes do not count
    memory    what the process had at most beyond what it had before (`VmHWM`, which Linux lets reset)
"""

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

_TIMEOUT_S = 120.0
_RESET_PEAK = "5"
_READ_BYTES = 1 << 16
_NS_PER_S = 1_000_000_000
_SETTLE_S = 0.3
"""How long the probe goes on after the answer: what is freed and forgotten later counts too."""


class Target(NamedTuple):
    """A process, and where it serves."""

    name: str
    url: str
    pid: int


class Probed(NamedTuple):
    """`status` 0: the connection was cut."""

    status: int
    pause_s: float
    held_s: float
    cpu_s: float
    memory_bytes: int


def probe(target: Target, path: str, body: bytes) -> Probed:
    """Return what the body does to the target."""
    process = psutil.Process(target.pid)
    over, waits = threading.Event(), [_Wait(0.0, 0.0)]
    watching = threading.Thread(target=_watch, args=(target, over, waits))
    before_bytes, before_s = _reset_peak(target.pid), _cpu_s(process)
    watching.start()
    try:
        status = _posted(target, path, body)
        time.sleep(_SETTLE_S)
    finally:
        over.set()
        watching.join()
    pause_s, held_s = (max(column) for column in zip(*waits, strict=True))
    memory_bytes = _memory(target.pid, "VmHWM") - before_bytes
    return Probed(status, pause_s, held_s, _cpu_s(process) - before_s, memory_bytes)


class _Wait(NamedTuple):
    """One request for `/live`: how long its answer took, and how much CPU time the process used meanwhile."""

    pause_s: float
    held_s: float


def _watch(target: Target, over: threading.Event, waits: list[_Wait]) -> None:
    question = f"GET /live HTTP/1.1\r\nhost: {urlsplit(target.url).netloc}\r\n\r\n".encode()
    with _connected(target) as connection:
        while not over.is_set():
            used_s, began_s = _used_s(target.pid), time.perf_counter()
            connection.sendall(question)
            _answered(connection)
            waits.append(_Wait(time.perf_counter() - began_s, _used_s(target.pid) - used_s))
            time.sleep(0.0005)


def _posted(target: Target, path: str, body: bytes) -> int:
    lines = (f"POST {path} HTTP/1.1", f"host: {urlsplit(target.url).netloc}", "connection: close")
    head = "\r\n".join((*lines, "content-type: application/json", f"content-length: {len(body)}", "", ""))
    with _connected(target) as connection:
        try:
            connection.sendall(head.encode())
            connection.sendall(body)
        except OSError:
            pass  # it was refused before all of it was sent: the answer has the reason
        try:
            return int(_answered(connection).split(b" ", 2)[1])
        except (OSError, IndexError):
            return 0


def _connected(target: Target) -> socket.socket:
    parts = urlsplit(target.url)
    return socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=_TIMEOUT_S)


def _answered(connection: socket.socket) -> bytes:
    """Return the first bytes of an answer, once its head and a body of a known length are here."""
    data = b""
    while True:
        piece = connection.recv(_READ_BYTES)
        data += piece
        head, end, rest = data.partition(b"\r\n\r\n")
        if not piece:
            return data
        if end:
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if lengths and len(rest) >= int(lengths[0].partition(b":")[2]):
                return data


def _used_s(pid: int) -> float:
    """Return the CPU time of all threads that run, in seconds; Linux accounts it by the nanosecond."""
    used_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended
            used_ns += int((task / "schedstat").read_text().split()[0])
    return used_ns / _NS_PER_S


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _reset_peak(pid: int) -> int:
    """The peak is what the process has now; return that, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
    return _memory(pid, "VmRSS")


def _memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
