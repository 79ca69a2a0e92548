"""What befalls the processes of a world, and when."""

from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.broker import Loss
from tests.simulation.setup import Troubles

if TYPE_CHECKING:
    from tests.simulation.world import World

BEGIN_S = 1.0
REBIRTHS_S = (0.0, 0.0, 0.5, 3.0, 7.0)
RESTARTS_S = (0.0, 0.0, 1.0, 4.0)
OUTAGES_S = (0.2, 1.0, 8.0)
LOSSES: tuple[Loss, ...] = ("nothing", "nothing", "events", "all")
FREEZES_S = (0.5, 2.5, 6.0)
CUTS_S = (0.5, 2.0, 5.0, 9.0)
CLOCK_STEPS_S = (-4000.0, -40.0, -0.5, 0.5, 40.0, 4000.0)


class Troublemaker:
    """Does to a world what its setup says, at times that its random numbers say."""

    def __init__(self, world: "World") -> None:
        self._world, self._timeline = world, world.timeline
        self._random = world.random

    def arrange(self, troubles: Troubles, until_s: float) -> None:
        """All of it happens between `BEGIN_S` and `until_s`."""
        for action, times in (
            (self._die, troubles.deaths),
            (self._deploy, troubles.deploys),
            (self._restart, troubles.restarts),
            (self._crash, troubles.crashes),
            (self._freeze, troubles.freezes),
            (self._cut, troubles.cuts),
            (self._set_clock, troubles.clock_steps),
        ):
            for _ in range(times):
                self._timeline.after(self._random.uniform(BEGIN_S, until_s), action)

    def _die(self) -> None:
        number = self._random.randrange(len(self._world.setup.agents))
        agent = self._world.agents[f"worker-{number}"]
        if not agent.is_alive:
            return
        if self._random.random() < 0.5:
            agent.leave(partial(self._be_reborn, number))
        else:
            agent.kill()
            self._be_reborn(number)

    def _be_reborn(self, number: int) -> None:
        if self._random.random() < 0.8:
            self._timeline.after(self._random.choice(REBIRTHS_S), partial(self._world.begin_agent, number))

    def _deploy(self) -> None:
        for number in range(len(self._world.setup.agents)):
            self._world.begin_agent(number)
        for name in self._world.readers():
            self._timeline.after(self._random.random(), partial(self._world.begin_reader, name))

    def _restart(self) -> None:
        name = self._random.choice(self._world.readers())
        self._world.end_reader(name)
        self._timeline.after(self._random.choice(RESTARTS_S), partial(self._world.begin_reader, name))

    def _crash(self) -> None:
        broker = self._world.broker
        if broker.is_up:
            broker.crash()
            loss = self._random.choice(LOSSES)
            self._timeline.after(self._random.choice(OUTAGES_S), partial(self._come_back, loss))

    def _come_back(self, loss: Loss) -> None:
        if not self._world.broker.is_up:
            self._world.broker.start(loss)

    def _freeze(self) -> None:
        self._world.broker.freeze()
        self._timeline.after(self._random.choice(FREEZES_S), self._world.broker.thaw)

    def _cut(self) -> None:
        processes = self._world.processes()
        some = self._random.sample(processes, self._random.randrange(1, len(processes)))
        others = [process for process in processes if process not in some]
        network = self._world.network
        numbers = [network.cut(some, others)]
        if self._random.random() < 0.6:
            numbers.append(network.cut(others, some))
        after_s = self._random.choice(CUTS_S)
        for number in numbers:
            self._timeline.after(after_s, partial(network.mend, number))

    def _set_clock(self) -> None:
        process = self._random.choice(self._world.processes())
        self._world.clock(process).set_by(self._random.choice(CLOCK_STEPS_S))
