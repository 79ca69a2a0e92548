"""Ways between processes, and partitions: any processes may be cut off from any others, one way or both.

    way          while open                                        while cut
    ----------   -----------------------------------------------   --------------------------------------------
    connection   in order, once each, as over TCP                  held, and on its way once the cut is mended
    datagrams    lost, doubled, reordered, spoilt, as faults say   lost

What is on its way when a way is cut arrives.
"""

from collections.abc import Callable, Iterable
from functools import partial
from random import Random

import msgspec

from kv_protocol.codec import decode_message, encode_message
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Batch, Cleared
from tests.simulation.timeline import Action, Timeline

JUMP_RATIO = 0.1
"""How often a lie is one about a place."""

Receiver = Callable[[bytes], None]
Spoiler = Callable[[Random, bytes], bytes]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls a message on its way, each with its probability, and how long the way takes at most."""

    loss_ratio: float = 0.0
    double_ratio: float = 0.0
    spoil_ratio: float = 0.0
    delay_max_s: float = 0.0


def cut(random: Random, data: bytes) -> bytes:
    """Return a message without its end, which every decoder of ours refuses."""
    return data[: random.randrange(max(1, len(data)))]


def lie(random: Random, data: bytes) -> bytes:
    """Return a message that is well-formed and wrong in one hash, or in a seq, or as it is where it cannot be read."""
    try:
        batches = decode_message(data)
    except MalformedMessage:
        return data
    at = random.randrange(len(batches))
    batches[at] = _changed(random, batches[at])
    return encode_message(batches)


def _changed(random: Random, batch: Batch) -> Batch:
    if isinstance(batch.event, Cleared) or random.random() < JUMP_RATIO:
        return msgspec.structs.replace(batch, seq=batch.seq + (1 << 40))
    hashes = list(batch.event.sequence_hashes)
    hashes[random.randrange(len(hashes))] ^= 1 << random.randrange(64)
    return msgspec.structs.replace(batch, event=msgspec.structs.replace(batch.event, sequence_hashes=tuple(hashes)))


class Link:
    """One way. `faults` may change at any time, for what is sent from then on; an ordered one never reorders."""

    def __init__(self, timeline: Timeline, random: Random, faults: Faults, *, is_ordered: bool = False) -> None:
        self.faults = faults
        self._timeline, self._random, self._is_ordered = timeline, random, is_ordered
        self._last_arrival_s = 0.0

    def send(self, data: bytes, receive: Receiver, spoil: Spoiler = cut) -> None:
        """`receive` is called with `data` later: once, twice or never."""
        if self._happens(self.faults.loss_ratio):
            return
        for _ in range(1 + self._happens(self.faults.double_ratio)):
            arriving = spoil(self._random, data) if self._happens(self.faults.spoil_ratio) else data
            self._timeline.after(self._delay_s(), partial(receive, arriving))

    def _happens(self, ratio: float) -> bool:
        return ratio > 0.0 and self._random.random() < ratio

    def _delay_s(self) -> float:
        delay_s = self._random.random() * self.faults.delay_max_s
        if self._is_ordered:
            self._last_arrival_s = max(self._last_arrival_s, self._timeline.now_s + delay_s)
            delay_s = self._last_arrival_s - self._timeline.now_s
        return delay_s


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
