"""One life of an index: what the indexer's shell does between the wire and the fold.

found for the first time    the newest snapshot that can be read is restored; then the log is read on behind it
found again                 both streams are read on behind what was told
now and then                a keeper looks at the log and the snapshots, and does what `keeping` says
"""

from collections.abc import Callable, Sequence
from functools import partial

from indexer.follow.fold import IndexFold, OverlapColumns, RankView
from indexer.follow.follower import StreamFollower
from indexer.follow.inputs import Fact, LogConnected, Question, Received, WorkerCame, WorkerGone, read_message
from kv_protocol import fleet, recovery
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import WorkerLeft, WorkerRegistered
from kv_protocol.ids import WorkerRank
from tests.reference.index.index import ReferenceIndex
from tests.simulation.broker import EVENTS, FLEET
from tests.simulation.connection import BrokerAway, Connection, Talk
from tests.simulation.keeper import Keeper, Place, state_of
from tests.simulation.oracle import rank_named
from tests.simulation.setup import WorldSetup
from tests.simulation.stream import Stored
from tests.simulation.timeline import ProcessClock, Timeline
from tests.simulation.traffic import Answers, Reader, Traffic

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
            self.apply(LogConnected(is_connected))
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
        return self.fold._ranks[rank]  # noqa: SLF001 - another object where the rank was forgotten and came back

    def _as_reader(self, rank: WorkerRank) -> Reader:
        stream = self.follower(rank)
        counts, place = stream.statistics().counts, stream.position
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
            self.apply(Received(rank, read_message(data)))
        except MalformedMessage:
            self.apply(Received(rank, None))

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
            self.apply(Received(rank, fleet.decode_heartbeat(data)))
        except MalformedMessage:
            return

    def _on_answer(self, rank: WorkerRank, data: bytes, _: str) -> None:
        try:
            answer = recovery.decode_answer(data)
        except MalformedMessage:
            return
        self.traffic.on_answer(answer)
        self.apply(Received(rank, answer))
