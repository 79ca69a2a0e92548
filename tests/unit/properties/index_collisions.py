"""Scenarios of hashes that contradict each other: any block behind any other, circles, blocks twice in an event.

No forest is behind them.
"""

from itertools import accumulate
from random import Random

from indexer.index.prefix_index import PrefixIndex
from kv_protocol.codec import encode_batch, encode_message
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.recovery import HeldBlock, block_columns
from tests.unit.properties.index_scenario import Voices
from tests.unit.properties.index_world import compare_answers, compare_everything, same

RANKS = (0, 1, 2, 65)
STEPS = {
    "_store": 12,
    "_remove": 7,
    "_load": 2,
    "_message": 5,
    "_clear": 1,
    "_drop": 1,
    "_restore": 1,
}
"""How often each step is taken."""


def run_collisions(seed: int, voices: Voices) -> None:
    """Play the seed's scenario; what is raised bears the seed."""
    scenario = Collisions(seed, voices)
    try:
        scenario.play()
    except Exception as error:
        error.add_note(f"seed {seed} of collisions, step {scenario.step_name!r}")
        raise


class Collisions:
    """Indexes that are all told the same nonsense."""

    def __init__(self, seed: int, voices: Voices) -> None:
        self._random = Random(seed)
        self.step_name = "begin"
        self._indexes = {name: make() for name, make in voices.items()}
        size = self._random.choice([3, 6, 12, 40, 150])
        self._universe = [0, 2**64 - 1, *(self._random.getrandbits(64) for _ in range(size - 2))]
        self._tiers: tuple[Tier, ...] = self._random.choice([TIERS, TIERS[:1]])
        self._now_s = 0.0

    def play(self) -> None:
        """Take steps, compare after each, and drain everything in the end."""
        for rank in RANKS:
            self._each("register", rank)
        for number in range(60):
            step = self._random.choices(list(STEPS), list(STEPS.values()))[0]
            self.step_name = f"{number} {step}"
            getattr(self, step)()
            self._compare()
        self.step_name = "drain"
        self._drain()

    def _drain(self) -> None:
        for rank in self._random.sample(RANKS, len(RANKS)):
            for tier in TIERS:
                everything = self._random.sample(self._universe, len(self._universe))
                self._each("remove", rank, everything, tier)
                self._compare()
        for name, index in self._indexes.items():
            assert set(index.structure().values()) == {0}, (name, index.structure())

    def _each(self, method: str, *arguments: object) -> None:
        for index in self._indexes.values():
            getattr(index, method)(*arguments)

    # ---------------------------------------------------------------------------------------------- draws

    def _rank(self) -> int:
        return self._random.choice(RANKS)

    def _tier(self) -> Tier:
        return self._random.choice(self._tiers)

    def _parent(self) -> int | None:
        return None if self._random.random() < 0.25 else self._random.choice(self._universe)

    def _blocks(self) -> list[int]:
        """Return a stretch of the universe, or any blocks at all, some of them twice."""
        length = self._random.choice([1, 1, 2, 5, 20, 64])
        if self._random.random() < 0.6:
            at = self._random.randrange(len(self._universe))
            return self._universe[at : at + length]
        return self._random.choices(self._universe, k=min(length, 12))

    def _event(self) -> Event:
        if self._random.random() < 0.05:
            return Cleared(self._tier())
        if self._random.random() < 0.35:
            return Removed(tuple(self._blocks()), self._tier())
        parent = self._parent()
        return Stored(tuple(self._blocks()), parent, 0 if parent is None else 1, self._tier())

    # ---------------------------------------------------------------------------------------------- facts

    def _store(self) -> None:
        self._each("store", self._rank(), self._parent(), self._blocks(), self._tier(), self._now_s)

    def _remove(self) -> None:
        self._each("remove", self._rank(), self._blocks(), self._tier())

    def _load(self) -> None:
        rows: list[HeldBlock] = []
        for _ in range(self._random.randint(0, 3)):
            parent, bits = self._parent(), self._random.choice([1, 1, 2, 3, 15])
            for block in self._blocks():
                rows.append(HeldBlock(block, parent, bits))
                parent = block if self._random.random() < 0.9 else self._parent()
        self._each("load", self._rank(), list(block_columns(rows, 7)), self._now_s)

    def _message(self) -> None:
        events = [self._event() for _ in range(self._random.randint(1, 6))]
        batches = [Batch(1, 1 + at, event) for at, event in enumerate(events)]
        message = bytearray(encode_message(batches))
        for offset in accumulate([len(encode_batch(each)) for each in batches[:-1]], initial=2):
            if self._random.random() < 0.2:
                message[offset + self._random.choice([1, 2, 3, 44])] = self._random.randrange(5)
        rank = self._rank()
        same({name: self._applied(index, rank, bytes(message)) for name, index in self._indexes.items()})

    def _applied(self, index: PrefixIndex, rank: int, message: bytes) -> int | None:
        try:
            return index.apply_batch(rank, message, self._now_s)
        except MalformedMessage:
            return None

    def _clear(self) -> None:
        self._each("clear", self._rank(), self._random.choice([None, self._tier()]))

    def _drop(self) -> None:
        rank = self._rank()
        self._each("drop", rank)
        self._each("register", rank)

    def _restore(self) -> None:
        snapshots = [index.snapshot() for index in self._indexes.values()]
        for snapshot, index in zip(snapshots[1:] + snapshots[:1], self._indexes.values(), strict=True):
            index.restore(snapshot)

    def _compare(self) -> None:
        compare_answers(self._indexes, [self._blocks() for _ in range(3)])
        if self._random.random() < 0.2:
            blocks = self._random.sample(self._universe, min(15, len(self._universe)))
            queries = [self._blocks() for _ in range(3)]
            compare_everything(self._random, self._indexes, queries, blocks, RANKS)
