"""One life of a worker: engine, hop A and consolidation, as the shells join them, in virtual time.

After each payload of hop A the mirror must equal what the engine holds, or be less where something was lost for good.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from kv_protocol import fleet
from kv_protocol.fleet import HEARTBEAT_PERIOD_S
from kv_protocol.ids import WorkerRank
from tests.simulation.engine import TrueEngine
from tests.simulation.link import Faults, Link, Timeline
from tests.simulation.oracle import BLOCK_SIZE, Held, Names, held_set
from tests.simulation.setup import NEVER_FULL, NO_FAULTS, AgentSetup
from worker_agent.core.consolidation import Consolidation
from worker_agent.core.dialects import hop_a
from worker_agent.core.engine import EngineRequest
from worker_agent.core.outbox import Outbox
from worker_agent.core.source_cursor import UNANSWERED_MAX, Delivery, SourceCursor

TURN_S = 0.25
RETRY_S = 0.2
ANSWER_S = 2.0


class Outside(Protocol):
    """What an agent reaches: the log, the index, whoever asked for tokens, and whoever keeps the truth."""

    def publish(self, rank: WorkerRank, payload: bytes, done: Callable[[bool], None]) -> None:
        """The log takes the payload, or not; `done` says whether."""

    def announce(self, rank: WorkerRank, pulse: bytes) -> None:
        """A pulse is on its way."""

    def stood(self, rank: WorkerRank, epoch: int, seq: int, held: Held) -> None:
        """After `seq` of `epoch` the rank held `held`."""

    def finished(self, request: EngineRequest, tokens: list[int]) -> None:
        """A generation is whole."""


class Agent:
    """Runs from its making until `kill`."""

    def __init__(
        self,
        worker_id: str,
        setup: AgentSetup,
        timeline: Timeline,
        seed: int,
        names: Names,
        outside: Outside,
    ) -> None:
        self.worker_id, self.dp_ranks, self.is_alive = worker_id, setup.dp_ranks, True
        self._timeline, self._out = timeline, outside
        self.is_lossless = setup.ring_payloads == setup.event_buffer_max_size == NEVER_FULL
        self._random = random = Random(seed)
        self.engine = TrueEngine(setup, timeline, random, names, self._poll, outside.finished)
        self._sequence = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=setup.ring_payloads)
        self._truth: dict[int, tuple[int, Held]] = {}
        self._live = Link(timeline, random, setup.hop_a, is_ordered=True)
        self._questions = Link(timeline, random, Faults(delay_max_s=setup.hop_a.delay_max_s), is_ordered=True)
        self._answers = Link(timeline, random, Faults(delay_max_s=setup.replay_delay_max_s), is_ordered=True)
        self.cursor = SourceCursor()
        self.core = Consolidation(
            setup.dp_ranks,
            BLOCK_SIZE,
            f"instance-{seed}",
            lambda: random.getrandbits(64),
            outbox_bytes_max=setup.outbox_bytes_max,
        )
        self._question = self._lost_in_a_row = 0
        self._is_asking = False
        self._publishing: set[int] = set()
        timeline.every(HEARTBEAT_PERIOD_S, self._beat)
        timeline.every(TURN_S, self._turn)

    def rank(self, dp_rank: int) -> WorkerRank:
        """Return the name of one of the ranks."""
        return WorkerRank(self.worker_id, dp_rank)

    def kill(self) -> None:
        """Nothing more is heard of this life, but for what is on its way already."""
        self.is_alive = False

    def make_peace(self) -> None:
        """Nothing is lost any more."""
        self._live.faults = self._questions.faults = NO_FAULTS

    def mirrored(self, dp_rank: int) -> Held:
        """Return what the consolidation knows that the rank holds, whatever it says in dumps."""
        return held_set(self.core._mirrors[dp_rank].dump())

    @property
    def is_read(self) -> bool:
        """Whether everything published on hop A was read, or given up."""
        return self.cursor.expected == self._sequence

    def _turn(self) -> bool:
        if self.is_alive:
            self._poll()
            self._ask_replay()
        return self.is_alive

    # -------------------------------------------------------------- hop A
    def _poll(self) -> None:
        for dp_rank, events in self.engine.tell() if self.is_alive else ():
            payload = hop_a.encode_payload(self._timeline.now_s, events, dp_rank)
            self._ring.append((self._sequence, payload))
            self._truth[self._sequence] = (dp_rank, self.engine.held(dp_rank))
            self._live.send(payload, partial(self._on_live, self._sequence))
            self._sequence += 1

    def _on_live(self, sequence: int, payload: bytes) -> None:
        frames = [b"", hop_a.encode_sequence(sequence), payload]
        self._deliver(self.cursor.on_live(*hop_a.split_frames(frames), self._timeline.now_s))
        if not self.cursor.is_settled:
            self._ask_replay()

    def _ask_replay(self) -> None:
        start = None if self._is_asking else self.cursor.ask_from(self._timeline.now_s)
        if start is not None:
            self._is_asking = True
            self._question += 1
            self._timeline.after(ANSWER_S, partial(self._give_up, self._question))
            if not self._is_question_lost():
                self._questions.send(hop_a.encode_sequence(start), partial(self._answer_replay, self._question))

    def _is_question_lost(self) -> bool:
        """Now and then, but never so often in a row that the reader takes the publisher for gone."""
        is_lost = self._lost_in_a_row < UNANSWERED_MAX - 1 and self._random.random() < self._live.faults.loss_ratio
        self._lost_in_a_row = self._lost_in_a_row + 1 if is_lost else 0
        return is_lost

    def _give_up(self, question: int) -> None:
        """The shell closes the socket: nothing of that answer is heard any more."""
        if self._is_asking and question == self._question:
            self._is_asking = False
            self._deliver(self.cursor.on_no_answer())

    def _answer_replay(self, question: int, frame: bytes) -> None:
        start = hop_a.decode_sequence(frame)
        for sequence, payload in [entry for entry in self._ring if entry[0] >= start]:
            self._answers.send(payload, partial(self._on_replay, question, sequence))
        self._answers.send(b"", partial(self._on_replay, question, hop_a.REPLAY_END))

    def _on_replay(self, question: int, sequence: int, payload: bytes) -> None:
        if not self._is_asking or question != self._question:
            return
        sequence, payload = hop_a.split_replay([b"", b"", hop_a.encode_sequence(sequence), payload])
        if sequence != hop_a.REPLAY_END:
            self._deliver(self.cursor.on_replayed(sequence, payload))
            return
        self._is_asking = False
        self._deliver(self.cursor.on_replay_end(self._timeline.now_s))
        if not self.cursor.is_settled:
            self._ask_replay()

    # -------------------------------------------------------------- consolidation and hop B
    def _deliver(self, delivery: Delivery) -> None:
        if not self.is_alive:
            return
        if delivery.lost:
            for dp_rank in self.core.on_loss(began_anew=delivery.began_anew):
                self._stand(dp_rank)
                self._publish(dp_rank)
        for sequence, payload in delivery.payloads:
            changed = self.core.on_payload(sequence, payload)
            self._compare(*self._truth.pop(sequence))
            for dp_rank in changed:
                self._publish(dp_rank)

    def _compare(self, dp_rank: int, truth: Held) -> None:
        mirrored = self._stand(dp_rank)
        assert mirrored <= truth, f"{self.rank(dp_rank)}: the mirror invented {mirrored - truth}"
        assert mirrored == truth or not self.is_lossless, f"{self.rank(dp_rank)}: the mirror lacks {truth - mirrored}"

    def _stand(self, dp_rank: int) -> Held:
        mirrored, outbox = self.mirrored(dp_rank), self.core.outbox(dp_rank)
        self._out.stood(self.rank(dp_rank), outbox.epoch, outbox.last_seq, mirrored)
        return mirrored

    def _publish(self, dp_rank: int) -> None:
        outbox = self.core.outbox(dp_rank)
        message = outbox.next_message()
        if self.is_alive and message is not None and dp_rank not in self._publishing:
            self._publishing.add(dp_rank)
            self._out.publish(self.rank(dp_rank), message.payload, partial(self._published, dp_rank, outbox))

    def _published(self, dp_rank: int, outbox: Outbox, is_acknowledged: bool) -> None:
        if is_acknowledged:
            outbox.acknowledge()
        self._publishing.discard(dp_rank)
        self._timeline.after(0.0 if is_acknowledged else RETRY_S, partial(self._publish, dp_rank))

    def _beat(self) -> bool:
        for dp_rank in self.dp_ranks if self.is_alive else ():
            self._out.announce(self.rank(dp_rank), fleet.encode(self.core.heartbeat(dp_rank)))
        return self.is_alive
