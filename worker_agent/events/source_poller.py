"""Polls a source's events on a thread and hands them to the event loop as batches, without encoding them.

It never blocks the source or a request: poll and translation block only this thread. Nothing is lost between the thread
and the event loop (`Handover`): while too much waits there, the thread waits, and the source's own buffer fills. How
urgently it polls: `poll_rules.py`.

    the source                      the poller
    -----------------------------   ------------------------------------------------------------------------------------
    cannot be polled                polls again until it succeeds; the source's event ids show what was lost meanwhile
      (`EngineError`)
    raises anything else            does not know which events of the cycle were handed over: a loss follows, which
                                      removes the source's blocks. Then the cycles start again, until they fail too
                                      often (`Restarts`): the process drains and ends

Batches and losses are numbered from 0 in one sequence, in which the event loop delivers them.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import structlog

from kv_runtime.supervise import RESTARTS, Part, Restarts, SupervisedThread, thread_part
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_events import EngineBatch, EngineEvent, RankEvent, numbers_of
from worker_agent.events.mirror import ENGINE
from worker_agent.events.poll_rules import Drain, DrainedMoment
from worker_agent.events.quarantine import Quarantine
from worker_agent.port.types import POLL_S, EngineError

BATCH_NUMBERS_MAX = 1 << 20
"""Tokens and hashes of one batch, unless a single event has more: it bounds how long the event loop applies one."""
WAITING_NUMBERS_MAX = 1 << 20
"""Tokens and hashes that wait for the event loop, with one batch more: about 100 MB at most."""
_FAILED_S = 0.1
"""Pause after a failed poll."""

_log = structlog.get_logger("source_poller")


class Source(NamedTuple):
    """One source of events, polled by one thread.

    `take` waits at most so many seconds for an event, and returns all raw events. `translate` parses them, drops
    unreadable ones, and raises nothing. `buffer_events` is how many events the source buffers until it is polled;
    0: unknown. From any thread, `stale` returns why the translated events of a rank may be wrong, and `events_lost`
    counts a rank's events that were lost before the poll. `quarantine` has the events that `translate` dropped as
    unreadable; None: it drops none.
    """

    take: Callable[[float], list[Any]]
    translate: Callable[[list[Any]], list[RankEvent]] = list
    buffer_events: int = 0
    stale: Callable[[int], str] = lambda _: ""
    events_lost: Mapping[int, int] = MappingProxyType({})
    quarantine: Quarantine | None = None


class BatchSink(Protocol):
    """Applies what a poller delivers, on the event loop."""

    def on_batch(self, batch: EngineBatch, origin: Origin) -> None:
        """Apply a batch of the source."""

    def on_loss(self, origin: Origin) -> None:
        """Remove the source's blocks: events are lost for good."""


class _Loss(NamedTuple):
    sequence: int


class _End:
    """The thread has ended; nothing follows."""


_Entry = EngineBatch | _Loss | _End | asyncio.Future[None]
"""A future is resolved when it is delivered: everything before it is delivered, too."""


T = TypeVar("T")


