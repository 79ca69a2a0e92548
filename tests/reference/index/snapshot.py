"""Snapshots of a reference index, with bodies as `indexer/index/snapshot.py` describes them."""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from indexer.index.prefix_index import RANKS_MAX
from indexer.index.snapshot import HEAD_BYTES
from kv_protocol.codec import pack_u64, unpack_u64
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS
from tests.reference.index.nodes import Forest, Node, RankHolding

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_RUN = struct.Struct("<BQIdI")
_HAS_PARENT, _PARENT_UNKNOWN = 1, 2

Holders = tuple[tuple[int, int], ...]
"""(rank, tier bits) of the holders of a run, by rank ascending."""


class SavedRun(NamedTuple):
    """Consecutive blocks. Without a parent they begin a sequence, unless `parent_known` is False."""

    parent: int | None
    parent_known: bool
    holders: Holders
    last_stored_s: float
    hashes: Sequence[int]


class Snapshot(NamedTuple):
    """The contents of a body."""

    ranks: Sequence[int]
    runs: Sequence[SavedRun]


def write_body(snapshot: Snapshot) -> bytes:
    """Encode a snapshot as a body."""
    sets: dict[Holders, int] = {}
    for run in snapshot.runs:
        if run.holders:
            sets.setdefault(run.holders, len(sets) + 1)
    parts = [_U32.pack(len(snapshot.ranks)), *map(_U32.pack, snapshot.ranks), _U32.pack(len(sets))]
    for holders in sets:
        parts += [_U32.pack(len(holders)), *(_U32.pack(rank << 4 | bits) for rank, bits in holders)]
    parts.append(_U64.pack(len(snapshot.runs)))
    for run in snapshot.runs:
        flags = _HAS_PARENT if run.parent is not None else 0 if run.parent_known else _PARENT_UNKNOWN
        number = sets[run.holders] if run.holders else 0
        parts += [_RUN.pack(flags, run.parent or 0, number, run.last_stored_s, len(run.hashes)), pack_u64(run.hashes)]
    parts.append(_U32.pack(0))
    return b"".join(parts)


def read_body(body: memoryview) -> Snapshot:
    """Decode a body; raise `MalformedMessage` if it contradicts itself, or is cut or too long."""
    return _BodyReader(body).snapshot()


