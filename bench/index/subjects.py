"""The measured indexes, as steps that are prepared before the clock starts, and their load. Standard library only.

A step is the name of a call and its arguments, in the form that the index takes them; `bind` turns steps into calls on
the current index. So the clock measures only the index and the loop.

    buffers, lists, messages   ours, by the form of a hash; a message is a canonical batch
    json                       the peer's: events as JSON, queries as lists

Equal seeds give equal hashes, for every subject:

chain    blocks of one sequence, one after the other: random u64s
event    some blocks of a chain, stored together
request  a step of the trace's replay (see `command.py`), which comes in a file
"""

import json
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import shake_128
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

CHAIN_BLOCKS = 512
SIDE_BY_SIDE = 64
"""How many sequences grow at a time: one event of each, then the next of each."""
_KEY = struct.Struct("<QQ")


class ScheduledStore(NamedTuple):
    """`rank` holds `hashes` (u64s, little-endian) after `parent`; `start` blocks of the chain come before them."""

    rank: int
    parent: int | None
    start: int
    hashes: bytes


class ScheduledRequest(NamedTuple):
    """One request of a schedule: matched, then computed by `rank`, which held `hit` blocks and evicted `evicted`."""

    rank: int
    hit: int
    hashes: bytes
    evicted: bytes


def chain(seed: int, number: int, blocks: int = CHAIN_BLOCKS) -> bytes:
    """Return the `number`-th chain of a seed; a shorter one is the beginning of a longer one."""
    return shake_128(_KEY.pack(seed, number)).digest(8 * blocks)


def numbers(hashes: bytes) -> list[int]:
    """Return the u64s of a buffer."""
    return list(struct.unpack(f"<{len(hashes) // 8}Q", hashes))


