"""One process writes an index, others read it; any of them may be killed at any time.

A scenario runs in a process of its own, which forks the writer and the readers: a test runner has threads, and a
process with threads must not fork.
"""

import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import pytest

from indexer.native._core import SharedRegion
from indexer.native.index import NativeIndex
from indexer.shared import IndexReader, SharedIndex
from kv_protocol.ids import WorkerRank
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import IndexSection
from tests.contract.shared_index_processes import (
    BLOCKS,
    END_S,
    READERS,
    REGION_BYTES,
    SHARED_NAMES,
    Chain,
    Child,
    chain,
    depth,
    writing,
)

if TYPE_CHECKING:
    from types import MethodType

KILLS = 5
A0 = WorkerRank("a", 0)
Scenario = Callable[[], list[str]]


# ------------------------------------------------------------------------------------------------- what processes do


def turns(one: Chain, other: Chain) -> Callable[[SharedRegion, Connection], None]:
    """Return a writer that holds one chain and then the other, until it is told to end."""

    def work(region: SharedRegion, pipe: Connection) -> None:
        index = writing(region)
        index.load(0, [one.rows], 0.0)
        index.publish()
        pipe.send("begun")
        while not pipe.poll():
            index.load(0, [other.rows], 0.0)
            index.load(0, [one.rows], 0.0)
        pipe.send(index.self_check())

    return work


def holds(held: Chain) -> Callable[[SharedRegion, Connection], None]:
    """Return a writer that publishes one chain, its stream at 7 of epoch 11, when it is told to, and waits."""

    def work(region: SharedRegion, pipe: Connection) -> None:
        index = writing(region)
        index.load(0, [held.rows], 0.0)
        index.write_status(0, 11, 7, 7)
        pipe.send("built")
        pipe.recv()
        index.publish()
        pipe.send("published")
        pipe.recv()

    return work


def reads(number: int, query: bytes, times: int = 0, depths: int = 2) -> Callable[[SharedRegion, Connection], None]:
    """Return a reader that matches so often (0: until it is killed) and until it saw so many depths; it tells them."""

    def work(region: SharedRegion, pipe: Connection) -> None:
        region.protect()
        reader, seen, done = region.reader(number), set[int | None](), 0
        pipe.send("begun")
        while times == 0 or done < times or len(seen) < depths:
            seen.add(depth(reader, query))
            done += 1
        pipe.send(seen)

    return work


def seen_by(reader: Child) -> object:
    """Return which depths a reader saw until its end."""
    reader.heard()
    return reader.heard()


# ------------------------------------------------------------------------------------------------- scenarios


def no_reader_sees_half_a_change(depths: int = 2) -> list[str]:
    region, one, other = SharedRegion(READERS, REGION_BYTES), chain(1), chain(2)
    writer = Child(region, turns(one, other))
    writer.heard()
    readers = [Child(region, reads(number, one.query, times=5_000, depths=depths)) for number in range(READERS)]
    found = [f"a reader saw {seen}" for seen in map(seen_by, readers) if seen != {0, BLOCKS}]
    writer.pipe.send("end")
    contradictions = writer.heard()
    return [*found, *([f"{contradictions}"] if contradictions else [])]


def a_killed_reader_stops_nothing() -> list[str]:
    region, one, other = SharedRegion(READERS, REGION_BYTES), chain(1), chain(2)
    writer, found = Child(region, turns(one, other)), list[str]()
    writer.heard()
    for number in range(KILLS):
        victim = Child(region, reads(0, one.query))
        victim.heard()
        victim.process.join(0.02)
        victim.kill()
        after = [Child(region, reads(each, one.query, times=20)) for each in range(READERS)]
        saw = [seen_by(each) for each in after]
        found += [f"after kill {number}: {saw}"] if saw != [{0, BLOCKS}] * READERS else []
    writer.pipe.send("end")
    contradictions = writer.heard()
    return [*found, *([f"{contradictions}"] if contradictions else [])]


def a_writer_killed_in_a_change_leaves_nothing_or_all() -> list[str]:
    region, one, other, third = SharedRegion(READERS, REGION_BYTES), chain(1), chain(2), chain(3)
    reader, found, torn = region.reader(0), list[str](), 0
    for number in range(KILLS):
        writer = Child(region, turns(one, other))
        writer.heard()
        writer.process.join(0.05)
        writer.kill()
        region.on_writer_ended()
        left = (depth(reader, one.query), depth(reader, other.query))
        torn += left == (None, None)
        if left not in {(None, None), (0, BLOCKS), (BLOCKS, 0)}:
            found.append(f"after kill {number}: {left}")
        second = Child(region, holds(third))
        second.heard()
        if (depth(reader, one.query), depth(reader, other.query)) != left:
            found.append(f"after kill {number}: a tree that is being built is read")
        second.pipe.send("publish")
        second.heard()
        if (depth(reader, third.query), depth(reader, one.query)) != (BLOCKS, 0):
            found.append(f"after kill {number}: the new writer's tree is not read")
        second.kill()
    return [*found, *([] if torn else ["no writer was killed in a change"])]


