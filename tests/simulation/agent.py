"""One life of a worker: engine, hop A and consolidation, as the shells join them, in virtual time.

The engine's own set of blocks, named by the oracle, is the truth: after each payload of hop A the mirror must equal it,
or be less where payloads or engine events were lost for good.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from random import Random
from typing import Protocol

import msgspec

from kv_protocol import fleet
from kv_protocol.events import Tier
from kv_protocol.fleet import HEARTBEAT_PERIOD_S
from kv_protocol.ids import WorkerRank
from tests.simulation.link import Faults, Link, Timeline
from tests.simulation.oracle import BLOCK_SIZE, Held, Names, held_set
from worker_agent.core.consolidation import Consolidation
from worker_agent.core.dialects import hop_a
from worker_agent.core.dialects.hop_a import EngineEvent, EngineRemoved, EngineStored
from worker_agent.core.dialects.trtllm import TrtllmRules
from worker_agent.core.engine import EngineDescription, EngineRequest, RequestRefused
from worker_agent.core.outbox import Outbox
from worker_agent.core.simulator.events import render
from worker_agent.core.simulator.scheduler import Simulator, Step
from worker_agent.core.simulator.timing import EngineTiming
from worker_agent.core.source_cursor import Delivery, SourceCursor

TURN_S = 0.25
RETRY_S = 0.2
NEVER_FULL = 100_000
SLOW_ENGINE = EngineTiming(
    base_s=0.05,
    context_floor_s=0.1,
    context_token_s=0.0,
    attention_pair_s=0.0,
    cached_token_s=0.0,
    kv_token_s=0.0,
    sequence_s=0.0,
    sequences_knee=0.0,
)


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one worker, small enough that everything gives way sometimes."""

    dp_ranks: tuple[int, ...] = (0,)
    total_kv_blocks: int = 24
    host_blocks: int = 6
    host_ratio: float = 0.5
    ring_payloads: int = NEVER_FULL
    event_buffer_max_size: int = NEVER_FULL
    stall_ratio: float = 0.0
    outbox_bytes_max: int = 1 << 20
    hop_a: Faults = Faults()


class Outside(Protocol):
    """What an agent reaches: the log, the index, and whoever asked for tokens."""

    def publish(self, rank: WorkerRank, payload: bytes, done: Callable[[bool], None]) -> None: ...
    def announce(self, rank: WorkerRank, pulse: bytes) -> None: ...
    def stood(self, rank: WorkerRank, epoch: int, seq: int, held: Held) -> None: ...
    def finished(self, request: EngineRequest, tokens: list[int]) -> None: ...


class HostTier:
    """Some blocks that leave the GPU stay on the host for a while: stored there, then removed from the GPU."""

    def __init__(self, random: Random, blocks_max: int, ratio: float) -> None:
        self._random, self._blocks_max, self._ratio = random, blocks_max, ratio
        self._seen: dict[int, EngineStored] = {}
        self.held: dict[int, None] = {}

    def moves(self, event: EngineEvent) -> Iterator[EngineEvent]:
        """Yield what to publish for an event of the GPU."""
        if isinstance(event, EngineStored):
            self._see(event)
        elif isinstance(event, EngineRemoved):
            for block_hash in event.block_hashes:
                if block_hash in self._seen and self._random.random() < self._ratio:
                    self.held[block_hash] = None
                    yield msgspec.structs.replace(self._seen[block_hash], tier=Tier.HOST)
        yield event
        while len(self.held) > self._blocks_max:
            oldest = next(iter(self.held))
            del self.held[oldest]
            yield EngineRemoved(block_hashes=(oldest,), tier=Tier.HOST)

    def _see(self, event: EngineStored) -> None:
        parent = event.parent_block_hash
        for at, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
            self._seen[block_hash] = msgspec.structs.replace(
                event, block_hashes=(block_hash,), parent_block_hash=parent, token_ids=tokens
            )
            parent = block_hash


