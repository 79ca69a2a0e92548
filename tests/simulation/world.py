"""Agents, a log and an index in virtual time, and everything that may go wrong between them; one seed decides it all.

always     what the index holds of a rank is what the rank held at the index's place in its stream, block for block;
           what a rank is said to hold its engine holds, and all of it where nothing was lost for good
at last    `HEAL_S` after the last fault every live rank is known exactly, proven and current, and no dead one is known

    .venv/bin/python -m tests.simulation.world faulty 17
"""

import sys
from collections.abc import Callable
from functools import partial
from random import Random
from typing import get_args

from indexer.core.facts import LogFound, LogLost, Question, WorkerGone
from kv_protocol import recovery
from kv_protocol.errors import MalformedMessage
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from tests.simulation.agent import TURN_S, Agent
from tests.simulation.index import Index
from tests.simulation.link import Link, Timeline, change_a_hash, cut
from tests.simulation.oracle import BLOCK_SIZE, Held, Names, depths, held_set
from tests.simulation.setup import DELAY_MAX_S, NO_FAULTS, Kind, drawn_setup
from tests.simulation.workload import Conversation, Workload
from worker_agent.core.engine import EngineRequest

WORK_S = 13.0
FAULTS_S = 15.0
HEAL_S = 10.0
"""Messages sent before peace arrive (1 s). Then, on the slowest ways: a death is noticed (5 s); or a retired epoch
lives again (3 s), or hop A is asked again (2 s) and answers (1 s), and a pulse tells the index of it (1 s), which waits
(2 s) and asks."""
CHUNK_BLOCKS = 5


