"""The broker: two streams, a store of objects, and subjects whose messages reach the present listeners.

    up        does what it is asked, in order
    frozen    nothing; what comes meanwhile is done once it is thawed, unless it crashes first
    down      what comes is lost; it comes back as it was, or without the events' stream, or without anything

A client's line to it is a `Connection`, which dies with it. What it does on behalf of a client, an *operation*, it does
to itself: a function of the broker.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Literal, Protocol

from kv_protocol.ids import WorkerRank
from tests.simulation.oracle import rank_named
from tests.simulation.stream import Stored, Stream, StreamBounds
from tests.simulation.timeline import ProcessClock

if TYPE_CHECKING:
    from tests.simulation.connection import Connection

BROKER = "broker"
EVENTS, FLEET = "events", "fleet"

Loss = Literal["nothing", "events", "all"]

Receive = Callable[[WorkerRank, bytes, str], None]
"""Takes what was announced: of which rank it is, the bytes, and where an answer goes."""
ReceiveStored = Callable[[Stored, bytes], None]
"""Takes a message of a stream, and its bytes as they came."""


class Witness(Protocol):
    """Observes what happens to the events' stream."""

    def logged(self, rank: WorkerRank, data: bytes) -> None:
        """It has another message of the rank."""

    def purged(self, created: str, up_to_seq: int) -> None:
        """The stream of that birth has nothing any more up to this seq, because a keeper wanted it so."""


class Broker:
    """One broker, all its lives."""

    def __init__(
        self, clock: ProcessClock, random: Random, events: StreamBounds, refusal_ratio: float, witness: Witness
    ) -> None:
        self.clock, self._random, self._witness = clock, random, witness
        self.refusal_ratio = refusal_ratio
        self.is_up, self.is_frozen = True, False
        self.life = 0
        self.counts: Counter[str] = Counter()
        self.created = 0
        self._bounds = {EVENTS: events, FLEET: StreamBounds(per_subject=1)}
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._listeners: dict[str, list[tuple[Connection, Receive]]] = {}
        self._readers: dict[str, list[tuple[Connection, int, ReceiveStored]]] = {}
        self.streams = {name: self._stream(name) for name in self._bounds}
        self.objects: dict[str, bytes] = {}

    def _stream(self, name: str) -> Stream:
        return Stream(f"{name}-{self.created}", self._bounds[name])

    # -------------------------------------------------------------- its fate
    def crash(self) -> None:
        """It is gone, and with it all that it was about to do."""
        self.is_up, self.is_frozen = False, False
        self.life += 1
        self._waiting.clear()
        self._readers.clear()

    def start(self, loss: Loss = "nothing") -> None:
        """It is there again, with all that it had but for what is lost."""
        self.is_up = True
        if loss != "nothing":
            self.created += 1
            self.streams[EVENTS] = self._stream(EVENTS)
        if loss == "all":
            self.streams[FLEET] = self._stream(FLEET)
            self.objects.clear()
        for stream in self.streams.values():
            stream.read_again()

    def freeze(self) -> None:
        """It stands still."""
        self.is_frozen = self.is_up

    def thaw(self) -> None:
        """It goes on where it stood still."""
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for life, action in waiting:
            self.do(life, action)

    @property
    def is_answering(self) -> bool:
        """Whether it does anything now."""
        return self.is_up and not self.is_frozen

    def do(self, life: int, action: Callable[[], None]) -> None:
        """Something came that was sent to this life of it."""
        if not self.is_up or life != self.life:
            return
        if self.is_frozen:
            self._waiting.append((life, action))
        else:
            action()

    # -------------------------------------------------------------- what it does
    def listen(self, subject: str, connection: "Connection", receive: Receive) -> None:
        """`receive` is called with what is announced on the subject while the connection stands."""
        self._listeners.setdefault(subject, []).append((connection, receive))

    def announce(self, subject: str, rank: WorkerRank, data: bytes, reply: str) -> None:
        """Every listener of the subject receives the message."""
        for connection, receive in self._listeners.get(subject, ()):
            connection.tell(rank, data, reply, receive)

    def append(self, name: str, subject: str, data: bytes, message_id: str) -> int:
        """Return where in the stream the message is; every reader of the stream receives it."""
        stored, is_new = self.streams[name].append(subject, data, message_id, self.clock.wall_ns())
        self.counts["deduplicated_messages"] += not is_new
        if is_new:
            if name == EVENTS:
                self._witness.logged(rank_named(subject), data)
            for connection, life, receive in self._readers.get(name, ()):
                if connection.life == life:
                    connection.tell_stored(name, stored, receive)
        return stored.seq

    def read(self, name: str, connection: "Connection", after_seq: int, receive: ReceiveStored) -> int:
        """`receive` is called with what is in the stream behind `after_seq`, and what comes; return its last seq."""
        readers = [reader for reader in self._readers.get(name, ()) if reader[0] is not connection]
        self._readers[name] = [*readers, (connection, connection.life, receive)]
        unread = self.streams[name].after(after_seq)
        for stored in unread:
            connection.tell_stored(name, stored, receive)
        return unread[-1].seq if unread else after_seq

    def mood(self) -> tuple[bool, bool]:
        """Return whether it takes the next message into its stream, and whether it says a word."""
        if self._random.random() >= self.refusal_ratio:
            return True, True
        return (True, False) if self._random.random() < 0.5 else (False, True)

    def purge(self, up_to_seq: int) -> None:
        """The events' stream has nothing any more up to this seq."""
        self.counts["purges"] += 1
        self.streams[EVENTS].purge(up_to_seq)
        self._witness.purged(self.streams[EVENTS].created, up_to_seq)

    def expire(self) -> None:
        """Time has passed."""
        if self.is_answering:
            self.streams[EVENTS].expire(self.clock.wall_ns())
