"""The indexer's own keeper of snapshots on the simulated broker: each of its calls is an operation of a talk.

Between two operations the broker may fail, the index goes on, and other keepers of the same log take the same steps.
"""

from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Self, cast

from indexer.follow.fold import IndexFold
from indexer.service.feed import LogPosition
from indexer.service.retention import KeepingLimits
from indexer.service.snapshots import Snapshots
from kv_runtime.event_log import LogStreamState, NoSuchObject
from tests.simulation.broker import EVENTS, Broker
from tests.simulation.connection import Operation, Talk
from tests.simulation.setup import LogSetup
from tests.simulation.timeline import ProcessClock

if TYPE_CHECKING:
    from indexer.service.feed import IndexFeed
    from kv_runtime.event_log import EventLog

BUCKET_BYTES_MAX = 1 << 40


class Place:
    """How far a stream was read: which, and up to where; and in which life of the connection it is, or is asked for."""

    def __init__(self) -> None:
        self.created, self.seq = "", 0
        self.read_in_life = 0

    @property
    def log_position(self) -> LogPosition:
        """The place, as the keeper asks for it."""
        return LogPosition(self.created, self.seq)


def state_of(name: str, broker: Broker) -> LogStreamState:
    """Return what is in a stream."""
    return broker.streams[name].state()


class _Done:
    """An operation that a coroutine awaits; whoever drives the coroutine has the broker do it."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def __await__(self) -> Generator[Operation, Any, Any]:
        return (yield self._operation)


class _Log:
    """The part of an `EventLog` and of its bucket that a keeper uses."""

    def objects(self, _: str) -> Self:
        return self

    async def stream_state(self, _: str) -> LogStreamState:
        state: LogStreamState = await _Done(lambda broker: state_of(EVENTS, broker))
        return state

    async def purge(self, _: str, up_to_seq: int) -> None:
        await _Done(lambda broker: broker.purge(up_to_seq))

    async def names(self) -> list[str]:
        return list(await _Done(lambda broker: list(broker.objects)))

    async def put(self, name: str, data: bytes) -> None:
        await _Done(lambda broker: broker.objects.update({name: data}))

    async def get(self, name: str) -> bytes:
        data = await _Done(lambda broker: broker.objects.get(name))
        if not isinstance(data, bytes):
            raise NoSuchObject(name)
        return data

    async def delete(self, name: str) -> None:
        await _Done(lambda broker: broker.objects.pop(name, None))

    async def size_bytes(self) -> int:
        return 0

    async def delete_unfinished(self, *_: object) -> int:
        return 0


class Keeper:
    """What one life of an index does for snapshots; `place` is how far it has read the events."""

    def __init__(self, fold: IndexFold, place: Place, clock: ProcessClock, setup: LogSetup) -> None:
        self._place = place
        limits = KeepingLimits(period_s=setup.snapshot_period_s, log_bytes_max=setup.bytes_max or 1 << 30)
        log = cast("EventLog", _Log())
        self._snapshots = Snapshots(fold, log, clock, limits, BUCKET_BYTES_MAX)
        self._is_looking = False
        self._restored = 0

    @property
    def counts(self) -> Counter[str]:
        """The snapshots that this life wrote and restored."""
        return Counter(snapshots_written=self._snapshots.statistics().written_total, snapshots_restored=self._restored)

    def restore(self, state: LogStreamState) -> Talk:
        """The best snapshot of the stream is restored, if there is one, and the place is the one that it covers."""
        covered = yield from self._snapshots.restore(state).__await__()
        if covered:
            self._restored += 1
            self._place.created, self._place.seq = state.created, covered

    def look(self) -> Talk:
        """What is due is done, as far as the broker does it; one look at a time."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            yield from self._snapshots.check(cast("IndexFeed", self._place)).__await__()
        finally:
            self._is_looking = False
