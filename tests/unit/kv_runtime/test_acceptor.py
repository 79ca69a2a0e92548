"""Acceptors that share a listening socket, as serving processes do."""

import asyncio
import socket
from contextlib import ExitStack

from kv_runtime.http.acceptor import Acceptor, listening_sockets, port_of

BURST = 40


async def test_a_burst_of_connections_is_shared_by_all_that_accept_from_the_socket() -> None:
    listening = listening_sockets("127.0.0.1", 0)
    taken: list[list[socket.socket]] = [[], []]
    acceptors = [Acceptor(each.append) for each in taken]
    with ExitStack() as opened:
        for each in acceptors:
            each.adopt([one.dup() for one in listening])
            opened.callback(each.close)
        for _ in range(BURST):
            opened.enter_context(socket.create_connection(("127.0.0.1", port_of(listening))))
        for each in acceptors:
            each.start()
        while sum(map(len, taken)) < BURST:  # noqa: ASYNC110 - callbacks of the loop itself
            await asyncio.sleep(0)
        for one in [*listening, *taken[0], *taken[1]]:
            opened.enter_context(one)
    assert [len(each) for each in taken] == [BURST / 2, BURST / 2]
