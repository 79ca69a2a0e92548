"""Agents, a log and an index in virtual time, and everything that may go wrong between them; one seed decides it all.

Always    what the index holds of a rank is what the rank held at the index's place in its stream, block for block
Finally   `HEAL_S` after the last fault each live rank is known exactly, proven and current, and no dead one is known

    .venv/bin/python -m tests.simulation.world <seed> [faulty | silent | calm]
"""

import sys
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Literal

import msgspec

from indexer.core.fold import (
    BatchArrived,
    BytesRefused,
    ChunkArrived,
    Fact,
    HeartbeatArrived,
    IndexFold,
    LogFound,
    LogLost,
    Question,
    WorkerGone,
)
from indexer.core.tree import PrefixIndex
from kv_protocol import codec, fleet, recovery
from kv_protocol.errors import MalformedMessage
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from tests.simulation.agent import NEVER_FULL, TURN_S, Agent, AgentSetup
from tests.simulation.link import Faults, Link, Timeline, change_a_hash, cut
from tests.simulation.oracle import BLOCK_SIZE, Held, Names, depths, held_set
from tests.simulation.workload import Workload
from worker_agent.core.engine import EngineRequest

FAULTS_S = 15.0
HEAL_S = 12.0
DELAY_MAX_S = 1.0
CHUNK_BLOCKS = 5

Kind = Literal["faulty", "silent", "calm"]
"""All faults; besides, changes of bytes that nothing but a digest can find; none at all, not even a delay."""


class WorldSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What there is, and what goes wrong how often."""

    agents: tuple[AgentSetup, ...]
    hop_b: Faults = Faults()
    publish_failure_ratio: float = 0.0
    deaths: int = 0
    index_restarts: int = 0
    outages: int = 0


def drawn_setup(kind: Kind, random: Random) -> WorldSetup:
    """Return the setup that `random` chooses."""
    ranks = random.choice([(0,), (0,), (0, 1)])
    if kind == "calm":
        return WorldSetup(agents=(AgentSetup(dp_ranks=ranks),) * 2)
    agent = AgentSetup(
        dp_ranks=ranks,
        total_kv_blocks=random.choice([20, 32]),
        host_blocks=random.choice([0, 6]),
        ring_payloads=random.choice([NEVER_FULL, NEVER_FULL, 3]),
        event_buffer_max_size=random.choice([NEVER_FULL, NEVER_FULL, 4]),
        stall_ratio=random.choice([0.0, 0.3]),
        outbox_bytes_max=random.choice([1 << 20, 200]),
        hop_a=Faults(loss_ratio=random.choice([0.0, 0.1, 0.3]), delay_max_s=random.choice([0.0, 0.3])),
    )
    return WorldSetup(
        agents=(agent,) * random.choice([1, 2, 3]),
        hop_b=Faults(
            loss_ratio=random.choice([0.0, 0.02, 0.2]),
            double_ratio=random.choice([0.0, 0.1]),
            spoil_ratio=random.choice([0.0, 0.05]),
            delay_max_s=random.choice([0.01, 0.1, DELAY_MAX_S]),
        ),
        publish_failure_ratio=random.choice([0.0, 0.2]),
        deaths=random.randrange(4),
        index_restarts=random.randrange(3),
        outages=random.randrange(2),
    )


class World:
    """`run` lives through it; an `AssertionError` of it says what is wrong, when, and of which rank."""

    def __init__(self, seed: int, kind: Kind = "faulty") -> None:
        self._kind = kind
        self._random = random = Random(f"{kind} {seed}")
        self.setup = drawn_setup(kind, random)
        self.timeline = timeline = Timeline()
        self._names = Names()
        self._workload = Workload(random)
        self._log: list[tuple[WorkerRank, bytes]] = []
        self._left: list[str] = []
        self._history: dict[tuple[WorkerRank, int], dict[int, Held]] = {}
        spoil = change_a_hash if kind == "silent" else cut
        self._events = Link(timeline, random, self.setup.hop_b, spoil=spoil)
        self._others = Link(timeline, random, self.setup.hop_b)
        self._publish_failure_ratio = self.setup.publish_failure_ratio
        self._is_out = self._is_over = False
        self._life = 0
        self.agents: dict[str, Agent] = {}
        self.fold = IndexFold(PrefixIndex())
        self.folds = [self.fold]

    def run(self) -> None:
        """Faults and work until `FAULTS_S`, then peace; then everything is known."""
        for number in range(len(self.setup.agents)):
            self._begin(number)
        self.timeline.every(TURN_S, self._tick)
        self._arrive()
        if self._kind != "calm":
            self._arrange_faults()
        try:
            self.timeline.run(FAULTS_S)
            self._make_peace()
            self.timeline.run(FAULTS_S + HEAL_S)
            self._check_finally()
        except AssertionError as error:
            error.add_note(f"at {self.timeline.now_s:.2f} s of {self.setup}")
            raise

    # -------------------------------------------------------------- what happens
    def _arrange_faults(self) -> None:
        for _ in range(self.setup.deaths):
            self._at_random(self._die)
        for _ in range(self.setup.index_restarts):
            self._at_random(self._restart_index)
        for _ in range(self.setup.outages):
            self._at_random(self._go_out)

    def _at_random(self, action: Callable[[], None]) -> None:
        self.timeline.after(self._random.uniform(1.0, FAULTS_S), action)

    def _make_peace(self) -> None:
        self._is_over = True
        if self._is_out:
            self._come_back()
        self._events.faults = self._others.faults = Faults()
        self._publish_failure_ratio = 0.0
        for agent in self.agents.values():
            agent.live.faults = agent.replay.faults = Faults()

    def _begin(self, number: int) -> None:
        worker_id = f"worker-{number}"
        if worker_id in self._left:
            self._left.remove(worker_id)
        seed = self._random.getrandbits(32)
        setup = self.setup.agents[number]
        self.agents[worker_id] = Agent(worker_id, f"i{seed}", setup, self.timeline, seed, self._names, self)

    def _die(self) -> None:
        alive = [number for number in range(len(self.agents)) if self.agents[f"worker-{number}"].is_alive]
        if not alive:
            return
        number = self._random.choice(alive)
        worker_id = f"worker-{number}"
        self.agents[worker_id].kill()
        if self._random.random() < 0.5:
            self._left.append(worker_id)
            self.timeline.after(self._random.random() * DELAY_MAX_S, lambda: self._apply(WorkerGone(worker_id)))
        if self._random.random() < 0.8:
            self.timeline.after(self._random.choice([0.0, 0.5, 3.0, 7.0]), partial(self._begin, number))

    def _restart_index(self) -> None:
        self._life += 1
        self.fold = IndexFold(PrefixIndex())
        self.folds.append(self.fold)
        if self._random.random() < 0.5:
            self._log = self._log[self._random.randrange(len(self._log) + 1) :]
        for worker_id in self._left:
            self._apply(WorkerGone(worker_id))
        for at, (rank, payload) in enumerate(self._log):
            self.timeline.after(at / len(self._log), partial(self._on_logged, self._life, rank, payload))

    def _go_out(self) -> None:
        self._is_out = True
        self._apply(LogLost())
        self.timeline.after(self._random.choice([1.0, 8.0]), self._come_back)

    def _come_back(self) -> None:
        self._is_out = False
        self._apply(LogFound())

    # -------------------------------------------------------------- work
    def _arrive(self) -> None:
        alive = [agent for agent in self.agents.values() if agent.is_alive]
        if alive:
            self._random.choice(alive).submit(self._workload.request())
            if self._random.random() < 0.1:
                self._random.choice(alive).cancel_one()
        if not self._is_over:
            self.timeline.after(self._random.expovariate(5.0), self._arrive)

    def finished(self, request: EngineRequest, tokens: list[int]) -> None:
        """A generation is whole."""
        self._workload.finished(request, tokens)

    # -------------------------------------------------------------- the log and hop B
    def publish(self, rank: WorkerRank, payload: bytes, done: Callable[[bool], None]) -> None:
        """The log takes it, or not; and says so, or not."""
        fails = self._random.random() < self._publish_failure_ratio
        if self._is_out or (fails and self._random.random() < 0.5):
            self.timeline.after(0.1, partial(done, False))
            return
        self._log.append((rank, payload))
        self._events.send(payload, partial(self._on_events, rank))
        self.timeline.after(0.01, partial(done, not fails))

    def _on_logged(self, life: int, rank: WorkerRank, payload: bytes) -> None:
        if life == self._life:
            self._on_events(rank, payload)

    def _on_events(self, rank: WorkerRank, data: bytes) -> None:
        try:
            batches = codec.decode_message(data)
        except MalformedMessage:
            self._apply(BytesRefused(rank))
            return
        for batch in batches:
            self._apply(BatchArrived(rank, batch))

    def announce(self, rank: WorkerRank, pulse: bytes) -> None:
        """A pulse is on its way."""
        if not self._is_out:
            self._others.send(pulse, partial(self._on_pulse, rank))

    def _on_pulse(self, rank: WorkerRank, data: bytes) -> None:
        try:
            self._apply(HeartbeatArrived(rank, fleet.decode_heartbeat(data)))
        except MalformedMessage:
            return

    def _apply(self, fact: Fact) -> None:
        self._ask(self.fold.apply(fact, self.timeline.now_s))

    def _ask(self, questions: list[Question]) -> None:
        for question in questions if not self._is_out else ():
            request = recovery.encode(question.request)
            self._others.send(request, partial(self._answer, self._life, question.rank))

    def _answer(self, life: int, rank: WorkerRank, data: bytes) -> None:
        agent = self.agents[rank.worker_id]
        try:
            request = recovery.decode_dump_request(data)
        except MalformedMessage:
            return
        if not agent.is_alive or self._is_out:
            return
        dump = agent.core.dump(rank.dp_rank, request.request_id)
        blocks = [block for chunk in dump for block in chunk.blocks()]
        for chunk in recovery.dump_chunks(
            request.request_id, dump[0].epoch, dump[0].last_seq, blocks, chunk_blocks=CHUNK_BLOCKS
        ):
            self._others.send(recovery.encode(chunk), partial(self._on_chunk, life, rank))

    def _on_chunk(self, life: int, rank: WorkerRank, data: bytes) -> None:
        try:
            chunk = recovery.decode_dump_chunk(data)
        except MalformedMessage:
            return
        if life == self._life:
            self._apply(ChunkArrived(rank, chunk))

    # -------------------------------------------------------------- what must be true
    def stood(self, rank: WorkerRank, epoch: int, seq: int, held: Held) -> None:
        """After `seq` of `epoch` the rank held `held`."""
        self._history.setdefault((rank, epoch), {})[seq] = held

    def _tick(self) -> bool:
        self._ask(self.fold.tick(self.timeline.now_s))
        if self._kind != "silent":
            self._check_always()
        return True

    def _check_always(self) -> None:
        prompt = self._workload.sample()
        for rank in self.fold.ranks():
            (view,) = self.fold.overlap(prompt, (rank,))
            past = {0: frozenset[object](), **self._history.get((rank, view.epoch), {})}
            assert view.seq in past, f"{rank}: at {view.seq} of {view.epoch}, where it never stood"
            held = held_set(self.fold.held(rank))
            assert held == past[view.seq], f"{rank}: at {view.seq} wrong in {held ^ past[view.seq]}"
            assert view.overlap_blocks == depths(prompt, held), f"{rank}: {view.overlap_blocks}"

    def _check_finally(self) -> None:
        live = {agent.rank(dp_rank): agent for agent in self.agents.values() if agent.is_alive for dp_rank in agent.core.dp_ranks}
        assert set(self.fold.ranks()) == set(live)
        for rank, agent in live.items():
            (view,) = self.fold.overlap((), (rank,))
            outbox = agent.core.outbox(rank.dp_rank)
            assert (view.stale, view.epoch, view.seq) == ("", outbox.epoch, outbox.last_seq), f"{rank}: {view}"
            held = held_set(self.fold.held(rank))
            assert held == agent.mirrored(rank.dp_rank), f"{rank}: {held ^ agent.mirrored(rank.dp_rank)}"
            assert held <= agent.truth(rank.dp_rank)
            if agent.is_lossless:
                assert held == agent.truth(rank.dp_rank)
                self._check_reuse(rank, agent)

    def _check_reuse(self, rank: WorkerRank, agent: Agent) -> None:
        ...


if __name__ == "__main__":
    World(int(sys.argv[1]), *sys.argv[2:]).run()  # type: ignore[arg-type]
