"""One seeded scenario of a forest of blocks, told to every implementation of a prefix index; they agree throughout.

`run(seed, voices)` raises AssertionError where two of them differ; the error says which seed and step. What contradicts
itself is told in `index_collisions.py`.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from random import Random

import pytest

from indexer.index.prefix_index import PassedRequest, PrefixIndex
from kv_protocol.codec import encode_batch, encode_message
from kv_protocol.digest import BUCKET_SET_BYTES, is_in_buckets
from kv_protocol.errors import MalformedMessage
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.recovery import HeldBlock, block_columns
from tests.unit.properties.index_world import (
    FAMILIES,
    FORMS,
    World,
    compare_answers,
    compare_everything,
    outlined,
    removals,
    same,
)

Voices = Mapping[str, Callable[..., PrefixIndex]]


def run(seed: int, voices: Voices) -> None:
    """Play the seed's scenario; what is raised bears the seed."""
    scenario = Scenario(seed, voices)
    try:
        scenario.play()
    except Exception as error:
        error.add_note(f"seed {seed}, family {scenario.family_name!r}, step {scenario.step_name!r}")
        raise


class Scenario:
    """Indexes and what happens to them: drawn from the seed and from what the first of them holds."""

    def __init__(self, seed: int, voices: Voices) -> None:
        self._random = Random(seed)
        self.family_name = list(FAMILIES)[seed % len(FAMILIES)]
        self.step_name = "begin"
        self._family = FAMILIES[self.family_name]
        self._world = World(self._random, self._family)
        self._voices = voices
        self._indexes = {name: make() for name, make in voices.items()}
        self._registered = set[int]()
        self._ranks = self._random.sample(range(self._family.rank_max + 1), self._random.randint(*self._family.ranks))
        self._now_s = self._random.choice([0.0, 1e6])
        self._told: list[tuple[int, Event]] = []

    def play(self) -> None:
        """Take the family's steps, compare after each, and drain everything in the end."""
        for rank in self._ranks:
            self._register(rank)
        names, weights = list(self._family.steps), list(self._family.steps.values())
        for number in range(self._family.length):
            self.step_name = f"{number} {self._random.choices(names, weights)[0]}"
            getattr(self, "_" + self.step_name.split()[1])()
            self._now_s += self._random.choice([0.0, 0.0, 0.5])
            compare_answers(self._indexes, self._queries(3))
            if self._random.random() < 0.15:
                self._compare_everything()
        self.step_name = "drain"
        self._drain()

    def _compare_everything(self) -> None:
        blocks = self._random.sample(sorted(self._world.parent_of), min(20, len(self._world.parent_of)))
        queries = [*self._world.paths, *self._queries(10)]
        compare_everything(self._random, self._indexes, queries, blocks, sorted(self._registered))
        requests = [PassedRequest(block, float(self._random.randrange(4)), 1.0) for block in blocks]
        same({name: outlined(index, requests) for name, index in self._indexes.items()})

    def _queries(self, count: int) -> list[list[int]]:
        return [self._world.query(self._random) for _ in range(count)]

    # ---------------------------------------------------------------------------------------------- draws

    def _first(self) -> PrefixIndex:
        return next(iter(self._indexes.values()))

    def _bits(self, rank: int, block: int) -> int:
        return self._first().holders(block).get(rank, 0)

    def _is_known(self, block: int) -> bool:
        return bool(self._first().holders(block) or self._first().children(block))

    def _rank(self) -> int:
        return self._random.choice(sorted(self._registered) or [self._back()])

    def _back(self) -> int:
        rank = self._random.choice(self._ranks)
        self._register(rank)
        return rank

    def _tier(self) -> Tier:
        return self._random.choice(self._family.tiers)

    def _path(self) -> list[int]:
        return self._random.choice(self._world.paths)

    def _held(self, rank: int, tier: Tier) -> list[int]:
        """Return what the rank holds of one path, in chain order."""
        return [block for block in self._path() if self._bits(rank, block) >> tier & 1]

    def _some(self, blocks: list[int]) -> list[int]:
        """Return a part in a row, more often than not small."""
        if not blocks:
            return []
        at = self._random.randrange(len(blocks))
        return blocks[at : at + self._random.choice([1, 2, 5, len(blocks)])]

    # ---------------------------------------------------------------------------------------------- facts

    def _register(self, rank: int) -> None:
        capacity_blocks = self._random.choice([0, 0, 100])
        for index in self._indexes.values():
            index.register(rank, capacity_blocks)
        self._registered.add(rank)

    def _tell(self, rank: int, event: Event) -> None:
        form = self._random.choice(FORMS)
        for index in self._indexes.values():
            match event:
                case Stored(hashes, parent, _, tier):
                    index.store(rank, parent, form(list(hashes)), tier, self._now_s)
                case Removed(hashes, tier):
                    index.remove(rank, form(list(hashes)), tier)
                case Cleared(tier):
                    index.clear(rank, tier)
        self._told = [*self._told[-20:], (rank, event)]

    def _store(self) -> None:
        path = self._path()
        at = self._random.randrange(len(path))
        if self._random.random() < 0.6:  # where it is known, rather
            at = next((known for known in range(at, -1, -1) if not known or self._is_known(path[known - 1])), 0)
        stop = at + self._random.randint(1, self._family.event_blocks)
        self._tell(self._rank(), self._world.stored(path, at, stop, self._tier()))

    def _store_path(self) -> None:
        rank, tier, path = self._rank(), self._tier(), self._path()
        for event in self._world.cut(self._random, self._family, path[: self._random.randint(1, len(path))], tier):
            self._tell(rank, event)

    def _crowd(self) -> None:
        """Let many ranks hold the beginning of one path, each another part."""
        path, tier, ranks = self._path(), self._tier(), sorted(self._registered)
        for rank in self._random.sample(ranks, len(ranks) // 2):
            self._tell(rank, self._world.stored(path, 0, self._random.randint(1, len(path)), tier))

    def _orphan(self) -> None:
        path = self._path()
        at = self._random.randrange(len(path))
        self._tell(self._rank(), self._world.stored(path, at, at + 1 + at % self._family.event_blocks, self._tier()))

    def _reorder(self) -> None:
        rank, tier = self._rank(), self._tier()
        events: list[Event] = [*self._world.cut(self._random, self._family, self._path(), tier)]
        if held := self._some(self._held(rank, tier)):
            events += removals(self._random, held, tier)
        self._random.shuffle(events)
        for event in events:
            self._tell(rank, event)

    def _repeat(self) -> None:
        if self._told:
            rank, event = self._random.choice(self._told)
            if rank in self._registered:
                self._tell(rank, event)

    def _remove(self) -> None:
        rank, tier = self._rank(), self._tier()
        blocks = self._some(self._held(rank, tier)) or self._some(self._path())
        self._tell(rank, Removed(tuple(self._random.sample(blocks, len(blocks))), tier))

    def _remove_twice(self) -> None:
        blocks = self._some(self._path())
        self._tell(self._rank(), Removed((*blocks, *blocks), self._tier()))

    def _remove_run(self) -> None:
        rank, tier = self._rank(), self._tier()
        for event in removals(self._random, self._some(self._held(rank, tier)), tier):
            self._tell(rank, event)

    def _refill(self) -> None:
        """Give a rank what it lacks of a path whose end it holds."""
        rank, tier, path = self._rank(), self._tier(), self._path()
        held = set(self._held(rank, tier)) & set(path)
        holes = [at for at, block in enumerate(path) if block not in held]
        for at in self._random.sample(holes, len(holes))[: self._family.event_blocks]:
            self._tell(rank, self._world.stored(path, at, at + 1, tier))

    def _move(self) -> None:
        rank, old, new = self._rank(), self._tier(), self._tier()
        if blocks := self._some(self._held(rank, old)):
            path = next(path for path in self._world.paths if set(blocks) <= set(path))
            for block in blocks:
                at = path.index(block)
                self._tell(rank, self._world.stored(path, at, at + 1, new))
            self._tell(rank, Removed(tuple(blocks), old))

    def _clear(self) -> None:
        rank = self._rank()
        for index in self._indexes.values():
            index.clear(rank)

    def _clear_tier(self) -> None:
        self._tell(self._rank(), Cleared(self._tier()))

    def _drop(self) -> None:
        rank = self._random.choice(self._ranks)
        for index in self._indexes.values():
            index.drop(rank)
        self._registered.discard(rank)

    def _come_back(self) -> None:
        self._register(self._random.choice(self._ranks))

    def _load_rows(self) -> None:
        """Load a dump that was thinned out, as if its other blocks were gone."""
        thin = self._random.random()
        rows: dict[int, HeldBlock] = {}
        for path in self._random.sample(self._world.paths, 3):
            for block in path:
                if self._random.random() < thin:
                    rows.setdefault(
                        block, HeldBlock(block, self._world.parent_of[block], self._random.choice([1, 1, 2, 3, 15]))
                    )
        self._load(self._rank(), list(rows.values()))

    def _copy_dump(self) -> None:
        source, reader = self._rank(), self._rank()
        dumps = {name: list(index.dump(source, 7)) for name, index in self._indexes.items()}
        rows = [block for columns in dumps[self._random.choice(list(dumps))] for block in columns.blocks()]
        self._load(reader, rows)

    def _load(self, rank: int, rows: list[HeldBlock]) -> None:
        for index in self._indexes.values():
            index.load(rank, block_columns(rows, self._random.choice([1, 5, 1000])), self._now_s)

    def _repair_rows(self) -> None:
        """Say anew what a rank holds of some buckets: some of it as it was, some gone, some new, some elsewhere."""
        rank, thin = self._rank(), self._random.random()
        buckets = bytes(self._random.randrange(256) & self._random.randrange(256) for _ in range(BUCKET_SET_BYTES))
        rows: dict[int, HeldBlock] = {}
        for block in dict.fromkeys(block for path in self._world.paths for block in path):
            bits = self._bits(rank, block) or self._random.choice([0, 0, 1])
            if bits and is_in_buckets(block, buckets) and self._random.random() > thin / 2:
                bits = self._random.choice([bits, bits, 3])
                rows[block] = HeldBlock(block, self._world.parent_of[block], bits)
        for index in self._indexes.values():
            index.repair(rank, buckets, block_columns(rows.values(), self._random.choice([1, 5, 1000])), self._now_s)

    def _message(self) -> None:
        """Give one implementation a message, sometimes an invalid one, and the others its events one by one."""
        rank, tier = self._rank(), self._tier()
        events: list[Event] = []
        events += self._world.cut(self._random, self._family, self._path(), tier)[:6]
        events += removals(self._random, self._some(self._held(rank, tier)), tier)[:4]
        if self._random.random() < 0.2:
            events.append(Cleared(self._tier()))
        self._random.shuffle(events)
        batches = [Batch(1, 1 + at, event) for at, event in enumerate(events)]
        message = encode_message(batches)
        reader, indexes = self._random.choice(list(self._indexes)), self._indexes
        if self._random.random() < 0.3:
            offsets = list(accumulate([len(encode_batch(each)) for each in batches[:-1]], initial=2))
            offset = self._random.choice(offsets)
            with pytest.raises(MalformedMessage):
                indexes[reader].apply_batch(rank, message[: offset + 2] + b"M" + message[offset + 3 :], self._now_s)
        assert indexes[reader].apply_batch(rank, message, self._now_s) == 0, reader
        self._indexes = {name: index for name, index in indexes.items() if name != reader}
        for event in events:
            self._tell(rank, event)
        self._indexes = indexes

    def _restore(self) -> None:
        """Each implementation goes on from the snapshot of another."""
        snapshots = [index.snapshot() for index in self._indexes.values()]
        for snapshot, index in zip(snapshots[1:] + snapshots[:1], self._indexes.values(), strict=True):
            index.restore(snapshot)

    def _renew(self) -> None:
        """Each implementation is made anew, from the snapshot of another."""
        snapshots = [index.snapshot() for index in self._indexes.values()]
        self._indexes = {name: make() for name, make in self._voices.items()}
        for snapshot, index in zip(snapshots[1:] + snapshots[:1], self._indexes.values(), strict=True):
            index.restore(snapshot)

    def _drain(self) -> None:
        for rank in self._random.sample(sorted(self._registered), len(self._registered)):
            match self._random.randrange(4):
                case 0:
                    self._empty(rank)
                case 1:
                    for tier in TIERS:
                        self._tell(rank, Cleared(tier))
                case 2:
                    for index in self._indexes.values():
                        index.clear(rank)
            for index in self._indexes.values():
                index.drop(rank)
            self._registered.discard(rank)
        self._compare_everything()
        for name, index in self._indexes.items():
            assert set(index.structure().values()) == {0}, (name, index.structure())
            assert index.statistics().nodes == 0, name

    def _empty(self, rank: int) -> None:
        for tier in TIERS:
            for path in self._world.paths:
                held = [block for block in path if self._bits(rank, block) >> tier & 1]
                for event in removals(self._random, held, tier):
                    self._tell(rank, event)
        compare_answers(self._indexes, self._queries(3))
