"""The load of the index bench: equal seeds give equal hashes, for every subject. Standard library only.

chain    blocks of one sequence, one behind the other: random u64s
event    some blocks of a chain, stored together
request  a step of the trace's replay (see `schedule.py`), which comes in a file
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import shake_128
from pathlib import Path
from typing import NamedTuple

CHAIN_BLOCKS = 512
SIDE_BY_SIDE = 64
"""So many sequences grow at a time: one event of each, then the next of each."""
_KEY = struct.Struct("<QQ")


class ScheduledStore(NamedTuple):
    """`rank` holds `hashes` (u64s, little-endian) behind `parent`; `start` blocks of the chain come before them."""

    rank: int
    parent: int | None
    start: int
    hashes: bytes


class ScheduledRequest(NamedTuple):
    """One request of a schedule: matched, then computed by `rank`, which had `hit` blocks and let go of `evicted`."""

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
    """Yield the events of chains that grow side by side; chain n is the cache of rank n mod `ranks`."""
    for first in range(0, len(chains), SIDE_BY_SIDE):
        group = {number: chain(seed, number) for number in chains[first : first + SIDE_BY_SIDE]}
        for start in range(0, CHAIN_BLOCKS, event_blocks):
            for number, chain_hashes in group.items():
                parent = last(chain_hashes[: 8 * start]) if start else None
                yield ScheduledStore(
                    number % ranks, parent, start, chain_hashes[8 * start : 8 * (start + event_blocks)]
                )


def write_requests(path: Path, requests: Iterator[ScheduledRequest]) -> int:
    """Write a schedule, for each request 4 u64s (rank, hit, blocks, evicted) and the blocks; return how many."""
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
