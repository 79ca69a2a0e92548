"""Which answers of a soak count as hit by a kill. Only those may end with an error event, if they cannot migrate."""

import asyncio

import pytest

from bench.soak.clients import SoakConnection
from bench.soak.requests import KINDS, SoakRequest

HEAD = b"HTTP/1.1 200 OK\r\nx-worker-instance-id: w1\r\ntransfer-encoding: chunked\r\n\r\n"
REST = b"0\r\n\r\n"
REQUEST = SoakRequest(KINDS[0], b"", status=200, texts=(), tokens=0)


class Nowhere(asyncio.Transport):
    """Keeps nothing of what is written."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take the bytes."""


@pytest.fixture
def connection() -> SoakConnection:
    made = SoakConnection()
    made.connection_made(Nowhere())
    return made


@pytest.mark.parametrize("relayed_before", [b"", HEAD[:20], HEAD])
async def test_an_answer_is_hit_wherever_it_is_when_its_worker_is_killed(
    connection: SoakConnection, relayed_before: bytes
) -> None:
    ended = connection.send(REQUEST)
    connection.data_received(relayed_before)
    connection.hit("w1")
    connection.data_received((HEAD + REST)[len(relayed_before) :])
    assert (await ended, connection.was_hit) == ("complete", True)


async def test_the_kill_of_another_worker_hits_no_answer(connection: SoakConnection) -> None:
    connection.send(REQUEST)
    connection.hit("w0")
    connection.data_received(HEAD + REST)
    assert not connection.was_hit


async def test_a_kill_hits_neither_the_answer_before_nor_the_next(connection: SoakConnection) -> None:
    connection.send(REQUEST)
    connection.data_received(HEAD + REST)
    connection.hit("w1")
    assert not connection.was_hit
    connection.send(REQUEST)
    connection.data_received(HEAD + REST)
    assert not connection.was_hit
