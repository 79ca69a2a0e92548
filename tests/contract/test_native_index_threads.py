"""The native index may be used from several threads: whatever they do at once, all of them end and nothing breaks."""

import re
import sys
from array import array
from collections.abc import Callable
from random import Random
from threading import Thread
from typing import Any

import pytest

from indexer.index.prefix_index import Hashes, PassedRequest
from indexer.native.index import NativeIndex
from kv_protocol.codec import encode_message
from kv_protocol.events import Batch, Event, Removed, Stored
from tests.contract.indexes import GPU, assert_sound, chain, overlaps
from tests.support.amount import examples

THREADS = 5
OPERATIONS = 2_000
RANKS = 6
PATHS = [chain(200, seed=seed) for seed in range(1, 4)]

MakeNative = Callable[[], NativeIndex]


class Visitor:
    """One thread's work: operations in an order that its seed decides."""

    def __init__(self, index: NativeIndex, seed: int) -> None:
        self._index, self._random, self._seed = index, Random(seed), seed
        self.problems: list[str] = []

    def run(self) -> None:
        """Do them all; whatever is raised that may not be is a problem."""
        every: list[Callable[[], object]] = [
            self._apply, self._apply, self._store, self._load, self._match, self._match_without_room,
            self._match_no_hashes, self._overlaps, self._dump, self._keep, self._drop, self._look, self._outline,
        ]  # fmt: skip
        for number in range(OPERATIONS):
            ask = self._random.choice(every)
            try:
                ask()
            except KeyError:
                continue  # the rank was dropped by another thread
            except Exception as error:  # noqa: BLE001 - told to the test
                self.problems.append(f"seed {self._seed}, {number} {ask.__name__}: {error!r}")

    def _rank(self) -> int:
        return self._random.randrange(RANKS)

    def _path(self) -> list[int]:
        return self._random.choice(PATHS)[: self._random.choice([1, 30, 200])]

    def _apply(self) -> None:
        path = self._path()
        events: list[Event] = [Stored(tuple(path)), Removed(tuple(path[len(path) // 2 :])), Stored((7,), 404, 9)]
        message = encode_message([Batch(1, at, event) for at, event in enumerate(events, 1)])
        assert self._index.apply_batch(self._rank(), message, 0) == 0

    def _store(self) -> None:
        self._index.store(self._rank(), None, self._path(), GPU, 0)

    def _load(self) -> None:
        self._index.load(self._rank(), self._index.dump(self._rank(), 50), 0)

    def _match(self) -> None:
        path, out = self._path(), array("i", [-1] * 4 * RANKS)
        assert 0 <= self._index.match(path, out) <= len(path)
        assert min(out) >= 0

    def _match_without_room(self) -> None:
        with pytest.raises(ValueError, match=r"^out: "):
            self._index.match(self._path(), array("i"))

    def _match_no_hashes(self) -> None:
        given: Hashes = [1, -1]
        for ask in (
            lambda: self._index.match(given, array("i", [0] * 4 * RANKS)),
            lambda: self._index.store(self._rank(), None, given, GPU, 0),
            lambda: self._index.holders(-1),
        ):
            with pytest.raises(TypeError):
                ask()

    def _overlaps(self) -> None:
        path = self._path()
        assert all(0 < depths[0] <= depths[3] <= len(path) for depths in overlaps(self._index, path).values())

    def _dump(self) -> None:
        rank = self._rank()
        assert all(len(columns) <= 64 for columns in self._index.dump(rank, 64))
        assert self._index.digest(rank, GPU).tier == GPU
        assert len(self._index.bucket_digests(rank, GPU)) == 256

    def _keep(self) -> None:
        snapshot = bytearray(self._index.snapshot())
        if self._random.random() < 0.5:
            self._index.restore(snapshot)

    def _drop(self) -> None:
        rank = self._rank()
        if self._random.random() < 0.3:
            self._index.drop(rank)
        self._index.register(rank, self._random.choice([0, 1_000]))

    def _look(self) -> None:
        assert len(self._index.holders(PATHS[0][0])) <= RANKS
        firsts = self._index.children(None)
        assert firsts == sorted(firsts)
        assert self._index.statistics().ranks <= RANKS
        assert sum(self._index.memory().values()) > 0
        assert min(self._index.structure().values()) >= 0

    def _outline(self) -> None:
        outline = self._index.outline([PassedRequest(PATHS[0][50], 1.0, 1.0)])
        roots = outline.children(None, "heat", 0, 10)
        assert sum(each.subtree_blocks for each in roots) == outline.blocks
        assert all(len(self._index.chain(each.first, 9)) <= 72 for each in roots)


def problems(make: MakeNative, seed: int) -> list[str]:
    """Let the threads loose on one index, and return what went wrong."""
    index = make()
    for rank in range(RANKS):
        index.register(rank)
    visitors = [Visitor(index, THREADS * seed + at) for at in range(THREADS)]
    threads = [Thread(target=visitor.run) for visitor in visitors]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert_sound(index)
    return [problem for visitor in visitors for problem in visitor.problems]


@pytest.mark.parametrize("seed", range(examples(3, least=1)))
def test_threads_that_use_one_index_at_once_all_end_and_leave_it_whole(seed: int) -> None:
    assert problems(NativeIndex, seed) == [], f"seed {seed}"


class SaysMoreThanWasAsked(NativeIndex):
    """Matches one block too many."""

    def match(self, sequence_hashes: Hashes, out: Any, ranks: bytes | None = None) -> int:
        return super().match(sequence_hashes, out, ranks) + 200


@pytest.mark.planted
def test_a_wrong_index_is_found_by_threads() -> None:
    found = problems(SaysMoreThanWasAsked, seed=0)
    assert any(re.search("^seed 1, [0-9]+ _match: AssertionError", problem) for problem in found), found