def pack(hashes: Sequence[int]) -> bytes:
    """Return u64s as a buffer."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def last(hashes: bytes) -> int:
    """Return the last u64 of a buffer."""
    return int.from_bytes(hashes[-8:], "little")


def events(seed: int, chains: range, event_blocks: int, ranks: int) -> Iterator[ScheduledStore]:
    """Yield the events of chains that grow side by side; rank n mod `ranks` holds chain n."""
    for first in range(0, len(chains), SIDE_BY_SIDE):
        group = {number: chain(seed, number) for number in chains[first : first + SIDE_BY_SIDE]}
        for start in range(0, CHAIN_BLOCKS, event_blocks):
            for number, chain_hashes in group.items():
                parent = last(chain_hashes[: 8 * start]) if start else None
                yield ScheduledStore(
                    number % ranks, parent, start, chain_hashes[8 * start : 8 * (start + event_blocks)]
                )


def write_requests(path: Path, requests: Iterator[ScheduledRequest]) -> int:
    """Write a schedule: each request's 4 u64s (rank, hit, blocks, evicted) and its hashes; return how many requests."""
    count = 0
    with path.open("wb") as file:
        for rank, hit, hashes, evicted in requests:
            file.write(struct.pack("<4Q", rank, hit, len(hashes) // 8, len(evicted) // 8) + hashes + evicted)
            count += 1
    return count


def read_requests(path: Path) -> Iterator[ScheduledRequest]:
    """Yield the requests of a file that `write_requests` wrote."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        rank, hit, blocks, evicted = struct.unpack_from("<4Q", data, at)
        at, middle = at + 32 + 8 * (blocks + evicted), at + 32 + 8 * blocks
        yield ScheduledRequest(rank, hit, data[middle - 8 * blocks : middle], data[middle:at])


PEER_PACKAGE = "ai-dynamo-runtime"
_TO_LOCAL = 0x9E37_79B9_7F4A_7C15
"""A block's local hash, for the peer: its sequence hash with these bits flipped, so that equal prefixes stay equal."""


Call = Callable[[], object]


class IndexCall(NamedTuple):
    """One call, not yet bound to an index."""

    name: str
    arguments: tuple[Any, ...]


class Ours:
    """Our index. `shape` is buffers, lists or messages."""

    def __init__(self, shape: str) -> None:
        self._make = import_module("indexer.native.index").NativeIndex
        self._shape = shape
        self._hashes: Callable[[bytes], Any] = numbers if shape == "lists" else bytes
        self._codec = import_module("kv_protocol.codec")
        self._events = import_module("kv_protocol.events")
        self._gpu = self._events.Tier.GPU

    def fresh(self, ranks: int, capacity_blocks: int) -> None:
        """Make a new index."""
        self.index = self._make()
        self._out = array("i", bytes(4 * 4 * ranks))
        for rank in range(ranks):
            self.index.register(rank, capacity_blocks)

    def store(self, event: ScheduledStore) -> IndexCall:
        """Return the step that stores."""
        if self._shape == "messages":
            stored = self._events.Stored(tuple(numbers(event.hashes)), event.parent, event.start)
            return self._message(event.rank, stored)
        return IndexCall("store", (event.rank, event.parent, self._hashes(event.hashes), self._gpu, 0.0))

    def remove(self, rank: int, hashes: bytes) -> IndexCall:
        """Return the step that removes."""
        if self._shape == "messages":
            return self._message(rank, self._events.Removed(tuple(numbers(hashes))))
        return IndexCall("remove", (rank, self._hashes(hashes), self._gpu))

    def match(self, hashes: bytes) -> IndexCall:
        """Return the step that queries; a buffer gets the depths."""
        return IndexCall("match", (self._hashes(hashes), self._out))

    def bind(self, steps: Iterable[IndexCall]) -> list[Call]:
        """Return calls on the current index."""
        index = self.index
        bound = {name: getattr(index, name) for name in ("store", "remove", "apply_batch", "match")}
        return [partial(bound[step.name], *step.arguments) for step in steps]

    def depths(self, hashes: bytes) -> dict[int, int]:
        """Return the depth of each rank on all tiers together; ranks without a block are left out."""
        self.index.match(hashes, self._out)
        return {rank: depth for rank, depth in enumerate(self._out[-len(self._out) // 4 :]) if depth}

    def _message(self, rank: int, event: object) -> IndexCall:
        batch = self._events.Batch(1, 1, event)
        return IndexCall("apply_batch", (rank, self._codec.encode_message([batch]), 0.0))


class PeerTree:
    """The peer's radix tree; ranks are its workers. It is given JSON that is made before the clock starts."""

    def __init__(self) -> None:
        self._make = import_module("dynamo._core").RadixTree

    def fresh(self, ranks: int, capacity_blocks: int) -> None:
        """Make a new tree, which needs no registration of ranks."""
        del ranks, capacity_blocks
        self._tree = self._make()

    def store(self, event: ScheduledStore) -> IndexCall:
        """Return the step that stores."""
        pairs = ((each, each ^ _TO_LOCAL) for each in numbers(event.hashes))
        blocks = ",".join('{"block_hash":%d,"tokens_hash":%d}' % pair for pair in pairs)  # noqa: UP031 - twice as fast
        parent = json.dumps(event.parent)
        return _peer_event(event.rank, f'"stored":{{"parent_hash":{parent},"blocks":[{blocks}]}}')

    def remove(self, rank: int, hashes: bytes) -> IndexCall:
        """Return the step that removes."""
        return _peer_event(rank, f'"removed":{{"block_hashes":[{",".join(map(str, numbers(hashes)))}]}}')

    def match(self, hashes: bytes) -> IndexCall:
        """Return the step that queries the scores as a dict."""
        return IndexCall("match", ([each ^ _TO_LOCAL for each in numbers(hashes)],))

    def bind(self, steps: Iterable[IndexCall]) -> list[Call]:
        """Return calls on the current tree."""
        find = self._tree.find_matches
        bound = {"apply": self._tree.apply_event, "match": lambda hashes: find(hashes).scores}
        return [partial(bound[step.name], *step.arguments) for step in steps]

    def depths(self, hashes: bytes) -> dict[int, int]:
        """Return the depth of each worker, which is its score; workers without a block are left out."""
        (match,) = self.bind([self.match(hashes)])
        scores: Any = match()
        return {worker: depth for (worker, _), depth in scores.items() if depth}


def _peer_event(rank: int, data: str) -> IndexCall:
    return IndexCall("apply", (rank, f'{{"event_id":1,"data":{{{data}}}}}'.encode()))


Subject = Ours | PeerTree
"""An index under measurement. `fresh` makes it, and has to be called first."""


def subject(name: str, shape: str) -> Subject:
    """Return the subject `name` (native or peer); ours gets its hashes in the form `shape`."""
    return PeerTree() if name == "peer" else Ours(shape)