def without_a_writer_all_is_in_doubt() -> list[str]:
    shared, held = SharedIndex(IndexSection(memory_bytes_max=REGION_BYTES), READERS), chain(1, blocks=10)
    reader = IndexReader(shared.region.reader(0))
    found = [f"before: {reader.catching_up()}"] if not reader.catching_up() else ["an empty index is known"]
    ranks, answers = (A0, WorkerRank("b", 0)), []

    def look() -> None:
        columns = reader.columns(held.query, ranks)
        answers.append((columns.depths[0].tolist(), columns.epochs, columns.seqs, columns.doubts))

    look()
    writer = Child(shared.region, holds(held))
    writer.heard()
    look()
    writer.pipe.send("publish")
    writer.heard()
    look()
    for reader.is_behind in (True, False):
        look()
    writer.kill()
    shared.on_writer_ended()
    look()
    nothing = ([0, 0], (0, 0), (0, 0), ("never_heard", "never_heard"))
    known, behind, left = (
        ([10, 0], (11, 0), (7, 0), (doubt, "never_heard")) for doubt in ("", "index_behind", "log_away")
    )
    expected = [nothing, nothing, known, behind, known, left]
    return [] if answers == expected and len(found) == 1 and not reader.catching_up() else [f"{answers}", *found]


def a_reader_that_writes_is_killed() -> list[str]:
    region = SharedRegion(READERS, REGION_BYTES)
    index = writing(region)
    index.publish()

    def work(_: SharedRegion, pipe: Connection) -> None:
        region.protect()
        pipe.send("begun")
        index.load(0, [chain(1, blocks=2).rows], 0.0)
        pipe.send("has written")

    victim = Child(region, work)
    victim.heard()
    victim.process.join(END_S)
    is_stopped = victim.process.exitcode in (-signal.SIGSEGV, -signal.SIGABRT)  # the latter by AddressSanitizer
    return [] if is_stopped else [f"exit code {victim.process.exitcode}"]


SCENARIOS = (
    no_reader_sees_half_a_change,
    a_killed_reader_stops_nothing,
    a_writer_killed_in_a_change_leaves_nothing_or_all,
    without_a_writer_all_is_in_doubt,
    a_reader_that_writes_is_killed,
)


def tell(scenario: Scenario, told: Connection) -> None:
    """Send what the scenario finds."""
    told.send(scenario())


def problems(scenario: Scenario) -> list[str]:
    """Return what a scenario finds wrong, in a process of its own."""
    context = get_context("spawn")
    listener, told = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(scenario, told))
    process.start()
    told.close()  # so that the end of the process is heard
    try:
        return listener.recv() if listener.poll(2 * END_S) else ["never ends"]
    except EOFError:
        process.join()
        return [f"ends with exit code {process.exitcode}"]
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_processes_share_a_native_index(scenario: Scenario) -> None:
    assert problems(scenario) == []


# ------------------------------------------------------------------------------------------------- planted bugs


class InTwoSteps(NativeIndex):
    """Lets readers see what is between the removal of the old blocks and the new ones."""

    def load(self, rank: int, chunks: Any, now_s: float) -> None:
        self.clear(rank)
        (rows,) = chunks
        half = len(rows) // 2
        self.store(rank, None, rows.hashes[: 8 * half], 0, now_s)  # type: ignore[arg-type]
        for _ in range(50):
            self.snapshot()  # takes longer than a match
        super().load(rank, chunks, now_s)


def half_a_change_is_seen() -> list[str]:
    writing.__globals__["NativeIndex"] = InTwoSteps
    return no_reader_sees_half_a_change(depths=3)  # however seldom the writer runs beside the readers


@pytest.mark.planted
def test_a_change_in_two_steps_is_found() -> None:
    assert any("a reader saw" in problem for problem in problems(half_a_change_is_seen))


# ------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_bytes_max": 0}, r"index\.memory_bytes_max: found 0 \(no limit\)"),
        ({"memory_bytes_max": 1 << 44}, r"index\.memory_bytes_max: found 17592186044416, .* address space"),
    ],
)
def test_what_cannot_be_shared_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SharedIndex(IndexSection(**settings), 2)


def test_numbers_beyond_the_readers_are_refused() -> None:
    region = SharedRegion(2, REGION_BYTES)
    with pytest.raises(ValueError, match=r"number: 2, allowed 0\.\.1"):
        region.reader(2)
    for readers in (0, 65):
        with pytest.raises(ValueError, match=rf"readers: {readers}, allowed 1\.\.64"):
            SharedRegion(readers, REGION_BYTES)


@pytest.mark.parametrize("method", ["publish", "write_names"])
def test_an_index_in_its_own_memory_has_no_readers(method: str) -> None:
    told: MethodType = getattr(NativeIndex(), method)
    with pytest.raises(ValueError, match="region: found none"):
        told(*([SHARED_NAMES] if method == "write_names" else []))
