"""The listening sockets of an address. Connections are accepted here: asyncio's own server does not count failures.

| the system says | outcome |
|---|---|
| EMFILE, ENFILE, ENOBUFS, ENOMEM | counted and logged; nothing is accepted for `PAUSE_S`: clients wait in the backlog |
| any other error | the client left before it was accepted: counted, and the next one is accepted |

At a stop, connections that the system completed for this socket are accepted before the socket closes; else their
clients would get a reset. If other processes share the port, the socket first drops new SYNs for `HANDSHAKE_S`:
handshakes under way complete here; a dropped SYN is sent again after a second, and then reaches another process.
Source: Linux `net/ipv4/tcp_ipv4.c` (`tcp_filter` on the listener), RFC 6298 (the first retransmission after 1 s).
"""

import asyncio
import ctypes
import errno
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from kv_runtime.clock import Clock
from kv_runtime.telemetry import RateLimitedLog

BACKLOG = 4096
PAUSE_S = 0.1
HANDSHAKE_S = 0.5
_ACCEPTS_A_TURN = 64
"""How many connections are accepted before the event loop gets a turn to serve them."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SO_ATTACH_FILTER = 26
_DROP_SYN = (
    struct.pack("HBBI", 0x30, 0, 0, 13),  # load the byte of flags
    struct.pack("HBBI", 0x54, 0, 0, 0x12),  # keep SYN and ACK
    struct.pack("HBBI", 0x15, 0, 1, 0x02),  # SYN alone?
    struct.pack("HBBI", 0x06, 0, 0, 0),  # drop it
    struct.pack("HBBI", 0x06, 0, 0, 0xFFFFFFFF),  # else keep the packet
)
"""A classic BPF program over the TCP header: a packet that begins a handshake is dropped."""

ACCEPT_ERRORS = ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ECONNABORTED")
"""Errors that metrics show from the start; they show others once these occur."""

_log = structlog.get_logger("http")


class PortUsed(Exception):
    """The address cannot be bound: another process has it, or it is not one of this machine's."""


class Acceptor:
    """Accepts the connections of one address; `take` receives and owns each accepted socket."""

    def __init__(self, take: Callable[[socket.socket], None], clock: Clock | None = None) -> None:
        self._take = take
        self._clock = clock or Clock()
        self._log = RateLimitedLog(_log, self._clock)
        self._sockets: list[socket.socket] = []
        self._is_shared = False
        self._resumption: asyncio.TimerHandle | None = None
        self.port = 0
        """The bound port, also if 0 was given."""
        self.failures: Counter[str] = Counter()
        """Failed accepts by the error's name."""

    async def bind(self, host: str, port: int, *, reuse_port: bool) -> None:
        """Bind the address: from now on the system completes connections, which wait in the backlog until `start`.

        Raises:
            PortUsed: another process has bound the address, or it is not an address of this machine.
        """
        self._is_shared = reuse_port
        self._sockets += await asyncio.to_thread(listening_sockets, host, port, reuse_port=reuse_port)
        self.port = port_of(self._sockets)

    def start(self) -> None:
        """Begin to accept connections."""
        self._resumption = None
        for each in self._sockets:
            asyncio.get_running_loop().add_reader(each, self._accept, each)

    async def stop(self, wait_s: float) -> None:
        """Accept the connections that the system has completed, then close. Takes `wait_s` at most."""
        filtered = [_drops_syn(each) for each in self._sockets] if self._is_shared else [False]
        if all(filtered):
            await self._clock.sleep(min(HANDSHAKE_S, wait_s))
        for each in self._sockets:
            while self._accept(each):
                pass
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        self._pause()
        if self._resumption is not None:
            self._resumption.cancel()
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    def _accept(self, listening: socket.socket) -> bool:
        """Accept waiting connections; return whether there may be more."""
        for _ in range(_ACCEPTS_A_TURN):
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return False
            except OSError as error:
                if self._failed(error):
                    return False
            else:
                accepted.setblocking(False)  # noqa: FBT003 - the system's signature
                self._take(accepted)
        return True

    def _failed(self, error: OSError) -> bool:
        """Count a failure; return whether accepting has to pause."""
        name = errno.errorcode.get(error.errno or 0, "unknown")
        self.failures[name] += 1
        if error.errno not in _EXHAUSTED:
            return False
        self._log.error("accept_failed", key=name, error=name, reason=error.strerror, pause_s=PAUSE_S)
        self._pause()
        if self._resumption is None:
            self._resumption = asyncio.get_running_loop().call_later(PAUSE_S, self.start)
        return True

    def _pause(self) -> None:
        for each in self._sockets:
            asyncio.get_running_loop().remove_reader(each)


def listening_sockets(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Return sockets that listen at each address of the host, all at one port.

    Raises:
        PortUsed: another process has bound the address, or it is not an address of this machine.
    """
    bound = list[socket.socket]()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            place = (str(address[0]), port_of(bound) or port)
            bound.append(socket.create_server(place, family=family, backlog=BACKLOG, reuse_port=reuse_port))
            bound[-1].setblocking(False)  # noqa: FBT003 - the system's signature
    except OSError as error:
        for each in bound:
            each.close()
        reason = str(error.strerror).partition(" (while ")[0]  # without the address, which the library adds
        raise PortUsed(f"port: found {host}:{port}, which cannot be bound ({reason})") from error
    return bound


def port_of(listening: Sequence[socket.socket]) -> int:
    """Return the port that the sockets share; 0: there are no sockets."""
    return int(listening[-1].getsockname()[1]) if listening else 0


def _drops_syn(listening: socket.socket) -> bool:
    """Let the system drop packets that begin a connection; return whether it can (Linux)."""
    if sys.platform != "linux":
        return False
    program = ctypes.create_string_buffer(b"".join(_DROP_SYN))
    try:
        listening.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), ctypes.addressof(program))
        )
    except OSError:
        return False
    return True
