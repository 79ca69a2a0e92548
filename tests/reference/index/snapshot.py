"""Converts between the state of a reference index and a snapshot.

Bodies are read and written as `indexer/index/snapshot.py` describes them; the index itself does it in C++.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from indexer.index.prefix_index import RANK_MAX
from indexer.index.snapshot import HEAD_BYTES
from kv_protocol.codec import pack_u64, unpack_u64
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Tier
from tests.reference.index.state import Forest, Node, ParkedBlocks, RankHolding, walk

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_RUN, _PARKED = struct.Struct("<BQIdI"), struct.Struct("<IBQQ")
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


class SavedParked(NamedTuple):
    """A block that waits for its parent."""

    rank: int
    tier: Tier
    parent: int
    sequence_hash: int


class Snapshot(NamedTuple):
    """The contents of a body."""

    ranks: Sequence[int]
    runs: Sequence[SavedRun]
    parked: Sequence[SavedParked]


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
    parts.append(_U32.pack(len(snapshot.parked)))
    parts += [_PARKED.pack(*each) for each in snapshot.parked]
    return b"".join(parts)


def read_body(body: memoryview) -> Snapshot:
    """Decode a body; raise `MalformedMessage` if it contradicts itself, or is cut or too long."""
    return _BodyReader(body).snapshot()


class _BodyReader:
    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0
        self._ranks: dict[int, None] = {}
        self._sets: list[Holders] = [()]
        self._hashes: set[int] = set()
        self._parents: set[int] = set()

    def snapshot(self) -> Snapshot:
        """Decode all of the body."""
        self._ranks = dict.fromkeys(self._read_ranks())
        self._sets += [self._read_set() for _ in range(self._count(_U32, 2 * _U32.size, "sets"))]
        runs = self._read_runs()
        parked = self._read_parked()
        if self._at != len(self._body):
            raise self._refusal(self._at, f"{len(self._body) - self._at} bytes after the last parked block")
        return Snapshot(tuple(self._ranks), runs, parked)

    @staticmethod
    def _refusal(at: int, reason: str) -> MalformedMessage:
        return MalformedMessage(HEAD_BYTES + at, reason)

    def _read(self, fields: struct.Struct, what: str) -> tuple[int, ...]:
        left = len(self._body) - self._at
        if left < fields.size:
            raise self._refusal(self._at, f"{left} bytes left, {what} need {fields.size}")
        values = fields.unpack_from(self._body, self._at)
        self._at += fields.size
        return values

    def _count(self, field: struct.Struct, bytes_each: int, what: str) -> int:
        """Read a count of items of at least `bytes_each` each."""
        at = self._at
        (count,) = self._read(field, f"the count of {what}")
        if count * bytes_each > len(self._body) - self._at:
            raise self._refusal(at, f"{count} {what}, only {len(self._body) - self._at} bytes follow")
        return count

    def _read_ranks(self) -> list[int]:
        ranks: list[int] = []
        for _ in range(self._count(_U32, _U32.size, "ranks")):
            at = self._at
            (rank,) = self._read(_U32, "a rank")
            if rank > RANK_MAX or (ranks and rank <= ranks[-1]):
                raise self._refusal(at, f"rank {rank}, allowed 0..{RANK_MAX}, ascending")
            ranks.append(rank)
        return ranks

    def _read_set(self) -> Holders:
        at, members = self._at, self._count(_U32, _U32.size, "members")
        if not members:
            raise self._refusal(at, "a set without members")
        holders: list[tuple[int, int]] = []
        for _ in range(members):
            at = self._at
            (member,) = self._read(_U32, "a member")
            rank, bits = member >> 4, member & 15
            if not bits or (holders and rank <= holders[-1][0]):
                raise self._refusal(at, f"member {member:#x}, allowed with a tier, by rank ascending")
            self._check_rank(rank, at)
            holders.append((rank, bits))
        return tuple(holders)

    def _check_rank(self, rank: int, at: int) -> None:
        if rank not in self._ranks:
            raise self._refusal(at, f"rank {rank} is not one of the {len(self._ranks)} ranks")

    def _read_runs(self) -> list[SavedRun]:
        runs: list[SavedRun] = []
        ends: dict[int, int] = {}  # last block of a run without holders -> offset of the run
        for _ in range(self._count(_U64, _RUN.size + 8, "runs")):
            at = self._at
            run = self._read_run()
            runs.append(run)
            if not run.holders:
                ends[run.hashes[-1]] = at
        for block, at in ends.items():
            if block not in self._parents:
                raise self._refusal(at, "no rank holds the last block of the run, and no block follows it")
        return runs

    def _read_run(self) -> SavedRun:
        at = self._at
        flags, parent, number, last_stored_s, n = self._read(_RUN, "the fields of a run")
        if flags not in (0, _HAS_PARENT, _PARENT_UNKNOWN):
            raise self._refusal(at, f"flags {flags:#x}, allowed 0, 1 or 2")
        if parent and not flags & _HAS_PARENT:
            raise self._refusal(at + 1, f"parent {parent} of a run without a known one")
        if flags & _HAS_PARENT and parent not in self._hashes:
            raise self._refusal(at + 1, f"parent {parent} is in no run before")
        if number >= len(self._sets):
            raise self._refusal(at + 9, f"set {number}, there are {len(self._sets) - 1}")
        if not math.isfinite(last_stored_s):
            raise self._refusal(at + 13, f"last_stored_s is {last_stored_s}")
        hashes = self._read_hashes(n)
        if flags & _HAS_PARENT:
            self._parents.add(parent)
        known = flags != _PARENT_UNKNOWN
        return SavedRun(parent if flags & _HAS_PARENT else None, known, self._sets[number], last_stored_s, hashes)

    def _read_hashes(self, n: int) -> tuple[int, ...]:
        at, left = self._at, len(self._body) - self._at
        if not 1 <= n <= left // 8:
            raise self._refusal(at - _U32.size, f"n is {n} blocks, allowed 1 or more, {left // 8} follow")
        self._at += 8 * n
        hashes = unpack_u64(self._body[at : self._at])
        for index, sequence_hash in enumerate(hashes):
            if sequence_hash in self._hashes:
                raise self._refusal(at + 8 * index, f"sequence hash {sequence_hash} stands twice")
            self._hashes.add(sequence_hash)
        return hashes

    def _read_parked(self) -> list[SavedParked]:
        parked: list[SavedParked] = []
        seen: set[tuple[int, int, int]] = set()
        for _ in range(self._count(_U32, _PARKED.size, "parked blocks")):
            at = self._at
            rank, tier, parent, sequence_hash = self._read(_PARKED, "a parked block")
            self._check_rank(rank, at)
            if tier >= len(TIERS):
                raise self._refusal(at + 4, f"tier {tier}, allowed 0..{len(TIERS) - 1}")
            if parent in self._hashes:
                raise self._refusal(at + 5, f"parent {parent} of a parked block is in a run")
            if (rank, tier, sequence_hash) in seen:
                raise self._refusal(at, f"sequence hash {sequence_hash} is parked twice")
            seen.add((rank, tier, sequence_hash))
            parked.append(SavedParked(rank, TIERS[tier], parent, sequence_hash))
        return parked


def saved(forest: Forest, ranks: Iterable[int], parked: ParkedBlocks) -> Snapshot:
    """Return the state as a snapshot."""
    return Snapshot(
        sorted(ranks),
        [_saved_run(forest, hashes) for hashes in walk(forest)],
        [SavedParked(block.rank, block.tier, parent, block.sequence_hash) for block, parent in parked.waiting()],
    )


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
