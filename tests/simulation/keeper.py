"""The snapshots of one index, as the indexer's shell keeps them: looked after now and then, read at a cold start.

Between two steps the broker may fail, the index goes on, and other keepers of the same log take the same steps.
"""

from collections import Counter
from functools import partial

from indexer.follow.checkpoint import decode_checkpoint, encode_checkpoint
from indexer.follow.fold import IndexFold
from indexer.service import retention as keeping
from indexer.service.retention import KeepingLimits, LogExtent, SnapshotName
from kv_protocol.errors import MalformedMessage
from tests.simulation.broker import EVENTS, Broker
from tests.simulation.connection import BrokerAway, Talk
from tests.simulation.setup import LogSetup
from tests.simulation.stream import StreamState
from tests.simulation.timeline import ProcessClock

OFF_S = 5.0


class Place:
    """How far a stream was read: which, and up to where; and in which life of the connection it is, or is asked for."""

    def __init__(self) -> None:
        self.created, self.seq = "", 0
        self.read_in_life = 0


def state_of(name: str, broker: Broker) -> StreamState:
    """Return what is in a stream."""
    return broker.streams[name].state()


def _names(broker: Broker) -> list[str]:
    return list(broker.objects)


def _put(name: str, data: bytes, broker: Broker) -> None:
    broker.objects[name] = data


def _get(name: str, broker: Broker) -> bytes:
    return broker.objects.get(name, b"")


def _delete(name: str, broker: Broker) -> None:
    broker.objects.pop(name, None)


def _purge(up_to_seq: int, broker: Broker) -> None:
    broker.purge(up_to_seq)


class Keeper:
    """What one life of an index does for snapshots; `place` is how far it has read the events."""

    def __init__(self, fold: IndexFold, place: Place, clock: ProcessClock, setup: LogSetup) -> None:
        self._fold, self._place, self._clock = fold, place, clock
        self._limits = KeepingLimits(period_s=setup.snapshot_period_s, log_bytes_max=setup.bytes_max or 1 << 30)
        self._covered: dict[str, str] = {}
        self._off_since_s: float | None = None
        self._is_looking = False
        self.counts: Counter[str] = Counter()

    def restore(self, state: StreamState) -> Talk:
        """The best snapshot of the stream is restored, if there is one, and the place is the one that it covers."""
        names = yield _names
        for covers in keeping.of_this_log(_extent(state), names):
            data = yield partial(_get, name := str(covers))
            try:
                checkpoint = decode_checkpoint(data)
            except MalformedMessage:
                continue
            self._covered[name] = checkpoint.stream_created
            if (checkpoint.stream_created, checkpoint.stream_seq) == (state.created, covers.stream_seq):
                self._fold.restore(checkpoint, self._clock.now())
                self.counts["snapshots_restored"] += 1
                self._place.created, self._place.seq = checkpoint.stream_created, checkpoint.stream_seq
                return

    def look(self) -> Talk:
        """What is due is done, as far as the broker does it; one look at a time."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            yield from self._keep()
        except BrokerAway:
            return
        finally:
            self._is_looking = False

    def _keep(self) -> Talk:
        state = yield partial(state_of, EVENTS)
        if state.created != self._place.created:
            return
        log, names = _extent(state), (yield _names)
        verified = [name for name, covered in self._covered.items() if covered == state.created]
        others = [name for name, covered in self._covered.items() if covered != state.created]
        plan = keeping.plan(log, names, self._clock.wall_ns(), self._limits, verified=verified, others=others)
        if plan.write and not self._is_off_log():
            yield from self._write(next(iter(keeping.of_this_log(log, names, others)), None))
        if plan.purge_up_to:
            yield partial(_purge, plan.purge_up_to)
        for name in plan.delete:
            yield partial(_delete, name)
            self._covered.pop(name, None)

    def _is_off_log(self) -> bool:
        now_s = self._clock.now()
        if not self._fold.off_log():
            self._off_since_s = None
            return False
        self._off_since_s = now_s if self._off_since_s is None else self._off_since_s
        return now_s - self._off_since_s < OFF_S

    def _write(self, newest: SnapshotName | None) -> Talk:
        place = self._place
        if newest is not None and place.seq <= newest.stream_seq:
            return
        checkpoint = self._fold.checkpoint(place.created, place.seq, self._clock.wall_ns())
        name, data = str(SnapshotName(checkpoint.stream_seq, checkpoint.wall_ns)), encode_checkpoint(checkpoint)
        yield partial(_put, name, data)
        if (yield partial(_get, name)) == data:
            self.counts["snapshots_written"] += 1
            self._covered[name] = checkpoint.stream_created


def _extent(state: StreamState) -> LogExtent:
    return LogExtent(state.first_seq, state.last_seq, state.bytes)
