"""Agents that share a worker id, in any order of steps: one is left, which is the earliest, and they come to rest.

The model of the log keeps the newest message of the id, takes a message only behind the place that its publisher has
read (`Nats-Expected-Last-Subject-Sequence`), and may be purged or written to by an intruder. Between an agent's look
and its publication anything may happen.
"""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.fleet import FleetEvent, WorkerLeft, WorkerRegistered
from tests.support.amount import examples
from tests.unit.router.samples import registered
from worker_agent.fleet.worker_id_rules import NO_CLAIM, Action, Liveness, NewestMessage, action

AGENTS = 4
ROUNDS_MAX = 4 * AGENTS
MOVES = {
    "start": (("new",), "runs"),
    "freeze": (("runs",), "frozen"),
    "thaw": (("frozen",), "runs"),
    "crash": (("runs", "frozen"), "crashed"),
}
"""From which states a step leads to which."""


@dataclass
class Log:
    """The id's subject."""

    last_seq: int = 0
    newest: NewestMessage | None = None
    newest_seq: int = 0

    def publish(self, event: FleetEvent, claim: int, after_seq: int | None = None) -> int | None:
        """Return the place of the message; None: it is refused."""
        if after_seq not in (None, self.newest_seq):
            return None
        self.last_seq += 1
        self.newest_seq, self.newest = self.last_seq, NewestMessage(event, claim or self.last_seq)
        return self.last_seq

    def purge(self) -> None:
        self.newest, self.newest_seq = None, 0


@dataclass
class Agent:
    own: WorkerRegistered
    state: str = "new"
    """new, runs, frozen, stopped, crashed."""
    claim: int = NO_CLAIM
    seen: tuple[Action, int] | None = None

    @property
    def is_alive(self) -> bool:
        return self.state == "runs"


@dataclass
class World:
    log: Log = field(default_factory=Log)
    agents: list[Agent] = field(
        default_factory=lambda: [
            Agent(registered(instance=f"i{at}", base_url=f"http://127.0.0.1:{at + 1}")) for at in range(AGENTS)
        ]
    )

    def look(self, agent: Agent) -> None:
        """The agent reads the newest message and decides."""
        if agent.state == "runs":
            newest = self.log.newest or NewestMessage(None)
            life = self.life("" if newest.event is None else newest.event.instance)
            agent.seen = action(newest, agent.own.instance, agent.own, agent.claim, life), self.log.newest_seq

    def life(self, instance: str) -> Liveness:
        return "alive" if any(each.is_alive and each.own.instance == instance for each in self.agents) else "silent"

    def act(self, agent: Agent) -> bool:
        """The agent does what it decided; return whether it changed anything."""
        if agent.state != "runs" or agent.seen is None:
            return False
        (what, after_seq), agent.seen = agent.seen, None
        if what == "keep":
            return False
        if what == "stop":
            agent.state = "stopped"
            return True
        claim = 0 if agent.claim == NO_CLAIM else agent.claim
        if what == "replace":
            left = WorkerLeft(worker_id="w0", instance=agent.own.instance)
            after_seq = self.log.publish(left, claim, after_seq) or -1
        seq = self.log.publish(agent.own, claim, after_seq)
        if seq is not None and agent.claim == NO_CLAIM:
            agent.claim = seq
        return True

    def step(self, what: str, at: int) -> None:
        agent = self.agents[at]
        if what in MOVES:
            before, after = MOVES[what]
            agent.state = after if agent.state in before else agent.state
        elif what == "look":
            self.look(agent)
        elif what == "act":
            self.act(agent)
        elif what == "purge":
            self.log.purge()
        else:
            self.forge(what, agent.own.instance)

    def forge(self, what: str, instance: str) -> None:
        """An intruder publishes without a condition."""
        forged: FleetEvent = registered(instance="intruder")
        if what == "forge_own":
            forged = registered(instance=instance, base_url="http://10.6.6.6:1")
        elif what == "forge_left":
            forged = WorkerLeft(worker_id="w0", instance=instance)
        self.log.publish(forged, 0)

    def settle(self) -> int:
        """Let each running agent look and act in turn until none changes anything; return the rounds that took."""
        for rounds in range(ROUNDS_MAX):
            changed = False
            for agent in self.agents:
                self.look(agent)
                changed |= self.act(agent)
            if not changed:
                return rounds
        raise AssertionError(f"they contest the id for more than {ROUNDS_MAX} rounds")


STEPS = ["start", "look", "act", "look", "act", "freeze", "thaw", "crash", "purge", "forge", "forge_own", "forge_left"]


@settings(max_examples=examples(500))
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, AGENTS - 1)), max_size=80))
def test_one_living_instance_keeps_the_id_and_it_is_the_earliest(steps: Any) -> None:
    world = World()
    for what, at in steps:
        world.step(what, at)
    alive = [agent for agent in world.agents if agent.is_alive]
    earliest = min(alive, key=lambda agent: agent.claim, default=None)
    has_claim = earliest is not None and earliest.claim != NO_CLAIM
    world.settle()
    keepers = [agent for agent in world.agents if agent.is_alive]
    assert len(keepers) == min(1, len(alive))
    for keeper in keepers:
        assert world.log.newest == NewestMessage(keeper.own, keeper.claim)
        assert keeper is earliest or not has_claim
