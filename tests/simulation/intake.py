"""Hop A of one worker: its publisher, a line that loses, delays and doubles, and the cursor that reads without holes.

What the engine held when a payload was published is kept beside it, to be compared when it is read.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from bench.capture.payloads import encode_payload
from tests.simulation.engine import TrueEngine
from tests.simulation.network import Faults, Link
from tests.simulation.oracle import Held
from tests.simulation.setup import NEVER_FULL, NO_FAULTS, AgentSetup
from tests.simulation.timeline import ProcessClock, Timeline
from worker_agent.events.dialects import batches as hop_a
from worker_agent.events.source_cursor import UNANSWERED_MAX, Delivery, SourceCursor
from worker_agent.events.source_poller import Pace

ANSWER_S = 2.0

Deliver = Callable[[Delivery], None]


class Intake:
    """From its making until `stop`. `deliver` is called with whatever the cursor gives."""

    def __init__(
        self,
        setup: AgentSetup,
        timeline: Timeline,
        clock: ProcessClock,
        random: Random,
        engine: TrueEngine,
        deliver: Deliver,
    ) -> None:
        self._timeline, self._clock, self._random = timeline, clock, random
        self._engine, self._on_delivery = engine, deliver
        self._is_stopped = False
        self._sequence = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=setup.ring_payloads)
        self._truth: dict[int, tuple[int, Held]] = {}
        self._live = Link(timeline, random, setup.hop_a, is_ordered=True)
        self._questions = Link(timeline, random, Faults(delay_max_s=setup.hop_a.delay_max_s), is_ordered=True)
        self._answers = Link(timeline, random, Faults(delay_max_s=setup.replay_delay_max_s), is_ordered=True)
        self.cursor = SourceCursor()
        self._pace = Pace(0 if setup.event_buffer_max_size == NEVER_FULL else setup.event_buffer_max_size)
        self._dry_sequence, self._lost_when_dry = 0, dict[int, int]()
        self._lost_before_read = dict[int, int]()
        self._question = self._lost_in_a_row = 0
        self._is_asking = False

    @property
    def is_read(self) -> bool:
        """Whether everything published was read, or given up."""
        return self.cursor.expected == self._sequence

    def truth(self, sequence: int) -> tuple[int, Held]:
        """Return the rank that a payload was of, and what it held when it was published; forget it."""
        return self._truth.pop(sequence)

    def stale(self, dp_rank: int) -> str:
        """Return why what is known of a rank may not be what the engine holds."""
        rules = self._engine.rules
        if self.cursor.expected >= self._dry_sequence:
            self._lost_before_read = self._lost_when_dry
        missing = rules.events_lost.get(dp_rank, 0) - self._lost_before_read.get(dp_rank, 0)
        unread = "no answer to replays" if self.cursor.is_unanswered else ""
        unread = unread or ("" if self.cursor.is_settled else "messages are missing")
        return (f"{missing} events lost" if missing else "") or rules.stale(dp_rank) or unread

    def stop(self) -> None:
        """Nothing is published or read any more."""
        self._is_stopped = True

    def make_peace(self) -> None:
        """Nothing is lost any more."""
        self._live.faults = self._questions.faults = NO_FAULTS

    def tick(self) -> None:
        """Time has passed."""
        self.poll()
        self._ask()

    def poll(self) -> None:
        """Publish what the engine tells."""
        lost, polled = sum(self._engine.rules.events_lost.values()), self._engine.drain()
        self._publish(polled)
        is_lossy = sum(self._engine.rules.events_lost.values()) > lost
        if self._pace.on_poll(len(polled), is_lossy=is_lossy):
            self._dry_sequence, self._lost_when_dry = self._sequence, dict(self._engine.rules.events_lost)

    def _publish(self, said: list[dict[str, Any]]) -> None:
        for dp_rank, events in self._engine.translate(said):
            payload = encode_payload(self._clock.wall_ns() / 1e9, events, dp_rank)
            self._ring.append((self._sequence, payload))
            self._truth[self._sequence] = (dp_rank, self._engine.held(dp_rank))
            self._live.send(payload, partial(self._on_live, self._sequence))
            self._sequence += 1

    def _deliver(self, delivery: Delivery) -> None:
        if not self._is_stopped:
            self._on_delivery(delivery)

    def _on_live(self, sequence: int, payload: bytes) -> None:
        frames = [b"", hop_a.encode_sequence(sequence), payload]
        self._deliver(self.cursor.on_live(*hop_a.split_frames(frames), self._clock.now()))
        if not self.cursor.is_settled:
            self._ask()

    def _ask(self) -> None:
        start = None if self._is_asking or self._is_stopped else self.cursor.next_replay(self._clock.now())
        if start is not None:
            self._is_asking = True
            self._question += 1
            self._timeline.after(ANSWER_S, partial(self._give_up, self._question))
            if not self._is_question_lost():
                self._questions.send(hop_a.encode_sequence(start), partial(self._answer, self._question))

    def _is_question_lost(self) -> bool:
        """Now and then, but never so often in a row that the reader takes the publisher for gone."""
        is_lost = self._lost_in_a_row < UNANSWERED_MAX - 1 and self._random.random() < self._live.faults.loss_ratio
        self._lost_in_a_row = self._lost_in_a_row + 1 if is_lost else 0
        return is_lost

    def _give_up(self, question: int) -> None:
        """The shell closes the socket: nothing of that answer is heard any more."""
        if self._is_asking and question == self._question:
            self._is_asking = False
            self._deliver(self.cursor.on_no_answer(self._clock.now()))

    def _answer(self, question: int, frame: bytes) -> None:
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
        self._deliver(self.cursor.on_replay_end(self._clock.now()))
        if not self.cursor.is_settled:
            self._ask()