class _BodyReader:
    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0
        self._ranks: list[int] = []
        self._sets: list[Holders] = [()]
        self._hashes: set[int] = set()

    def snapshot(self) -> Snapshot:
        """Decode all of the body."""
        for _ in range(self._count(_U32, _U32.size)):
            at, (rank,) = self._at, self._read(_U32)
            self._expect(max(self._ranks, default=-1) < rank < RANKS_MAX, at, "a rank beyond 4095, or not ascending")
            self._ranks.append(rank)
        for _ in range(self._count(_U32, 2 * _U32.size)):
            self._sets.append(self._read_set())
        runs = self._read_runs()
        at, (reserved,) = self._at, self._read(_U32)
        self._expect(not reserved, at, "reserved is not 0")
        self._expect(self._at == len(self._body), self._at, "bytes after the end")
        return Snapshot(self._ranks, runs)

    @staticmethod
    def _expect(is_so: object, at: int, otherwise: str) -> None:
        if not is_so:
            raise MalformedMessage(HEAD_BYTES + at, otherwise)

    def _read(self, fields: struct.Struct) -> tuple[int, ...]:
        self._expect(len(self._body) - self._at >= fields.size, self._at, "the body is cut")
        self._at += fields.size
        return fields.unpack_from(self._body, self._at - fields.size)

    def _count(self, field: struct.Struct, bytes_each: int) -> int:
        """Read a count of items of at least `bytes_each` each."""
        at, (count,) = self._at, self._read(field)
        self._expect(count * bytes_each <= len(self._body) - self._at, at, "a count of more than follows")
        return count

    def _read_set(self) -> Holders:
        at, members = self._at, self._count(_U32, _U32.size)
        self._expect(members, at, "a set without members")
        holders: list[tuple[int, int]] = []
        for _ in range(members):
            at, (member,) = self._at, self._read(_U32)
            rank, bits = member >> 4, member & 15
            is_next = bits and (not holders or rank > holders[-1][0])
            self._expect(is_next, at, "a member without a tier, or not by rank ascending")
            self._expect(rank in self._ranks, at, "a rank that is not one of the ranks")
            holders.append((rank, bits))
        return tuple(holders)

    def _read_runs(self) -> list[SavedRun]:
        runs: list[SavedRun] = []
        ends: dict[int, int] = {}  # last block of a run without holders -> offset of the run
        for _ in range(self._count(_U64, _RUN.size + 8)):
            at = self._at
            runs.append(run := self._read_run())
            if not run.holders:
                ends[run.hashes[-1]] = at
        parents = {run.parent for run in runs}
        for block, at in ends.items():
            self._expect(block in parents, at, "a run that no rank holds, and no block follows")
        return runs

    def _read_run(self) -> SavedRun:
        at = self._at
        flags, parent, number, last_stored_s, n = self._read(_RUN)
        self._expect(flags in (0, _HAS_PARENT, _PARENT_UNKNOWN), at, "flags beyond 2")
        is_known = parent in self._hashes if flags == _HAS_PARENT else not parent
        self._expect(is_known, at + 1, "a parent that is in no run before, or of a run without a known one")
        self._expect(number < len(self._sets), at + 9, "a set that there is not")
        self._expect(math.isfinite(last_stored_s), at + 13, "last_stored_s is no number")
        at, left = self._at, len(self._body) - self._at
        self._expect(1 <= n <= left // 8, at - _U32.size, "no blocks, or more than follow")
        self._at += 8 * n
        hashes = unpack_u64(self._body[at : self._at])
        for index, sequence_hash in enumerate(hashes):
            self._expect(sequence_hash not in self._hashes, at + 8 * index, "a sequence hash that stands twice")
            self._hashes.add(sequence_hash)
        known = parent if flags == _HAS_PARENT else None
        return SavedRun(known, flags != _PARENT_UNKNOWN, self._sets[number], last_stored_s, hashes)


def children_of(forest: Forest, sequence_hash: int | None) -> list[int]:
    """Return the blocks whose parent is `sequence_hash` (None: those without a known one), ascending."""
    return sorted(block for block, node in forest.items() if node.parent == sequence_hash)


def walk(forest: Forest) -> Iterator[list[int]]:
    """Yield every node once, in chains of equal holders without a fork, each after the one that its parent is in."""
    behind: dict[int | None, list[int]] = {}
    for block, node in forest.items():
        behind.setdefault(node.parent, []).append(block)
    pending = list(behind.get(None, ()))
    while pending:
        first = pending.pop()
        hashes, after = [first], behind.get(first, [])
        while len(after) == 1 and forest[after[0]].holders == forest[first].holders:
            hashes.append(after[0])
            after = behind.get(hashes[-1], [])
        yield hashes
        pending += after


def saved(forest: Forest, ranks: Iterable[int]) -> Snapshot:
    """Return the state as a snapshot."""
    return Snapshot(sorted(ranks), [_saved_run(forest, hashes) for hashes in walk(forest)])


def _saved_run(forest: Forest, hashes: list[int]) -> SavedRun:
    first = forest[hashes[0]]
    holders = tuple(first.holder_bits().items())
    return SavedRun(
        first.parent, first.parent_known, holders, max(forest[block].last_stored_s for block in hashes), hashes
    )


def rebuilt(snapshot: Snapshot) -> tuple[Forest, dict[int, RankHolding]]:
    """Return the nodes and the ranks of a snapshot."""
    forest, ranks = Forest(), {rank: RankHolding() for rank in snapshot.ranks}
    for run in snapshot.runs:
        parent, parent_known = run.parent, run.parent_known
        for sequence_hash in run.hashes:
            node = forest[sequence_hash] = Node(parent, run.last_stored_s, parent_known=parent_known)
            if parent is not None:
                forest[parent].child_count += 1
            _hold(sequence_hash, node, run, ranks)
            parent, parent_known = sequence_hash, True
    return forest, ranks


def _hold(sequence_hash: int, node: Node, run: SavedRun, ranks: Mapping[int, RankHolding]) -> None:
    for rank, bits in run.holders:
        for tier in TIERS:
            if bits >> tier & 1:
                node.holders[tier] |= 1 << rank
                ranks[rank].add(sequence_hash, tier)