class Agent:
    """Runs from its making until `kill`."""

    def __init__(
        self, worker_id: str, instance: str, setup: AgentSetup, timeline: Timeline, seed: int, names: Names, out: Outside
    ) -> None:
        self.worker_id, self.is_alive = worker_id, True
        self._timeline, self._names, self._out, self._setup = timeline, names, out, setup
        self._random = Random(seed)
        description = EngineDescription(
            model="m",
            version="1",
            event_source="simulated",
            block_size=BLOCK_SIZE,
            total_kv_blocks=setup.total_kv_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_seq_len=80,
            dp_ranks=setup.dp_ranks,
        )
        self.engine = Simulator(
            description, timing=SLOW_ENGINE, event_buffer_max_size=setup.event_buffer_max_size
        )
        self._is_stepping = False
        self._tokens: dict[str, tuple[EngineRequest, list[int]]] = {}
        self._gpu: dict[int, Held] = dict.fromkeys(setup.dp_ranks, frozenset())
        self._hosts = {
            dp_rank: HostTier(self._random, setup.host_blocks, setup.host_ratio) for dp_rank in setup.dp_ranks
        }
        self.rules = TrtllmRules(BLOCK_SIZE)
        self._sequence = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=setup.ring_payloads)
        self._truth: dict[int, tuple[int, Held]] = {}
        self.live = Link(timeline, self._random, setup.hop_a, is_ordered=True)
        self.replay = Link(timeline, self._random, setup.hop_a, is_ordered=True)
        self._answers = Link(timeline, self._random, Faults(delay_max_s=setup.hop_a.delay_max_s), is_ordered=True)
        self.cursor = SourceCursor()
        self.core = Consolidation(
            setup.dp_ranks,
            BLOCK_SIZE,
            instance,
            lambda: self._random.getrandbits(64),
            outbox_bytes_max=setup.outbox_bytes_max,
        )
        self._publishing: set[int] = set()
        timeline.every(HEARTBEAT_PERIOD_S, self._beat)
        timeline.every(TURN_S, self._turn)

    def kill(self) -> None:
        """Nothing of this life happens any more, but for what is on its way already."""
        self.is_alive = False

    @property
    def is_lossless(self) -> bool:
        """Whether everything that the engine tells can be known, for buffer and ring lose nothing."""
        return self._setup.ring_payloads == self._setup.event_buffer_max_size == NEVER_FULL

    def truth(self, dp_rank: int) -> Held:
        """Return what the rank's engine and host hold, as far as anybody was told."""
        return self._gpu[dp_rank] | self._names.held(self._hosts[dp_rank].held, Tier.HOST)

    def mirrored(self, dp_rank: int) -> Held:
        """Return what the consolidation says that the rank holds."""
        return held_set(block for chunk in self.core.dump(dp_rank, 0) for block in chunk.blocks())

    # -------------------------------------------------------------- engine
    def submit(self, request: EngineRequest) -> None:
        """Let the engine compute; without effect where it refuses."""
        try:
            self.engine.submit(request, self._timeline.now_s)
        except RequestRefused:
            return
        self._tokens[request.request_id] = (request, list(request.prompt))
        self._names.learn(request, request.prompt)
        self._step()

    def cancel_one(self) -> None:
        """Whoever asked for one of the running generations has gone."""
        if self._tokens:
            request_id = self._random.choice(list(self._tokens))
            self._names.learn(*self._tokens.pop(request_id))
            self.engine.cancel(request_id)
            self._step()

    def _step(self) -> None:
        if self.engine.has_work and not self._is_stepping:
            self._is_stepping = True
            step = self.engine.step(self._timeline.now_s)
            for request_id, output in step.outputs:
                self._tokens[request_id][1].extend(output.token_ids)
            self._timeline.after(step.duration_s, partial(self._stepped, step))

    def _stepped(self, step: Step) -> None:
        if not self.is_alive:
            return
        self._is_stepping = False
        for request_id, output in step.outputs:
            if output.finish_reason and request_id in self._tokens:
                request, tokens = self._tokens.pop(request_id)
                self._names.learn(request, tokens)
                self._out.finished(request, tokens)
        self.engine.flush_events()
        self._gpu = {
            dp_rank: self._names.held(self.engine.held_hashes(dp_rank), Tier.GPU) for dp_rank in self._setup.dp_ranks
        }
        if self._random.random() >= self._setup.stall_ratio:
            self._poll()
        self._step()

    # -------------------------------------------------------------- hop A
    def _poll(self) -> None:
        events = self.rules.translate(render(event) for event in self.engine.drain_events())
        events.sort(key=lambda event: event.dp_rank)
        for dp_rank, of_rank in groupby(events, key=lambda event: event.dp_rank):
            moves = [move for event in of_rank for move in self._hosts[dp_rank].moves(event.event)]
            payload = hop_a.encode_payload(self._timeline.now_s, moves, dp_rank)
            self._ring.append((self._sequence, payload))
            self._truth[self._sequence] = (dp_rank, self.truth(dp_rank))
            self.live.send(payload, partial(self._on_live, self._sequence))
            self._sequence += 1

    def _on_live(self, sequence: int, payload: bytes) -> None:
        number, payload = hop_a.split_frames([b"", hop_a.encode_sequence(sequence), payload])
        self._deliver(self.cursor.on_live(number, payload, self._timeline.now_s))
        if self.cursor.has_hole:
            self._ask_replay()

    def _ask_replay(self) -> None:
        if (start := self.cursor.ask_from(self._timeline.now_s)) is not None:
            self.replay.send(hop_a.encode_sequence(start), self._answer_replay)

    def _answer_replay(self, start: bytes) -> None:
        wanted = hop_a.decode_sequence(start)
        for sequence, payload in [entry for entry in self._ring if entry[0] >= wanted]:
            self._answers.send(payload, partial(self._on_replay, sequence))
        self._answers.send(b"", partial(self._on_replay, hop_a.REPLAY_END))

    def _on_replay(self, sequence: int, payload: bytes) -> None:
        number, payload = hop_a.split_replay([b"", b"", hop_a.encode_sequence(sequence), payload])
        if number == hop_a.REPLAY_END:
            self._deliver(self.cursor.on_replay_end(self._timeline.now_s))
        else:
            self._deliver(self.cursor.on_replayed(number, payload))

    # -------------------------------------------------------------- consolidation
    def _deliver(self, delivery: Delivery) -> None:
        if not self.is_alive:
            return
        if delivery.lost:
            self.core.on_loss()
            self._beat()
        for sequence, payload in delivery.payloads:
            changed = self.core.on_payload(sequence, payload)
            self._compare(*self._truth.pop(sequence))
            for dp_rank in changed:
                self._publish(dp_rank)

    def _compare(self, dp_rank: int, truth: Held) -> None:
        mirrored, outbox = self.mirrored(dp_rank), self.core.outbox(dp_rank)
        self._out.stood(self.rank(dp_rank), outbox.epoch, outbox.last_seq, mirrored)
        assert mirrored <= truth, f"{self.rank(dp_rank)}: the mirror has more than the engine: {mirrored - truth}"
        if self.is_lossless:
            assert mirrored == truth, f"{self.rank(dp_rank)}: the mirror lacks {truth - mirrored}"

    def rank(self, dp_rank: int) -> WorkerRank:
        """Return the name of one of the ranks."""
        return WorkerRank(self.worker_id, dp_rank)

    def _publish(self, dp_rank: int) -> None:
        outbox = self.core.outbox(dp_rank)
        message = outbox.next_message()
        if self.is_alive and message is not None and dp_rank not in self._publishing:
            self._publishing.add(dp_rank)
            self._out.publish(self.rank(dp_rank), message.payload, partial(self._published, dp_rank, outbox))

    def _published(self, dp_rank: int, outbox: Outbox, is_acknowledged: bool) -> None:  # noqa: FBT001 - the log's answer
        if is_acknowledged:
            outbox.acknowledge()
        self._publishing.discard(dp_rank)
        self._timeline.after(0.0 if is_acknowledged else RETRY_S, partial(self._publish, dp_rank))

    def _beat(self) -> bool:
        for dp_rank in self._setup.dp_ranks if self.is_alive else ():
            self._out.announce(self.rank(dp_rank), fleet.encode(self.core.heartbeat(dp_rank)))
        return self.is_alive

    def _turn(self) -> bool:
        if self.is_alive:
            self._poll()
            self._ask_replay()
        return self.is_alive
