"""Processes that share an index, forked from one that does nothing else: a writer, and readers."""

import os
import signal
from array import array
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from indexer.follow.status_writer import SharedNames
from indexer.native._core import Reader, SharedRegion
from indexer.native.index import NativeIndex
from kv_protocol.codec import pack_u64
from kv_protocol.recovery import BlockColumns
from kv_protocol.splitmix import splitmix64

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

READERS = 2
REGION_BYTES = 256 << 20
BLOCKS = 100_000
"""Of a chain: to hold or to match them takes far longer than all else that a process of these does."""
FORK = get_context("fork")
END_S = 60.0

SHARED_NAMES = msgspec.msgpack.encode(SharedNames(slots=[("a", 0, 0)]))

Work = Callable[[SharedRegion, Connection], None]


class Chain(NamedTuple):
    """One prefix as a rank's dump and as a query."""

    rows: BlockColumns
    query: bytes


def chain(seed: int, blocks: int = BLOCKS) -> Chain:
    """Return a prefix of so many blocks."""
    hashes = [splitmix64(seed << 32 | at) for at in range(blocks)]
    tiers = bytes([1]) + bytes([0x81]) * (blocks - 1)
    return Chain(BlockColumns(pack_u64([0, *hashes[:-1]]), pack_u64(hashes), tiers), pack_u64(hashes))


class Child:
    """A forked process that does `work`, and the pipe to it."""

    def __init__(self, region: SharedRegion, work: Work) -> None:
        self.pipe, other = FORK.Pipe()
        self.process: ForkProcess = FORK.Process(target=work, args=(region, other))
        self.process.start()
        other.close()  # so that the end of the process is heard

    def heard(self) -> object:
        """Return what the process says next."""
        if not self.pipe.poll(END_S):
            self.kill()
            raise AssertionError("a process says nothing")
        return self.pipe.recv()

    def kill(self) -> None:
        """End the process at once, wherever it is."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def writing(region: SharedRegion) -> NativeIndex:
    """Return a new writer's index, not yet published, of one rank."""
    region.begin_writing()
    index = NativeIndex(memory_bytes_max=REGION_BYTES, region=region)
    index.register(0)
    index.write_names(SHARED_NAMES)
    return index


def depth(reader: Reader, query: bytes) -> int | None:
    """Return how many blocks of the query rank 0 holds; None: nothing is known."""
    out = array("i", bytes(16))
    names_version, _, _ = reader.match(query, out)
    return out[3] if names_version else None
