"""Ways between processes, and partitions: any processes may be cut off from any others, one way or both.

    way          while open                                        while cut
    ----------   -----------------------------------------------   --------------------------------------------
    connection   in order, once each, as over TCP                  held, and on its way once the cut is mended
    datagrams    lost, doubled, reordered, spoilt, as faults say   lost

What is on its way when a way is cut arrives.
"""

from collections.abc import Iterable
from functools import partial
from random import Random

from tests.simulation.link import Faults, Link, Receiver, Spoiler, cut
from tests.simulation.timeline import Action, Timeline


class Network:
    """All ways and all cuts. Processes are names."""

    def __init__(self, timeline: Timeline, random: Random) -> None:
        self.timeline, self.random = timeline, random
        self._cuts: dict[int, tuple[frozenset[str], frozenset[str]]] = {}
        self._made = 0
        self._holding: list[Way] = []

    def is_open(self, source: str, target: str) -> bool:
        """Whether what `source` sends comes to `target`."""
        if not self._cuts:
            return True
        return not any(source in sources and target in targets for sources, targets in self._cuts.values())

    def cut(self, sources: Iterable[str], targets: Iterable[str]) -> int:
        """Nothing comes from any of `sources` to any of `targets` until the cut with this number is mended."""
        self._made += 1
        self._cuts[self._made] = (frozenset(sources), frozenset(targets))
        return self._made

    def mend(self, number: int) -> None:
        """The cut is no more; one that is no more already is no matter."""
        self._cuts.pop(number, None)
        self._release()

    def mend_all(self) -> None:
        """Every process reaches every other."""
        self._cuts.clear()
        self._release()

    def way(self, source: str, target: str, faults: Faults, *, is_connection: bool) -> "Way":
        """Return a new way."""
        link = Link(self.timeline, self.random, faults, is_ordered=is_connection)
        return Way(self, link, source, target, is_connection=is_connection)

    def hold(self, way: "Way") -> None:
        """The way has something to send as soon as it is open."""
        self._holding.append(way)

    def _release(self) -> None:
        holding, self._holding = self._holding, []
        for way in holding:
            way.release()


class Way:
    """From one process to another. `faults` may change at any time, for what is sent from then on."""

    def __init__(self, network: Network, link: Link, source: str, target: str, *, is_connection: bool) -> None:
        self._network, self._link, self._is_connection = network, link, is_connection
        self._source, self._target = source, target
        self._held: list[Action] = []

    @property
    def is_open(self) -> bool:
        """Whether what is sent now is on its way now."""
        return self._network.is_open(self._source, self._target)

    def send(self, data: bytes, receive: Receiver, spoil: Spoiler = cut) -> None:
        """`receive` is called with `data` later: once, twice or never."""
        if self.is_open:
            self._link.send(data, receive, spoil)
        else:
            self._hold(partial(self._link.send, data, receive, spoil))

    def _hold(self, sending: Action) -> None:
        if self._is_connection:
            if not self._held:
                self._network.hold(self)
            self._held.append(sending)

    def release(self) -> None:
        """What was held is on its way, if the way is open."""
        if not self.is_open:
            self._network.hold(self)
            return
        held, self._held = self._held, []
        for sending in held:
            sending()

    def set_faults(self, faults: Faults) -> None:
        """From now on, what is sent suffers these."""
        self._link.faults = faults
