"""Ways that lose, double, delay, reorder and spoil what they carry."""

from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from kv_protocol.codec import decode_message, encode_message
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import Batch, Cleared
from tests.simulation.timeline import Timeline

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
