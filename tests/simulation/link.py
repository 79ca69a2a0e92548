"""Virtual time, and ways that lose, double, delay, reorder and spoil what they carry."""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from random import Random

import msgspec

from kv_protocol.codec import decode_message, encode_message
from kv_protocol.events import Batch, Cleared

Action = Callable[[], None]
Receiver = Callable[[bytes], None]
Spoiler = Callable[[Random, bytes], bytes]


class Timeline:
    """Does what is due, in the order of time, and of arrangement at equal times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._arranged = 0

    def after(self, delay_s: float, action: Action) -> None:
        """`action` is done `delay_s` from now."""
        self._arranged += 1
        heappush(self._due, (self.now_s + delay_s, self._arranged, action))

    def every(self, period_s: float, action: Callable[[], bool]) -> None:
        """`action` is done now and each `period_s`, until it returns False."""
        if action():
            self.after(period_s, partial(self.every, period_s, action))

    def run(self, until_s: float) -> None:
        """Everything due until then is done."""
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, action = heappop(self._due)
            action()
        self.now_s = until_s


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls a message on its way, each with its probability, and how long the way takes at most."""

    loss_ratio: float = 0.0
    double_ratio: float = 0.0
    spoil_ratio: float = 0.0
    delay_max_s: float = 0.0


def cut(random: Random, data: bytes) -> bytes:
    """Return a message without its end, which every decoder of ours refuses."""
    return data[: random.randrange(len(data))]


def change_a_hash(random: Random, data: bytes) -> bytes:
    """Return a message that is well-formed and wrong in one hash."""
    batches = decode_message(data)
    at = random.randrange(len(batches))
    batches[at] = _changed(random, batches[at])
    return encode_message(batches)


def _changed(random: Random, batch: Batch) -> Batch:
    if isinstance(batch.event, Cleared):
        return batch
    hashes = list(batch.event.sequence_hashes)
    hashes[random.randrange(len(hashes))] ^= 1 << random.randrange(64)
    return msgspec.structs.replace(batch, event=msgspec.structs.replace(batch.event, sequence_hashes=tuple(hashes)))


class Link:
    """One way. `faults` may change at any time, for what is sent from then on; an ordered one never reorders."""

    def __init__(
        self, timeline: Timeline, random: Random, faults: Faults, *, spoil: Spoiler = cut, is_ordered: bool = False
    ) -> None:
        self.faults = faults
        self._timeline, self._random, self._spoil, self._is_ordered = timeline, random, spoil, is_ordered
        self._last_arrival_s = 0.0

    def send(self, data: bytes, receive: Receiver) -> None:
        """`receive` is called with `data` later: once, twice or never."""
        if self._happens(self.faults.loss_ratio):
            return
        for _ in range(1 + self._happens(self.faults.double_ratio)):
            arriving = self._spoil(self._random, data) if self._happens(self.faults.spoil_ratio) else data
            self._timeline.after(self._delay_s(), partial(receive, arriving))

    def _happens(self, ratio: float) -> bool:
        return self._random.random() < ratio

    def _delay_s(self) -> float:
        delay_s = self._random.random() * self.faults.delay_max_s
        if self._is_ordered:
            self._last_arrival_s = max(self._last_arrival_s, self._timeline.now_s + delay_s)
            delay_s = self._last_arrival_s - self._timeline.now_s
        return delay_s