class Handover(Generic[T]):
    """A queue from one thread to the event loop on which it is made; nothing is lost in it.

    It is bounded by the weight of its entries: `put` waits while those that wait weigh `weight_max` or more, so one
    entry of any weight passes. The loop is never blocked.
    """

    def __init__(self, weight_max: int) -> None:
        self._weight_max = weight_max
        self._loop = asyncio.get_running_loop()
        self._has_entry = asyncio.Event()
        self._changed = threading.Condition()
        self._entries: deque[tuple[T, int]] = deque()
        self._weight = 0
        self._is_closed = False

    def put(self, entry: T, weight: int = 0) -> None:
        """Append an entry; belongs to the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._weight < self._weight_max or self._is_closed)
            if self._is_closed:
                return
            self._entries.append((entry, weight))
            self._weight += weight
        self._loop.call_soon_threadsafe(self._has_entry.set)

    async def next(self) -> T:
        """Remove and return the oldest entry, once there is one."""
        while not self._entries:
            self._has_entry.clear()  # an entry of this moment sets it later: `put` calls the loop after it appended
            await self._has_entry.wait()
        with self._changed:
            entry, weight = self._entries.popleft()
            self._weight -= weight
            self._changed.notify()
        return entry

    def close(self) -> None:
        """Drop what waits, and what comes."""
        with self._changed:
            self._is_closed = True
            self._entries.clear()
            self._changed.notify()


class SourcePoller:
    """Polls one source, and delivers the batches of its ranks in one sequence. `origin` has its name and all ranks."""

    def __init__(
        self,
        source: Source,
        *,
        poll_s: float = POLL_S,
        wall_ns: Callable[[], int],
        name: str = ENGINE,
        restarts: Restarts = RESTARTS,
    ) -> None:
        self._source, self._poll_s, self._wall_ns = source, poll_s, wall_ns
        self.origin = Origin(name)
        self.thread = SupervisedThread(f"{name}-events", self._run_polls, restarts=restarts)
        """The thread that polls, for its failures."""
        self._sequence = 0
        self._waiting: Handover[_Entry] = Handover(WAITING_NUMBERS_MAX)
        self._requested: deque[asyncio.Future[None]] = deque()
        self.drain = Drain(source.buffer_events)
        self.drained = DrainedMoment(0, {})
        """The newest time at which the source had no more events."""
        self.poll_failures_total = 0
        self.failure = ""
        """Why the source could not be polled; empty while it can."""
        self.delivered = 0
        """The next sequence to deliver."""
        self.lost_at = -1
        """The sequence of the newest loss: until it is delivered, the source's blocks may be wrong."""

    def parts(self, sink: BatchSink, first_stage: int) -> list[Part]:
        """Return the parts, in two stages: the thread, and the delivery of what it handed over."""
        name = f"{self.origin}-events"
        return [
            thread_part(name, self.run, stage=first_stage),
            Part(f"{name}-delivery", lambda stop: self._deliver(sink, stop), first_stage + 1),
        ]

    def run(self, stop: threading.Event) -> None:
        """Poll until `stop` is set, and then the source's remaining events; belongs to a thread.

        Raises:
            PartGaveUp: cycles failed too often.
        """
        try:
            self.thread.run(stop)
        finally:
            self._waiting.put(_End())

    async def until_delivered(self) -> None:
        """Return once all events that the source had before the call are delivered."""
        request = asyncio.get_running_loop().create_future()
        self._requested.append(request)
        await request

    # -------------------------------------------------------------- the thread
    def _run_polls(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self._poll_once(0 if self.drain.is_pressed else self._poll_s)
                if self.failure:
                    stop.wait(_FAILED_S)
            self._poll_once(0)
        except Exception:
            self._lose()
            raise

    def _lose(self) -> None:
        """Report a loss after a failed cycle: which of its events were handed over is unknown."""
        self.drain.on_failure()
        self.drain.on_cycle(is_lossy=True)
        self.lost_at = self._sequence
        self._waiting.put(_Loss(self._sequence))
        self._sequence += 1

    def _poll_once(self, timeout_s: float) -> None:
        requests = len(self._requested)
        lost_before = sum(self._source.events_lost.values())
        self._hand_over(self._source.translate(self._take(timeout_s)))
        is_lossy = sum(self._source.events_lost.values()) > lost_before
        if self.drain.on_cycle(is_lossy=is_lossy):
            self.drained = DrainedMoment(self._sequence, dict(self._source.events_lost))
        if not self.failure:
            for _ in range(requests):
                self._waiting.put(self._requested.popleft())

    def _take(self, timeout_s: float) -> list[Any]:
        events: list[Any] = []
        try:
            polled = self._source.take(timeout_s)
            while self.drain.on_poll(len(polled)):
                events += polled
                polled = self._source.take(0)
            events += polled
            self.failure = ""
        except EngineError as error:
            self.drain.on_failure()
            self.poll_failures_total += 1
            if not self.failure:
                _log.warning("source_not_polled", reason=str(error))
            self.failure = f"cannot be polled: {error}"
        return events

    def _hand_over(self, events: list[RankEvent]) -> None:
        for dp_rank, of_rank in _by_rank(events).items():
            for numbers, part in batches_of(of_rank):
                batch = EngineBatch(
                    sequence=self._sequence, time_s=self._wall_ns() / 1e9, dp_rank=dp_rank, events=tuple(part)
                )
                self._waiting.put(batch, numbers)
                self._sequence += 1

    # -------------------------------------------------------------- the event loop
    async def _deliver(self, sink: BatchSink, stop: asyncio.Event) -> None:
        """Deliver until the thread has ended; other tasks have their turn after each batch."""
        try:
            while not isinstance(entry := await self._waiting.next(), _End):
                if isinstance(entry, asyncio.Future):
                    if not entry.done():  # its caller may have been cancelled
                        entry.set_result(None)
                    continue
                if isinstance(entry, _Loss):
                    sink.on_loss(self.origin)
                else:
                    sink.on_batch(entry, self.origin)
                self.delivered = entry.sequence + 1
                await asyncio.sleep(0)
            await stop.wait()
        finally:
            self._waiting.close()


def _by_rank(events: list[RankEvent]) -> dict[int, list[EngineEvent]]:
    grouped: dict[int, list[EngineEvent]] = {}
    for dp_rank, event in events:
        grouped.setdefault(dp_rank, []).append(event)
    return grouped


def batches_of(events: Iterable[EngineEvent]) -> Iterator[tuple[int, list[EngineEvent]]]:
    """Yield the events in order, as many at a time as one batch should have, with their tokens and hashes counted."""
    part: list[EngineEvent] = []
    numbers = 0
    for event in events:
        more = numbers_of(event)
        if part and numbers + more > BATCH_NUMBERS_MAX:
            yield numbers, part
            part, numbers = [], 0
        part.append(event)
        numbers += more
    if part:
        yield numbers, part
