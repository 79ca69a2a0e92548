"""The measured work, one function for each kind of cell. Standard library only: the peer's interpreter runs it too.

A process makes one cell at its start (fills the index, prepares the queries), then runs rounds of it. A round returns
its figures by name; a time is the CPU ns of one operation, in all threads of the process.

The process answers as a role of `bench/child.py` does:

    argument    the core, the subject, the kind of work, the form of hashes, the parameters
    first       {"version": ...} once the cell is made, or {"absent": why} and it ends
    round       runs the cell once; the response has its figures

It is pinned to a core, and collects no garbage while it measures.
"""

import ctypes
import gc
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.index.subjects import (
    CHAIN_BLOCKS,
    PEER_PACKAGE,
    SIDE_BY_SIDE,
    Call,
    IndexCall,
    ScheduledRequest,
    ScheduledStore,
    Subject,
    chain,
    events,
    last,
    read_requests,
    subject,
)

RANKS = 16
FILL_SEED = 1
"""Rounds use other seeds."""
WARM_UP_SEED = 1 << 32
"""Added to the seed of a round for its warm-up, which uses other blocks than the measurement."""
_WARM_UP_CHAINS = 32
_STATM = Path("/proc/self/statm")
Found = dict[str, float]
Round = Callable[[int], Found]
"""Runs a cell once, with the seed of the round; returns its figures by name."""


