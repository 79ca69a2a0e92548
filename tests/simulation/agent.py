"""One life of a worker's agent: engine, hop A and consolidation, as the shells join them, in virtual time.

It serves requests, publishes, proves what it holds, answers readers that lost their place, and sends heartbeats.
After each payload of hop A the mirror must equal what the engine holds, or be less where something was lost for good.

A rank's messages are handed over in order, as many as the outbox gives, and confirmed each by itself. Where one is
not, all that are not confirmed are handed over again after a while; then one goes ahead, and once the log has it, the
others follow.

Readers of its stream are answered one at a time, part by part. Between two parts others have their turn; a question
that its asker gave up is not answered to its end.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

from kv_protocol import fleet, load, recovery, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, FleetEvent, WorkerLeft, WorkerRegistered
from kv_protocol.hashing import HASH_SCHEME, canary
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, DumpChunk
from tests.simulation.broker import EVENTS, FLEET
from tests.simulation.calls import OnOutput
from tests.simulation.connection import Connection
from tests.simulation.engine import SEQUENCE_MAX, TrueEngine
from tests.simulation.intake import Intake
from tests.simulation.oracle import BLOCK_SIZE, Held, Names, held_set
from tests.simulation.setup import DIGESTS, MODEL, NEVER_FULL, AgentSetup
from tests.simulation.timeline import ProcessClock, Timeline
from tests.simulation.traffic import Answers
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.outbox import Outbox, OutMessage
from worker_agent.events.recoveries import PendingRecovery, Questions
from worker_agent.events.source_cursor import Delivery
from worker_agent.load.reports import load_report
from worker_agent.port.types import EngineOutput, EngineRequest


class Answering:
    """From its making until the connection is closed. `part_s` lie between two parts."""

    def __init__(
        self,
        rank: WorkerRank,
        core: Consolidation,
        connection: Connection,
        timeline: Timeline,
        part_s: float,
        answers: Answers,
    ) -> None:
        self._rank, self._core, self._connection, self._timeline = rank, core, connection, timeline
        self._part_s, self._answers = part_s, answers
        self._questions = Questions()
        self._is_answering = False
        self._told: set[int] = set()
        self._newest: dict[str, int] = {}
        connection.listen(f"recover {rank}", self._on_question)

    def _on_question(self, _: WorkerRank, data: bytes, reply: str) -> None:
        try:
            question = PendingRecovery(reply, recovery.decode_recover_request(data))
        except MalformedMessage:
            return
        newest, request_id = self._newest.get(reply, 0), question.request.request_id
        self._newest[reply] = max(newest, request_id)
        fate = self._questions.ask(question)
        # the newest, told twice, may take the place of an earlier one that came between
        assert fate != "replaced" or request_id >= newest, f"{self._rank}: {request_id} took the place of {newest}"
        if not self._is_answering:
            self._next()

    def _next(self) -> None:
        question = self._questions.next()
        self._is_answering = question is not None
        if question is not None:
            self._told.clear()
            self._answers.on_begin(question.asker, self._rank, question.request, self._core)
            self._go_on(question, iter(self._core.recover(self._rank.dp_rank, question.request)))

    def _go_on(self, question: PendingRecovery, parts: Iterator[Answer]) -> None:
        part = next(parts, None) if self._questions.is_current(question) else None
        if part is None:
            self._next()
            return
        if isinstance(part, DumpChunk):
            self._check(part)
        if self._connection.is_connected:
            self._answers.on_part(question.asker, self._rank, part)
        self._connection.announce(question.asker, self._rank, recovery.encode(part))
        self._timeline.after(self._part_s, lambda: self._go_on(question, parts))

    def _check(self, part: DumpChunk) -> None:
        """Parents come before their children, over the whole answer."""
        for block in part.columns.blocks():
            assert block.sequence_hash not in self._told, f"{self._rank}: a block is told of after its child, or twice"
            self._told.update({block.sequence_hash} if block.parent is None else {block.sequence_hash, block.parent})


RETRY_S = 0.1
RETRY_MAX_S = 2.0


class Publishing:
    """From its making until the connection is closed."""

    def __init__(self, rank: WorkerRank, outbox: Outbox, connection: Connection, timeline: Timeline) -> None:
        self._rank, self._outbox, self._connection, self._timeline = rank, outbox, connection, timeline
        self._attempt = 0
        self._retry_s = RETRY_S
        self._is_waiting = self._is_refused = self._is_ahead = False

    def publish(self) -> None:
        """What the outbox gives is on its way."""
        while not self._is_waiting and not self._is_ahead and (message := self._outbox.next_message()) is not None:
            self._is_ahead = self._is_refused
            self._connection.publish(
                EVENTS,
                str(self._rank),
                message.payload,
                subjects.message_id(self._rank, self._outbox.epoch, message.first_seq),
                partial(self._ended, message, self._attempt),
            )

    def _ended(self, message: OutMessage, attempt: int, is_confirmed: bool) -> None:
        if is_confirmed:
            self._outbox.acknowledge(message)
            if not self._is_waiting:
                self._retry_s = RETRY_S
                self._is_refused = self._is_ahead = False
                self.publish()
        elif attempt == self._attempt and not self._is_waiting:
            self._is_waiting = self._is_refused = True
            self._timeline.after(self._retry_s, self._go_back)
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _go_back(self) -> None:
        self._attempt += 1
        self._is_waiting = self._is_ahead = False
        self._outbox.go_back()
        self.publish()


TURN_S = 0.25
CHUNKS = 4
"""In how many parts what a full GPU holds is told."""

Connect = Callable[[Callable[[], None]], Connection]
"""Make a connection that calls its argument whenever it was found."""


class Chronicle(Protocol):
    """The record of what is true of the ranks."""

    answers: Answers

    def stood(self, rank: WorkerRank, epoch: int, seq: int, held: Held) -> None:
        """After `seq` of `epoch` the rank held `held`."""


class Agent:
    """Runs from its making until `kill`."""

    def __init__(
        self,
        worker_id: str,
        setup: AgentSetup,
        timeline: Timeline,
        clock: ProcessClock,
        seed: int,
        names: Names,
        connect: Connect,
        chronicle: Chronicle,
    ) -> None:
        self.worker_id, self.dp_ranks, self.is_alive = worker_id, setup.dp_ranks, True
        self._timeline, self._clock, self._chronicle = timeline, clock, chronicle
        self.is_lossless = setup.ring_payloads == setup.event_buffer_max_size == NEVER_FULL
        random = Random(seed)
        self.instance = f"instance-{seed}"
        self.engine = TrueEngine(setup, timeline, random, names, self._poll, self._report)
        self.intake = Intake(setup, timeline, clock, random, self.engine, self._deliver)
        self.core = Consolidation(
            setup.dp_ranks,
            BLOCK_SIZE,
            self.instance,
            lambda: random.getrandbits(64),
            ring_bytes_max=setup.ring_bytes_max,
        )
        self.core.chunk_blocks = setup.total_kv_blocks // CHUNKS
        for outbox in self.core.outboxes.values():
            outbox.bytes_max, outbox.window = setup.outbox_bytes_max, setup.window
        self.connection = connect(self._register)
        for dp_rank in self.dp_ranks:
            Answering(self.rank(dp_rank), self.core, self.connection, timeline, setup.answer_part_s, chronicle.answers)
        self._publishings = {
            dp_rank: Publishing(self.rank(dp_rank), self.core.outboxes[dp_rank], self.connection, timeline)
            for dp_rank in self.dp_ranks
        }
        self._resets: dict[str, Callable[[], None]] = {}
        self._newest: dict[int, load.LoadReport] = {}
        timeline.every(TURN_S, self._turn)
        timeline.every(HEARTBEAT_PERIOD_S, self._beat)

    def rank(self, dp_rank: int) -> WorkerRank:
        """Return the name of one of the ranks."""
        return WorkerRank(self.worker_id, dp_rank)

    def mirrored(self, dp_rank: int) -> Held:
        """Return what the consolidation knows that the rank holds, whatever it answers."""
        return held_set(self.core.mirrors[dp_rank].dump())

    def _turn(self) -> bool:
        if self.is_alive:
            self.connection.look()
            self.intake.tick()
            self._announce_load()
        return self.is_alive

    # -------------------------------------------------------------- its life
    def kill(self) -> None:
        """Nothing more is heard of this life, but for what is on its way already."""
        self.is_alive = False
        self.engine.stop()
        self.intake.stop()
        self.connection.close()
        for on_reset in self._resets.values():
            on_reset()

    def leave(self, left: Callable[[], None]) -> None:
        """It says that it leaves, and dies; then `left` is called."""
        self._say(WorkerLeft(worker_id=self.worker_id, instance=self.instance), lambda _: self._end(left))

    def _end(self, left: Callable[[], None]) -> None:
        if self.is_alive:
            self.kill()
            left()

    def _register(self) -> None:
        registered = WorkerRegistered(
            worker_id=self.worker_id,
            instance=self.instance,
            model=MODEL,
            served_names=(MODEL,),
            base_url=f"http://{self.worker_id}:1",
            block_size=BLOCK_SIZE,
            hash_scheme=HASH_SCHEME,
            tokenizer_digest=DIGESTS.tokenizer,
            template_digest=DIGESTS.template,
            canary=canary(BLOCK_SIZE),
            dp_ranks=self.dp_ranks,
            max_seq_len=SEQUENCE_MAX,
            accepts_token_ids=True,
        )
        self._say(registered, self._registered)

    def _registered(self, is_confirmed: bool) -> None:
        if not is_confirmed and self.connection.is_connected:
            self._timeline.after(TURN_S, self._register)

    def _say(self, event: FleetEvent, done: Callable[[bool], None]) -> None:
        self.connection.publish(FLEET, self.worker_id, fleet.encode(event), "", done)

    # -------------------------------------------------------------- requests
    def serve(self, request: EngineRequest, on_output: OnOutput, on_reset: Callable[[], None]) -> None:
        """Compute; raises `RequestRefused`. It says with `on_reset` that it dies first."""
        self.engine.submit(request, partial(self._tell, request.request_id, on_output))
        self._resets[request.request_id] = on_reset

    def _tell(self, request_id: str, on_output: OnOutput, output: EngineOutput) -> None:
        if output.finish_reason is not None:
            self._resets.pop(request_id, None)
        on_output(output)

    def hang_up(self, request_id: str) -> None:
        """No client waits for the request any more."""
        self._resets.pop(request_id, None)
        self.engine.cancel(request_id)

    def _report(self, statistics: Sequence[dict[str, Any]]) -> None:
        for row in statistics:
            dp_rank, self._newest[dp_rank] = load_report(row, self.instance)

    def _announce_load(self) -> None:
        for dp_rank, report in self._newest.items():
            self.connection.announce("load", self.rank(dp_rank), load.encode_load(report))
        self._newest.clear()

    # -------------------------------------------------------------- consolidation and hop B
    def _poll(self) -> None:
        self.intake.poll()

    def _deliver(self, delivery: Delivery) -> None:
        if delivery.lost:
            for dp_rank in self.core.on_loss(began_anew=delivery.began_anew):
                self._stand(dp_rank)
                self._publishings[dp_rank].publish()
        for sequence, payload in delivery.payloads:
            changed = self.core.on_payload(sequence, payload)
            self._compare(*self.intake.truth(sequence))
            for dp_rank in changed:
                self._publishings[dp_rank].publish()

    def _compare(self, dp_rank: int, truth: Held) -> None:
        mirrored = self._stand(dp_rank)
        assert mirrored <= truth, f"{self.rank(dp_rank)}: the mirror invented {mirrored - truth}"
        assert mirrored == truth or not self.is_lossless, f"{self.rank(dp_rank)}: the mirror lacks {truth - mirrored}"

    def _stand(self, dp_rank: int) -> Held:
        mirrored, outbox = self.mirrored(dp_rank), self.core.outboxes[dp_rank]
        self._chronicle.stood(self.rank(dp_rank), outbox.epoch, outbox.last_seq, mirrored)
        return mirrored

    def _beat(self) -> bool:
        for dp_rank in self.dp_ranks if self.is_alive else ():
            pulse = self.core.heartbeat(dp_rank, self.intake.stale(dp_rank))
            self.connection.announce("heartbeat", self.rank(dp_rank), fleet.encode(pulse))
        return self.is_alive