class World:
    """`run` lives through it; an `AssertionError` says what is wrong, of whom and when."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._kind: Kind = kind
        self._random = random = Random(f"{kind} {seed}")
        self._setup = setup = drawn_setup(kind, random)
        self._timeline = timeline = Timeline()
        self._names, self._workload = Names(), Workload(random)
        self._log: list[tuple[WorkerRank, bytes]] = []
        self._left: set[str] = set()
        self._history: dict[tuple[WorkerRank, int], dict[int, Held]] = {}
        self._events = Link(timeline, random, setup.hop_b, spoil=change_a_hash if kind == "silent" else cut)
        self._rest = Link(timeline, random, setup.hop_b)
        self._publish_failure_ratio = setup.publish_failure_ratio
        self._is_out = self._is_over = False
        self._agents: dict[str, Agent] = {}
        self.agent_lives: list[Agent] = []
        self.index_lives = [Index(timeline, setup.kept_max, self._ask)]

    @property
    def _index(self) -> Index:
        return self.index_lives[-1]

    def run(self) -> None:
        """Work until `WORK_S`, faults until `FAULTS_S`, then peace; then everything is known."""
        for number in range(len(self._setup.agents)):
            self._begin(number)
        self._timeline.every(TURN_S, self._tick)
        self._arrive()
        for action, times in (
            (self._die, self._setup.deaths),
            (self._deploy, self._setup.deploys),
            (self._restart_index, self._setup.index_restarts),
            (self._go_out, self._setup.outages),
        ):
            for _ in range(times):
                self._timeline.after(self._random.uniform(1.0, FAULTS_S), action)
        try:
            self._timeline.run(FAULTS_S)
            self._make_peace()
            self._timeline.run(FAULTS_S + HEAL_S)
            self._check_at_last()
        except AssertionError as error:
            error.add_note(f"at {self._timeline.now_s:.2f} s of {self._setup}")
            raise

    # -------------------------------------------------------------- what happens
    def _make_peace(self) -> None:
        self._is_over = True
        self._come_back()
        self._events.faults = self._rest.faults = NO_FAULTS
        self._publish_failure_ratio = 0.0
        for agent in self._agents.values():
            agent.make_peace()

    def _begin(self, number: int) -> None:
        worker_id, seed = f"worker-{number}", self._random.getrandbits(32)
        self._left.discard(worker_id)
        if worker_id in self._agents:
            self._agents[worker_id].kill()
        agent = Agent(worker_id, self._setup.agents[number], self._timeline, seed, self._names, self)
        self._agents[worker_id] = agent
        self.agent_lives.append(agent)
        if self._is_over:
            agent.make_peace()

    def _die(self) -> None:
        number = self._random.randrange(len(self._setup.agents))
        agent = self._agents[f"worker-{number}"]
        if not agent.is_alive:
            return
        agent.kill()
        if self._random.random() < 0.5:
            self._left.add(agent.worker_id)
            told_s = self._random.random() * DELAY_MAX_S
            self._timeline.after(told_s, lambda: self._index.apply(WorkerGone(agent.worker_id)))
        if self._random.random() < 0.8:
            self._timeline.after(self._random.choice([0.0, 0.0, 0.5, 3.0, 7.0]), partial(self._begin, number))

    def _deploy(self) -> None:
        for number in range(len(self._setup.agents)):
            self._begin(number)
        self._timeline.after(self._random.random() * DELAY_MAX_S, self._restart_index)

    def _restart_index(self) -> None:
        self._index.kill()
        self.index_lives.append(Index(self._timeline, self._setup.kept_max, self._ask))
        if self._random.random() < 0.5:
            self._log = self._log[self._random.randrange(len(self._log) + 1) :]
        if self._is_out:
            self._index.apply(LogLost())
        for worker_id in sorted(self._left):
            self._index.apply(WorkerGone(worker_id))
        for at, (rank, payload) in enumerate(self._log):
            self._timeline.after(at / len(self._log), partial(self._index.on_events, rank, payload))

    def _go_out(self) -> None:
        self._is_out = True
        self._index.apply(LogLost())
        self._timeline.after(self._random.choice([1.0, 8.0]), self._come_back)

    def _come_back(self) -> None:
        if self._is_out:
            self._is_out = False
            self._index.apply(LogFound())

    def _arrive(self) -> None:
        agent = self._random.choice([*self._agents.values()])
        if agent.is_alive:
            agent.engine.submit(self._workload.request())
            if self._random.random() < 0.1:
                agent.engine.cancel_one()
        if self._timeline.now_s < WORK_S:
            self._timeline.after(self._random.expovariate(5.0), self._arrive)

    def finished(self, request: EngineRequest, tokens: list[int]) -> None:
        """A generation is whole."""
        self._workload.finished(request, tokens)

    # -------------------------------------------------------------- the log and hop B
    def publish(self, rank: WorkerRank, payload: bytes, done: Callable[[bool], None]) -> None:
        """The log takes the payload, or not; and says so, or not."""
        fails = self._is_out or self._random.random() < self._publish_failure_ratio
        if not self._is_out and (not fails or self._random.random() < 0.5):
            self._log.append((rank, payload))
            self._events.send(payload, lambda data: self._index.on_events(rank, data))
        self._timeline.after(0.01, partial(done, not fails))

    def announce(self, rank: WorkerRank, pulse: bytes) -> None:
        """A pulse is on its way."""
        if not self._is_out:
            self._rest.send(pulse, lambda data: self._index.on_pulse(rank, data))

    def _ask(self, index: Index, question: Question) -> None:
        if not self._is_out:
            request = recovery.encode(question.request)
            self._rest.send(request, partial(self._answer, index, question.rank))

    def _answer(self, index: Index, rank: WorkerRank, data: bytes) -> None:
        agent = self._agents[rank.worker_id]
        try:
            request_id = recovery.decode_dump_request(data).request_id
        except MalformedMessage:
            return
        if agent.is_alive and not self._is_out:
            (dump,) = agent.core.dump(rank.dp_rank, request_id)
            blocks = dump.blocks()
            for chunk in recovery.dump_chunks(request_id, dump.epoch, dump.last_seq, blocks, chunk_blocks=CHUNK_BLOCKS):
                self._rest.send(recovery.encode(chunk), partial(index.on_chunk, rank))

    # -------------------------------------------------------------- what must be true
    def stood(self, rank: WorkerRank, epoch: int, seq: int, held: Held) -> None:
        """After `seq` of `epoch` the rank held `held`."""
        self._history.setdefault((rank, epoch), {0: frozenset()})[seq] = held

    def _tick(self) -> bool:
        self._index.tick()
        if self._kind != "silent":
            self._check_always()
        return True

    def _check_always(self) -> None:
        fold, prompt = self._index.fold, _hashes(self._random.choice(self._workload.conversations))
        for rank in fold.ranks():
            (view,) = fold.overlap(prompt, (rank,))
            past = self._history.get((rank, view.epoch), {0: frozenset()})
            assert view.seq in past, f"{rank}: at {view.seq} of {view.epoch}, where it never stood"
            held = held_set(fold.held(rank))
            assert held == past[view.seq], f"{rank}: at {view.seq}, wrong in {held ^ past[view.seq]}"
            assert view.overlap_blocks == depths(prompt, held), f"{rank}: overlap is {depths(prompt, held)}"

    def _check_at_last(self) -> None:
        live = {agent.rank(n): agent for agent in self._agents.values() if agent.is_alive for n in agent.dp_ranks}
        known = set(self._index.fold.ranks())
        assert known == set(live), f"unknown: {set(live) - known}, dead and known: {known - set(live)}"
        for rank, agent in live.items():
            assert agent.is_read, f"{rank}: hop A is not read to its end"
            (view,) = self._index.fold.overlap((), (rank,))
            outbox = agent.core.outbox(rank.dp_rank)
            assert (view.stale, view.epoch, view.seq) == ("", outbox.epoch, outbox.last_seq), f"{rank}: {view}"
            held, mirrored = held_set(self._index.fold.held(rank)), agent.mirrored(rank.dp_rank)
            truth = agent.engine.held(rank.dp_rank)
            assert held == mirrored, f"{rank}: wrong in {held ^ mirrored}"
            assert held <= truth, f"{rank}: invented {held - truth}"
            if agent.is_lossless:
                assert held == truth, f"{rank}: lacks {truth - held}"
                self._check_reuse(rank, agent)

    def _check_reuse(self, rank: WorkerRank, agent: Agent) -> None:
        for conversation in self._workload.conversations:
            (view,) = self._index.fold.overlap(_hashes(conversation), (rank,))
            reused = agent.engine.reused_blocks(rank.dp_rank, conversation.request("", (), 1))
            predicted = view.overlap_blocks[0]
            assert predicted == reused or (predicted > reused and not conversation.is_alone), f"{rank}: {reused=}"


def _hashes(conversation: Conversation) -> list[int]:
    return sequence_hashes(conversation.tokens, BLOCK_SIZE, cache_salt=conversation.cache_salt)


if __name__ == "__main__":
    World({kind: kind for kind in get_args(Kind)}[sys.argv[1]], int(sys.argv[2])).run()
