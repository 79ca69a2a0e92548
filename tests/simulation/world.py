"""Agents, a broker, indexes and routers in virtual time, and what may go wrong between them; one seed decides it all.

    0 s            agents, routers, indexers and a broker begin; clients ask from `ARRIVALS_FROM_S` to `WORK_S`
    `FAULTS_S`     the last trouble was; from now on nothing is lost, and every process reaches every other
    + `HEAL_S`     everything has healed; halfway, one more indexer began

What must be true meanwhile, and in the end: `truth.py`.

    .venv/bin/python -m tests.simulation.world faulty 17
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import get_args

from kv_protocol.ids import WorkerRank
from tests.simulation.agent import TURN_S, Agent
from tests.simulation.broker import BROKER, Broker
from tests.simulation.calls import Call, Caller
from tests.simulation.connection import Connection
from tests.simulation.index import Index
from tests.simulation.network import Network, cut, lie
from tests.simulation.oracle import Names
from tests.simulation.router import Router
from tests.simulation.setup import NO_FAULTS, Kind, drawn_setup
from tests.simulation.stream import StreamBounds
from tests.simulation.timeline import ProcessClock, Timeline
from tests.simulation.troubles import Troublemaker
from tests.simulation.truth import Truth
from tests.simulation.workload import Workload
from worker_agent.port.types import EngineRequest

WORK_S = 13.0
FAULTS_S = 15.0
HEAL_S = 20.0
LATE = "indexer-late"
ARRIVALS_FROM_S = 1.5


class World:
    """`run` lives through it; an `AssertionError` says what is wrong, where and when."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.random = random = Random(f"{kind} {seed}")
        self.setup = setup = drawn_setup(kind, random)
        self.timeline = timeline = Timeline()
        self.network = Network(timeline, random)
        self._clocks: dict[str, ProcessClock] = {}
        log = setup.log
        bounds = StreamBounds(bytes_max=log.bytes_max, age_max_s=log.age_max_s)
        self.truth = Truth(self)
        self.broker = Broker(self.clock(BROKER), random, bounds, log.refusal_ratio, self.truth)
        self._names, self.workload = Names(), Workload(random)
        self.is_over = False
        self.agents: dict[str, Agent] = {}
        self.routers: dict[str, Router] = {}
        self.indexers: dict[str, Index] = {}
        self.agent_lives: list[Agent] = []
        self.index_lives: list[Index] = []
        self.router_lives: list[Router] = []

    def run(self) -> None:
        """Work until `WORK_S`, troubles until `FAULTS_S`, then peace; then everything is known."""
        try:
            self._run()
        except Exception as error:
            error.add_note(f"{self.kind} {self.seed} at {self.timeline.now_s:.2f} s of {self.setup}")
            raise

    def _run(self) -> None:
        setup, timeline = self.setup, self.timeline
        for number in range(len(setup.agents)):
            self.begin_agent(number)
        for name in self.readers():
            self.begin_reader(name)
        timeline.every(TURN_S, self._tick)
        timeline.after(ARRIVALS_FROM_S, self.arrive)
        Troublemaker(self).arrange(setup.troubles, FAULTS_S)
        timeline.run(FAULTS_S)
        self._make_peace()
        timeline.run(FAULTS_S + HEAL_S / 2)
        self.begin_reader(LATE)
        timeline.run(FAULTS_S + HEAL_S)
        self.truth.check_at_last()

    # -------------------------------------------------------------- processes
    def clock(self, process: str) -> ProcessClock:
        """Return the clock of the machine that a process runs on."""
        if process not in self._clocks:
            self._clocks[process] = ProcessClock(self.timeline, self.random)
        return self._clocks[process]

    def readers(self) -> list[str]:
        """Return the names of the processes with an index."""
        routers = [f"router-{number}" for number in range(self.setup.routers)]
        return [*routers, *(f"indexer-{number}" for number in range(self.setup.indexers))]

    def processes(self) -> list[str]:
        """Return the names of all processes."""
        return [BROKER, *(f"worker-{number}" for number in range(len(self.setup.agents))), *self.readers()]

    def begin_agent(self, number: int) -> None:
        """An agent lives; its former life, if any, ends."""
        worker_id, seed = f"worker-{number}", self.random.getrandbits(32)
        if worker_id in self.agents:
            self.agents[worker_id].kill()
        agent = Agent(
            worker_id,
            self.setup.agents[number],
            self.timeline,
            self.clock(worker_id),
            seed,
            self._names,
            partial(self._connect, worker_id),
            self.truth,
        )
        self.agents[worker_id] = agent
        self.agent_lives.append(agent)
        if self.is_over:
            agent.intake.make_peace()

    def begin_reader(self, name: str) -> None:
        """A router, or an indexer, lives; its former life ends."""
        setup = self.setup
        index = Index(
            name,
            len(self.index_lives),
            self.timeline,
            self.clock(name),
            setup,
            partial(self._connect, name),
            self.truth.answers,
        )
        self.index_lives.append(index)
        if name.startswith("router"):
            self.end_reader(name)
            router = Router(index, setup.router, self.random.getrandbits(32), self._forward, self.workload.finished)
            self.routers[name] = router
            self.router_lives.append(router)
        else:
            self.end_reader(name)
            self.indexers[name] = index

    def end_reader(self, name: str) -> None:
        """The process is no more, for now."""
        router, indexer = self.routers.pop(name, None), self.indexers.pop(name, None)
        if router is not None:
            router.kill()
        if indexer is not None:
            indexer.kill()

    def indexes(self) -> Iterator[tuple[int, Index]]:
        """Yield the indexes that live, each with the number of its life."""
        yield from ((life, index) for life, index in enumerate(self.index_lives) if index.is_alive)

    def _connect(self, process: str, on_found: Callable[[], None]) -> Connection:
        return Connection(
            process,
            self.network,
            self.broker,
            NO_FAULTS if self.is_over else self.setup.hop_b,
            is_connection=self.setup.is_connection,
            spoil=lie if self.kind == "silent" else cut,
            on_found=on_found,
        )

    def _forward(self, router: str, rank: WorkerRank, request: EngineRequest, caller: Caller) -> Call:
        def find() -> Agent | None:
            agent = self.agents.get(rank.worker_id)
            return agent if agent is not None and agent.is_alive else None

        delay_max_s = self.setup.hop_b.delay_max_s / 10
        return Call(self.network, router, rank.worker_id, find, request, caller, delay_max_s)

    # -------------------------------------------------------------- what happens
    def _make_peace(self) -> None:
        self.is_over = True
        self.network.mend_all()
        if not self.broker.is_up:
            self.broker.start()
        self.broker.thaw()
        self.broker.refusal_ratio = 0.0
        for agent in self.agents.values():
            agent.intake.make_peace()
            agent.connection.set_faults(NO_FAULTS)
        for _, index in self.indexes():
            index.connection.set_faults(NO_FAULTS)

    def arrive(self) -> None:
        if self.routers:
            router = self.random.choice(list(self.routers.values()))
            router.route(self.workload.request())
            if self.random.random() < 0.1 and router.running:
                router.leave(self.random.choice(list(router.running)))
        if self.timeline.now_s < WORK_S:
            self.timeline.after(self.random.expovariate(self.setup.arrivals_per_s), self.arrive)

    def _tick(self) -> bool:
        self.broker.expire()
        for router in self.routers.values():
            router.tick()
        for indexer in self.indexers.values():
            indexer.tick()
        self.truth.check()
        return True


if __name__ == "__main__":
    World({kind: kind for kind in get_args(Kind)}[sys.argv[1]], int(sys.argv[2])).run()
