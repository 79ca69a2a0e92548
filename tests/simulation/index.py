"""One life of an index: what the indexer's shell does between the wire and the fold."""

from collections.abc import Callable

from indexer.core.facts import BytesRefused, ChunkArrived, Fact, HeartbeatArrived, MessageArrived, Question
from indexer.core.fold import IndexFold
from indexer.core.follower import FollowerLimits
from indexer.core.messages import read_message
from indexer.core.reference import ReferenceIndex
from kv_protocol import fleet, recovery
from kv_protocol.errors import MalformedMessage
from kv_protocol.ids import WorkerRank
from tests.simulation.link import Timeline


class Index:
    """Takes bytes until `kill`; `ask` is called with every question it has."""

    def __init__(self, timeline: Timeline, kept_max: int, ask: Callable[["Index", Question], None]) -> None:
        self._timeline, self._ask, self._is_alive = timeline, ask, True
        self.fold = IndexFold(ReferenceIndex(), FollowerLimits(kept_max=kept_max))

    def kill(self) -> None:
        """Nothing more is read by this life."""
        self._is_alive = False

    def apply(self, fact: Fact) -> None:
        """A fact is known, and what it asks for is asked."""
        if self._is_alive:
            for question in self.fold.apply(fact, self._timeline.now_s):
                self._ask(self, question)

    def tick(self) -> None:
        """Time has passed."""
        for question in self.fold.tick(self._timeline.now_s):
            self._ask(self, question)

    def on_events(self, rank: WorkerRank, data: bytes) -> None:
        """A message of the log came."""
        try:
            self.apply(MessageArrived(rank, read_message(data)))
        except MalformedMessage:
            self.apply(BytesRefused(rank))

    def on_pulse(self, rank: WorkerRank, data: bytes) -> None:
        """A heartbeat came."""
        try:
            self.apply(HeartbeatArrived(rank, fleet.decode_heartbeat(data)))
        except MalformedMessage:
            return

    def on_chunk(self, rank: WorkerRank, data: bytes) -> None:
        """Part of an answer came, to a question of this life."""
        try:
            self.apply(ChunkArrived(rank, recovery.decode_dump_chunk(data)))
        except MalformedMessage:
            return
