"""One life of an index: what the indexer's shell does between the wire and the fold.

found for the first time    the newest snapshot that can be read is restored; then the log is read on behind it
found again                 both streams are read on behind what was told
now and then                a keeper looks at the log and the snapshots, and does what `keeping` says

Between two steps of keeping snapshots the broker may fail, the index goes on, and other keepers of the same log take
the same steps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from indexer.follow.checkpoint import decode_checkpoint, encode_checkpoint
from indexer.follow.fold import IndexFold, OverlapColumns, RankView
from indexer.follow.follower import StreamFollower
from indexer.follow.inputs import (
    AnswerArrived,
    BytesRefused,
    Fact,
    HeartbeatArrived,
    LogFound,
    LogLost,
    MessageArrived,
    Question,
    WorkerCame,
    WorkerGone,
)
from indexer.follow.messages import read_message
from indexer.follow.rank_stream import FollowedRank
from indexer.service import retention as keeping
from indexer.service.retention import KeepingLimits, LogExtent, SnapshotName
from kv_protocol import fleet, recovery
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import WorkerLeft, WorkerRegistered
from kv_protocol.ids import WorkerRank
from tests.reference.index.index import ReferenceIndex
from tests.simulation.broker import EVENTS, FLEET, Broker
from tests.simulation.connection import BrokerAway, Connection, Talk
from tests.simulation.oracle import rank_named
from tests.simulation.setup import LogSetup, WorldSetup
from tests.simulation.stream import Stored, StreamState
from tests.simulation.timeline import ProcessClock, Timeline
from tests.simulation.traffic import Answers, Reader, Traffic

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


LOOK_S = 1.0

Connect = Callable[[Callable[[], None]], Connection]
"""Make a connection that calls its argument whenever it was found."""


class Index:
    """Takes what comes until `kill`."""

    def __init__(
        self,
        name: str,
        life: int,
        timeline: Timeline,
        clock: ProcessClock,
        setup: WorldSetup,
        connect: Connect,
        answers: Answers,
    ) -> None:
        self.name, self.clock, self.is_alive = name, clock, True
        self._timeline, self._answers = timeline, answers
        self.fold = IndexFold(ReferenceIndex(), setup.follower)
        self.traffic = Traffic()
        self.on_fleet: Callable[[bytes], None] = lambda _: None
        self.newest_question: dict[WorkerRank, int] = {}
        self._inbox = f"inbox {name} {life}"
        self._places = {EVENTS: Place(), FLEET: Place()}
        self._target_seq: int | None = None
        self._is_restored = self._is_caught_up = False
        self._is_lossy = not setup.is_connection
        self._was_connected = True
        self.keeper = Keeper(self.fold, self._places[EVENTS], clock, setup.log)
        self.connection = connect(self._follow)
        self.connection.listen("heartbeat", self._on_pulse)
        self.connection.listen(self._inbox, self._on_answer)
        if setup.log.keep_every_s:
            timeline.every(setup.log.keep_every_s, self._keep)

    def columns(self, chain: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        """Return how much of a prefix each rank holds."""
        return self.fold.columns(chain, ranks)

    def overlap(self, sequence_hashes: Sequence[int], ranks: Sequence[WorkerRank]) -> Sequence[RankView]:
        """Return the same rank by rank."""
        return self.fold.overlap(sequence_hashes, ranks)

    def catching_up(self) -> str:
        """Return why the log was not read yet up to where it was at the start; empty once it was."""
        if not self._is_caught_up and self._target_seq is not None:
            self._is_caught_up = self._is_lossy or self._places[EVENTS].seq >= self._target_seq
        return "" if self._is_caught_up else "log: not read yet"

    def kill(self) -> None:
        """Nothing more is read by this life."""
        self.is_alive = False
        self.connection.close()

    def tick(self) -> None:
        """Time has passed."""
        self.connection.look()
        is_connected = self.connection.is_connected
        if is_connected != self._was_connected:
            self._was_connected = is_connected
            self.apply(LogFound() if is_connected else LogLost())
        self._ask(self.fold.tick(self.clock.now()))

    def apply(self, fact: Fact) -> None:
        """A fact is known, and what it asks for is asked."""
        self._ask(self.fold.apply(fact, self.clock.now()))

    def _ask(self, questions: list[Question]) -> None:
        for question in questions:
            self.traffic.questions += 1
            self.newest_question[question.rank] = question.request.request_id
            reader = self._as_reader(question.rank)
            self._answers.on_question(reader, question.rank, question.request, self._timeline.now_s)
            data = recovery.encode(question.request)
            self.connection.announce(f"recover {question.rank}", question.rank, data, self._inbox)

    def follower(self, rank: WorkerRank) -> StreamFollower:
        """Return what follows the rank's stream."""
        return self._stream(rank).follower

    def _stream(self, rank: WorkerRank) -> FollowedRank:
        stream = self.fold.stream(rank)
        assert stream is not None, f"{rank}: no stream"
        return stream

    def _as_reader(self, rank: WorkerRank) -> Reader:
        stream = self._stream(rank)
        counts, place = stream.follower.statistics().counts, stream.follower.position
        beginnings = counts.replays + counts.repairs + counts.resyncs + counts.restarts
        return Reader(self._inbox, stream, beginnings, *place, frozenset(self.fold.held(rank)))

    # -------------------------------------------------------------- the streams
    def _follow(self) -> None:
        self._read(FLEET)
        self._read(EVENTS)

    def _read(self, name: str) -> None:
        place, life = self._places[name], self.connection.life
        if self.connection.is_connected and place.read_in_life != life:
            place.read_in_life = life
            self.connection.converse(self._begin(name))

    def _begin(self, name: str) -> Talk:
        place = self._places[name]
        receive = self._on_events if name == EVENTS else self._on_fleet_event
        try:
            state = yield partial(state_of, name)
            if name == EVENTS and not self._is_restored:
                yield from self.keeper.restore(state)
                self._is_restored = True
            if state.created != place.created or state.last_seq < place.seq:
                place.created, place.seq = state.created, 0
            last_seq = yield lambda broker: broker.read(name, self.connection, place.seq, receive)
            if name == EVENTS:
                self._target_seq = last_seq
        except BrokerAway:
            place.read_in_life = 0
            self._timeline.after(LOOK_S, partial(self._read, name))

    def _keep(self) -> bool:
        if self.is_alive and self.connection.is_connected and not self.catching_up():
            self.connection.converse(self.keeper.look())
        return self.is_alive

    def _on_events(self, stored: Stored, data: bytes) -> None:
        self._places[EVENTS].seq = max(self._places[EVENTS].seq, stored.seq)
        rank = rank_named(stored.subject)
        self.traffic.on_message(data)
        try:
            self.apply(MessageArrived(rank, read_message(data)))
        except MalformedMessage:
            self.apply(BytesRefused(rank))

    def _on_fleet_event(self, stored: Stored, data: bytes) -> None:
        self._places[FLEET].seq = max(self._places[FLEET].seq, stored.seq)
        self.on_fleet(data)
        try:
            event = fleet.decode_fleet_event(data)
        except MalformedMessage:
            return
        if isinstance(event, WorkerRegistered):
            self.apply(WorkerCame(event.worker_id, event.total_kv_blocks, event.instance))
        elif isinstance(event, WorkerLeft):
            self.apply(WorkerGone(event.worker_id, event.instance))

    # -------------------------------------------------------------- what is announced
    def _on_pulse(self, rank: WorkerRank, data: bytes, _: str) -> None:
        try:
            self.apply(HeartbeatArrived(rank, fleet.decode_heartbeat(data)))
        except MalformedMessage:
            return

    def _on_answer(self, rank: WorkerRank, data: bytes, _: str) -> None:
        try:
            answer = recovery.decode_answer(data)
        except MalformedMessage:
            return
        self.traffic.on_answer(answer)
        self.apply(AnswerArrived(rank, answer))
