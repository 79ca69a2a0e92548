"""A trace's schedule (see `schedule.py`), played on an index. Standard library only.

Every request is matched, its missing blocks are stored, and the blocks that its rank evicted are removed.
"""

from collections.abc import Iterator
from pathlib import Path

from bench.index.cells import Found, run
from bench.index.clock import timed
from bench.index.data import ScheduledRequest, ScheduledStore, last, read_requests
from bench.index.subjects import IndexCall, Subject


class TraceCell:
    """The time of a schedule; with `held` "none" only its requests, matched on an empty index."""

    def __init__(self, of: Subject, *, file: str, ranks: int, cache_blocks: int, held: str = "all") -> None:
        self._of = of
        self._capacity = (ranks, cache_blocks)
        of.fresh(*self._capacity)
        self._steps: list[IndexCall] = []
        self._blocks = 0
        for request in read_requests(Path(file)):
            self._steps += [of.match(request.hashes), *(_events(of, request) if held == "all" else ())]
            self._blocks += len(request.hashes) // 8 + len(request.hashes) // 8 - request.hit

    def round(self, seed: int) -> Found:
        """Return the total time; an operation is a block that was queried or stored."""
        del seed
        self._of.fresh(*self._capacity)
        return {"trace": timed(self._of.bind(self._steps), self._blocks)}


class TraceAnswersCell:
    """The answers of a schedule: before it computes a request, a rank has of it what its cache has."""

    def __init__(self, of: Subject, *, file: str, ranks: int, cache_blocks: int) -> None:
        self._of = of
        self._file = Path(file)
        of.fresh(ranks, cache_blocks)

    def round(self, seed: int) -> Found:
        """Return how many answers there were, and how many of them wrong."""
        del seed
        wrong = answers = 0
        for request in read_requests(self._file):
            answers += 1
            wrong += self._of.depths(request.hashes).get(request.rank, 0) != request.hit
            run(self._of, _events(self._of, request))
        return {"answers": answers, "wrong": wrong}


def _events(of: Subject, request: ScheduledRequest) -> Iterator[IndexCall]:
    if new := request.hashes[8 * request.hit :]:
        parent = last(request.hashes[: 8 * request.hit]) if request.hit else None
        yield of.store(ScheduledStore(request.rank, parent, request.hit, new))
    if request.evicted:
        yield of.remove(request.rank, request.evicted)
