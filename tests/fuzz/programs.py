"""Runs the fuzzers' inputs on any prefix index, as `fuzz_apply_batch.cpp` and `fuzz_restore.cpp` interpret them.

Memory limits are ignored: implementations differ in their memory. libFuzzer keeps inputs that cover new code of the
native tree, so a few inputs cover most of it.
"""

import struct
from collections.abc import Callable
from typing import Protocol

import msgspec

from indexer.index.prefix_index import PrefixIndex
from indexer.index.snapshot import seal, unseal
from kv_protocol.codec import pack_u64
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Tier
from kv_protocol.recovery import HeldBlock
from kv_protocol.splitmix import splitmix64
from tests.contract.indexes import overlaps, whole_tree
from tests.reference.index.snapshot import read_body

_ODD_HASHES = (0, 2**64 - 1, 1, 2**32 - 1, 2**63, 2**32)
_HEAD = struct.Struct("<BBBBQQQqQII")
_STORED, _CLEARED = 0, 2
_ALL_TIERS = 15
_ODD_FORMS = 0xE0
"""Forms of events from here on may be of no event: one such refuses its message."""


class MakeIndex(Protocol):
    """The constructor of an implementation."""

    def __call__(self) -> PrefixIndex:
        """Return an empty index."""


Outcome = object
"""The result or error of an operation, as far as implementations must agree on it."""
Operation = Callable[[int], Outcome]
"""An operation of a program on a rank."""


def restored(make_index: MakeIndex, data: bytes) -> tuple[PrefixIndex, list[Outcome]]:
    """Restore an index from the body of a snapshot behind the first byte; return it with the outcome."""
    index = make_index()
    try:
        index.restore(seal(data[1:]))
    except MalformedMessage as error:
        return index, [error.offset]
    return index, []


class Program:
    """An input of `fuzz_apply_batch.cpp`, and the index that it changes."""

    def __init__(self, make_index: MakeIndex, data: bytes) -> None:
        self._data, self._at, self._now_s = data, 0, 0.0
        self._byte()
        self.index = make_index()
        self._ops: dict[int, Operation] = {
            0: lambda rank: self._apply(rank, self._bytes(self._byte() | self._byte() << 8)),
            **dict.fromkeys((1, 2, 3), lambda rank: self._apply(rank, self._message())),
            **dict.fromkeys((4, 5, 6), self._store),
            **dict.fromkeys((7, 8), self._remove),
            9: self.index.drop,
            10: self._clear,
            11: self._register,
            12: lambda _: self.index.restore(self.index.snapshot()),
            13: self._wait,
        }
        for rank in range(2):
            self.index.register(rank)

    def run(self) -> list[Outcome]:
        """Run all operations; return their outcomes."""
        outcomes: list[Outcome] = []
        while self._at < len(self._data):
            op, rank = self._ops.get(self._byte() % 16, self._look), self._rank(self._byte())
            try:
                outcomes.append(op(rank))
            except KeyError:
                outcomes.append("unknown rank")
            except MalformedMessage:
                outcomes.append("malformed")
        return outcomes

    @staticmethod
    def _rank(choice: int) -> int:
        return 319 if choice == 0xFF else 64 if choice % 8 == 7 else choice % 8  # as in C++

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def _bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        self._at = min(self._at + size, len(self._data))
        return found

    @staticmethod
    def _hash(number: int) -> int:
        return _ODD_HASHES[number] if number < len(_ODD_HASHES) else splitmix64(number)

    def _hashes(self, count: int) -> list[int]:
        first = self._byte()
        return [self._hash((first + at) & 0xFF) for at in range(count)]

    def _message(self) -> bytes:
        count = self._byte() % 4
        message = count.to_bytes(2, "little")
        for at in range(count):
            form = self._byte()
            kind, tier, has_parent = form & 3, (form >> 2 & 7) % 5, form >> 5 & 1
            if form < _ODD_FORMS:
                kind, tier = kind % 3, tier % 4
                has_parent &= kind == _STORED
            hashes = self._hashes(0 if kind == _CLEARED else self._byte() % 32)
            parent = self._hash(self._byte()) if has_parent else 0
            head = _HEAD.pack(1, kind, tier, has_parent, 1, at + 1, 0, 0, parent, has_parent, len(hashes))
            message += head + pack_u64(hashes)
        return message

    def _apply(self, rank: int, message: bytes) -> Outcome:
        return self.index.apply_batch(rank, message, self._now_s)

    def _store(self, rank: int) -> None:
        form = self._byte()
        parent = self._hash(self._byte()) if form & 1 else None
        self.index.store(rank, parent, self._hashes(form >> 3), TIERS[form >> 1 & 3], self._now_s)

    def _remove(self, rank: int) -> None:
        form = self._byte()
        self.index.remove(rank, self._hashes(form >> 2), TIERS[form & 3])

    def _clear(self, rank: int) -> None:
        bits = self._byte() & _ALL_TIERS
        self.index.digest(rank, Tier.GPU)  # a known rank, even if nothing is cleared
        for tier in (None,) if bits == _ALL_TIERS else [tier for tier in TIERS if bits >> tier & 1]:
            self.index.clear(rank, tier)

    def _register(self, rank: int) -> None:
        self.index.register(rank, (self._byte() | self._byte() << 8) if self._byte() % 4 == 0 else 0)

    def _wait(self, _: int) -> None:
        self._now_s += self._byte() / 16

    def _look(self, _: int) -> Outcome:
        hashes = self._hashes(self._byte() % 32)
        return overlaps(self.index, hashes), [(self.index.children(each), self.index.holders(each)) for each in hashes]


def _known(index: PrefixIndex) -> dict[str, Outcome]:
    """Return the state on which implementations must agree; not store times, which are upper bounds."""
    saved = read_body(unseal(index.snapshot()))
    return {
        "ranks": saved.ranks,
        "digests": [index.digest(rank, tier) for rank in saved.ranks for tier in TIERS],
        "dumps": [_dumped(index, rank) for rank in saved.ranks],
        "tree": whole_tree(index),
        "statistics": msgspec.structs.replace(index.statistics(), memory_bytes=0),
    }


def _dumped(index: PrefixIndex, rank: int) -> dict[int, HeldBlock]:
    return {block.sequence_hash: block for columns in index.dump(rank) for block in columns.blocks()}


def _did(fuzzer: str, make_index: MakeIndex, data: bytes) -> dict[str, Outcome]:
    if fuzzer == "restore":
        index, outcomes = restored(make_index, data)
    else:
        program = Program(make_index, data)
        outcomes, index = program.run(), program.index
    return {"outcomes": outcomes, **_known(index)}


def differences(fuzzer: str, data: bytes, one: MakeIndex, other: MakeIndex) -> list[str]:
    """Return the differences of two implementations after an input of `fuzzer`; any is a bug of one of them."""
    did, did_other = _did(fuzzer, one, data), _did(fuzzer, other, data)
    return [what for what in did if did[what] != did_other[what]]
