"""Ports of 127.0.0.1 that are free."""

import os
import socket
from random import Random

_PORTS = range(20_000, 32_000)
"""Below those that the system gives to connections: a port that is free for a while must stay free."""

_draw = Random(f"{os.getpid()} {os.times().elapsed}")  # noqa: S311 - ports, not secrets
"""One for all calls: two calls in a row must not find the same ports, which are free until they are used."""


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 on which no process listens."""
    held = list[socket.socket]()
    try:
        while len(held) < count:
            probe = socket.socket()
            held.append(probe)
            try:
                probe.bind(("127.0.0.1", _draw.choice(_PORTS)))
            except OSError:
                held.pop().close()
        return [probe.getsockname()[1] for probe in held]
    finally:
        for probe in held:
            probe.close()