def event_cell(of: Subject, *, index_blocks: int, sizes: Sequence[Sequence[int]]) -> Round:
    """Fresh chains are stored in events of several sizes, in an index that holds others, and removed again.

    `sizes` are (blocks of an event, blocks of a round). The same pieces are removed, the last first. The figures are
    the times to store and to remove a block, by the blocks of an event.
    """
    of.fresh(RANKS, -(-(index_blocks + max(blocks for _, blocks in sizes)) // RANKS))
    fill(of, range(index_blocks // CHAIN_BLOCKS))

    def played(seed: int, event_blocks: int, chains: range) -> tuple[float, float]:
        blocks, stored_events = len(chains) * CHAIN_BLOCKS, list(events(seed, chains, event_blocks, RANKS))
        stores = of.bind([of.store(event) for event in stored_events])
        removes = of.bind([of.remove(event.rank, event.hashes) for event in reversed(stored_events)])
        return timed(stores, blocks), timed(removes, blocks)

    def round_of(seed: int) -> Found:
        found: Found = {}
        for event_blocks, round_blocks in sizes:
            chains = range(round_blocks // CHAIN_BLOCKS)
            played(seed + WARM_UP_SEED, event_blocks, chains[:_WARM_UP_CHAINS])
            stored, removed = played(seed, event_blocks, chains)
            found |= {f"stored {event_blocks}": stored, f"removed {event_blocks}": removed}
        return found

    return round_of


def match_cell(of: Subject, *, depth: int, holders: int, calls: int, held: str = "all") -> Round:
    """One prefix, matched repeatedly; `held`: all ranks hold it, rank k holds its first k + 1 blocks, or none does."""
    of.fresh(holders, depth)
    query = chain(FILL_SEED, 0, depth)
    for rank in range(holders):
        blocks = {"all": depth, "staircase": rank + 1, "none": 0}[held]
        if blocks:
            run(of, [of.store(ScheduledStore(rank, None, 0, query[: 8 * blocks]))])
    bound = of.bind([of.match(query)] * calls)

    def round_of(_seed: int) -> Found:
        timed(bound[: len(bound) // 10], 1)  # warm
        return {"match": timed(bound, len(bound))}

    return round_of


def cold_match_cell(of: Subject, *, index_blocks: int, calls: int) -> Round:
    """Each match is of another prefix, in an index that holds many."""
    chains = range(index_blocks // CHAIN_BLOCKS)
    of.fresh(RANKS, -(-index_blocks // RANKS))
    fill(of, chains)
    return lambda seed: {"match": cold_matches(of, chains, calls, seed)}


def trace_cell(of: Subject, *, file: str, ranks: int, cache_blocks: int) -> Round:
    """Plays a trace's schedule (`command.py`): matches each request, stores its missing blocks, removes evicted ones.

    The figure is the time of a block that was queried or stored.
    """
    requests = list(read_requests(Path(file)))
    of.fresh(ranks, cache_blocks)
    steps = [step for request in requests for step in (of.match(request.hashes), *_events(of, request))]
    blocks = sum(len(request.hashes) // 4 - request.hit for request in requests)

    def round_of(_seed: int) -> Found:
        of.fresh(ranks, cache_blocks)
        return {"trace": timed(of.bind(steps), blocks)}

    return round_of


def trace_answers_cell(of: Subject, *, file: str, ranks: int, cache_blocks: int) -> Round:
    """Checks the answers of a schedule: the overlap of a request's rank is what the rank's cache has of the request.

    The figures are the numbers of answers and of wrong answers.
    """
    requests = list(read_requests(Path(file)))

    def round_of(_seed: int) -> Found:
        of.fresh(ranks, cache_blocks)
        wrong = 0
        for request in requests:
            wrong += of.depths(request.hashes).get(request.rank, 0) != request.hit
            run(of, _events(of, request))
        return {"answers": len(requests), "wrong": wrong}

    return round_of


def memory_cell(of: Subject, *, blocks: int, holders: int) -> Round:
    """Resident bytes per unique block: all `holders` ranks hold the same blocks, and registered no capacity."""
    chains = range(blocks // CHAIN_BLOCKS)

    def round_of(seed: int) -> Found:
        before_bytes = resident_bytes()
        of.fresh(holders, 0)
        for first in range(0, len(chains), SIDE_BY_SIDE):
            stores = events(seed, chains[first : first + SIDE_BY_SIDE], CHAIN_BLOCKS, 1)
            steps = [of.store(event) for event in stores]
            for rank in range(holders):  # the first argument of a step; the others are shared
                run(of, [IndexCall(step.name, (rank, *step.arguments[1:])) for step in steps])
        return {"resident": (resident_bytes() - before_bytes) / (len(chains) * CHAIN_BLOCKS)}

    return round_of


def bulk_cell(of: Subject, *, blocks: int, capacity_blocks: int, calls: int, round_blocks: int) -> Round:
    """A large index is built, queried, and gets more blocks; its ranks register `capacity_blocks` in all.

    Before more blocks are stored, as many others are stored and removed: the first touch of memory may cost more than
    the store. The figures are the times to build and to add a block and of a cold match, and the bytes per block.
    """
    chains, more = range(blocks // CHAIN_BLOCKS), range(round_blocks // CHAIN_BLOCKS)

    def round_of(seed: int) -> Found:
        before_bytes = resident_bytes()
        of.fresh(RANKS, -(-capacity_blocks // RANKS))
        found = {"build": fill(of, chains)}
        found["resident"] = (resident_bytes() - before_bytes) / (len(chains) * CHAIN_BLOCKS)
        found["match"] = cold_matches(of, chains, calls, seed)
        others = list(events(seed + WARM_UP_SEED, more, CHAIN_BLOCKS, RANKS))
        run(of, [of.store(event) for event in others])
        run(of, [of.remove(event.rank, event.hashes) for event in others])
        stores = of.bind([of.store(event) for event in events(seed, more, CHAIN_BLOCKS, RANKS)])
        return found | {"stored": timed(stores, len(stores) * CHAIN_BLOCKS)}

    return round_of


def timed(calls: Iterable[Call], operations: int) -> float:
    """Make all calls, one after another; return the CPU ns of one of the `operations` that they are together."""
    began_ns = time.process_time_ns()
    for call in calls:
        call()
    return (time.process_time_ns() - began_ns) / operations


def cold_matches(of: Subject, chains: range, calls: int, seed: int) -> float:
    """Return the time of a match, over at most `calls` different chains in random order."""
    draw, calls = random.Random(seed), min(calls, len(chains))  # noqa: S311 - a workload, not a secret
    steps = [of.match(chain(FILL_SEED, number)) for number in draw.sample(chains, calls)]
    return timed(of.bind(steps), calls)


def fill(of: Subject, chains: range) -> float:
    """Store each chain as one event, and return the time of a block; the time to make the events is not counted."""
    parts = []
    for first in range(0, len(chains), SIDE_BY_SIDE):
        stores = events(FILL_SEED, chains[first : first + SIDE_BY_SIDE], CHAIN_BLOCKS, RANKS)
        parts.append(timed(of.bind([of.store(event) for event in stores]), CHAIN_BLOCKS))
    return sum(parts) / max(1, len(chains))


def run(of: Subject, steps: Iterable[IndexCall]) -> None:
    """Do all steps."""
    for call in of.bind(steps):
        call()


def resident_bytes() -> int:
    """Return the resident memory of this process, once the allocator has returned its free memory."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE


def _events(of: Subject, request: ScheduledRequest) -> Iterator[IndexCall]:
    if new := request.hashes[8 * request.hit :]:
        parent = last(request.hashes[: 8 * request.hit]) if request.hit else None
        yield of.store(ScheduledStore(request.rank, parent, request.hit, new))
    if request.evicted:
        yield of.remove(request.rank, request.evicted)


WORK: dict[str, Callable[..., Round]] = {
    "events": event_cell,
    "match": match_cell,
    "cold match": cold_match_cell,
    "trace": trace_cell,
    "trace answers": trace_answers_cell,
    "memory": memory_cell,
    "bulk": bulk_cell,
}
"""For each kind of work the function that makes a cell: it prepares a subject's index, and returns the `Round`."""


def main() -> None:
    """Make the cell that the argument names, and run a round of it for each request, until stdin ends."""
    asked = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is not an answer

    def write(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    if asked["core"] >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {asked["core"]})
    gc.disable()
    try:
        round_of = WORK[asked["work"]](subject(asked["subject"], asked["shape"]), **asked["parameters"])
        write({"version": metadata.version(PEER_PACKAGE) if asked["subject"] == "peer" else ""})
        for line in sys.stdin:
            gc.collect()
            write(round_of(json.loads(line)["seed"]))
    except ImportError as error:
        write({"absent": str(error)})
    except Exception as error:  # noqa: BLE001 - the other side shows it, whatever it is
        write({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
