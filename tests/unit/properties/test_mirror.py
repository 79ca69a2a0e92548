"""Whatever an engine says: folding what the mirror gives out gives the mirror's set, and that is what the engine said.

The model knows blocks by their whole path of tokens, counts copies of (source, engine hash, tier, group), and no more.
"""

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_protocol.digest import BUCKET_SET_BYTES, SetDigest, bucket_table
from kv_protocol.events import TIERS, Event, Removed, Stored, Tier
from kv_protocol.hashing import Namespace, chain, hash_seed, local_block_hashes
from tests.support.amount import examples
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from worker_agent.events.mirror import RankMirror

BLOCK_SIZE = 2


class Block(NamedTuple):
    """A block's own tokens and namespace."""

    tokens: tuple[int, ...]
    namespace: Namespace


Path = tuple[Block, ...]
Held = set[tuple[Path, Tier]]

SOURCES = ("engine", "host")
Told = tuple[EngineEvent, str]
"""An event and its source."""

engine_hashes = st.integers(0, 5)
tiers = st.sampled_from([Tier.GPU, Tier.GPU, Tier.HOST, Tier.EXTERNAL])
groups = st.sampled_from([0, 0, 0, 0, 1])


def store_of(
    hashes: list[int], parent: int | None, tier: Tier, cache_salt: str | None, block_size: int, shift: int, group: int
) -> EngineStored:
    """Return a store in which all even hashes name equal tokens, as all odd ones do; mostly the same each time."""
    return EngineStored(
        block_hashes=tuple(hashes),
        parent_block_hash=parent,
        token_ids=tuple((engine_hash + shift) % 2 for engine_hash in hashes for _ in range(block_size)),
        block_size=block_size,
        tier=tier,
        namespace=Namespace(cache_salt=cache_salt),
        group_idx=group,
    )


stores = st.builds(
    store_of,
    st.lists(engine_hashes, max_size=3),
    st.none() | st.none() | engine_hashes,
    tiers,
    st.sampled_from([None] * 5 + ["", "salt"]),
    st.sampled_from([BLOCK_SIZE] * 9 + [BLOCK_SIZE + 1]),
    st.sampled_from([0] * 5 + [1]),
    groups,
)
namings = st.builds(
    lambda hashes, tier: EngineStored(
        block_hashes=tuple(hashes), parent_block_hash=None, token_ids=(), block_size=0, tier=tier
    ),
    st.lists(engine_hashes, min_size=1, max_size=3),
    tiers,
)
removals = st.builds(
    lambda hashes, tier, group: EngineRemoved(block_hashes=tuple(hashes), tier=tier, group_idx=group),
    st.lists(engine_hashes, max_size=3) | st.sampled_from([[0, 2, 4], [5, 3, 1]]),
    tiers,
    groups,
)
sources = st.sampled_from(["engine", "engine", "engine", "host"])
plain = st.lists(st.tuples(st.one_of(stores, stores, removals), st.just("engine")), max_size=20)
mixed = st.lists(
    st.tuples(st.one_of(stores, stores, stores, namings, removals, st.just(EngineCleared())), sources), max_size=20
)
events = plain | mixed


class Model:
    """What the sources said: each copy of each name, on each tier, for each group."""

    def __init__(self) -> None:
        self.path_of: dict[tuple[str, int], Path] = {}
        self.copies: Counter[tuple[str, int, Tier, int]] = Counter()
        self.groups: set[tuple[str, Tier, int]] = set()
        self.usable: set[tuple[str, int, Tier]] = set()

    def apply(self, event: EngineEvent, source: str) -> None:
        if isinstance(event, EngineCleared):
            self.forget({name for name in self.names if name[0] == source})
            self.groups = {each for each in self.groups if each[0] != source}
            self.path_of = {name: path for name, path in self.path_of.items() if name[0] != source}
        elif isinstance(event, EngineRemoved):
            for engine_hash in event.block_hashes:
                self.remove((source, engine_hash), event.tier, event.group_idx)
        elif event.names_only:
            self.store_by_name(event, source)
        elif event.block_size == BLOCK_SIZE and (
            len({*event.block_hashes, event.parent_block_hash}) > len(event.block_hashes)
        ):
            self.store(event, source)

    @property
    def names(self) -> set[tuple[str, int]]:
        return {(source, engine_hash) for source, engine_hash, _, _ in self.copies}

    def forget(self, names: set[tuple[str, int]]) -> None:
        self.copies = Counter({place: count for place, count in self.copies.items() if place[:2] not in names})
        self.usable = {place for place in self.usable if place[:2] not in names}

    def meaning(self, engine_hash: int, source: str, *, live: bool) -> Path | None:
        for each in (source, *SOURCES):
            named = (each, engine_hash)
            if named in self.names if live else named in self.path_of:
                path = self.path_of[named]
                if live or path in self.live or path[:-1] in self.live or len(path) == 1:
                    return path
        return None

    def depth(self, engine_hash: int, source: str) -> int:
        paths = [self.path_of[named] for each in (source, *SOURCES) if (named := (each, engine_hash)) in self.path_of]
        return len(paths[0]) if paths else 0

    @property
    def live(self) -> set[Path]:
        return {self.path_of[name] for name in self.names}

    def store(self, event: EngineStored, source: str) -> None:
        parent: Path | None = ()
        if event.parent_block_hash is not None:
            parent = self.meaning(event.parent_block_hash, source, live=True)
            if parent is None:
                return
        tokens = [event.token_ids[at : at + BLOCK_SIZE] for at in range(0, len(event.token_ids), BLOCK_SIZE)]
        above = parent[-1] if parent else Block((), Namespace())
        texts = [own or inherited for own, inherited in zip(event.namespace, above.namespace, strict=True)]
        own = [Block(each, Namespace(*texts)) for each in tokens]
        paths = list(accumulate(own, lambda path, block: (*path, block), initial=parent))[1:]
        named = {(source, engine_hash): path for engine_hash, path in zip(event.block_hashes, paths, strict=True)}
        self.forget({name for name, path in named.items() if self.path_of.get(name) != path})
        self.path_of |= named
        for _, engine_hash in named:
            self.hold(source, engine_hash, event)

    def store_by_name(self, event: EngineStored, source: str) -> None:
        for engine_hash in sorted(event.block_hashes, key=lambda each: self.depth(each, source)):
            path = self.meaning(engine_hash, source, live=False)
            if path is not None:
                self.path_of[source, engine_hash] = path
                self.hold(source, engine_hash, event)

    def hold(self, source: str, engine_hash: int, event: EngineStored) -> None:
        self.groups.add((source, event.tier, event.group_idx))
        self.copies[source, engine_hash, event.tier, event.group_idx] += 1
        if all(
            (source, engine_hash, event.tier, group) in self.copies
            for at, tier, group in self.groups
            if (at, tier) == (source, event.tier)
        ):
            self.usable.add((source, engine_hash, event.tier))

    def remove(self, name: tuple[str, int], tier: Tier, group: int) -> None:
        place = (*name, tier, group)
        if place in self.copies:
            self.copies[place] -= 1
            if not self.copies[place]:
                del self.copies[place]
                self.usable.discard((*name, tier))

    @property
    def held(self) -> Held:
        return {(self.path_of[source, engine_hash], tier) for source, engine_hash, tier in self.usable}


def name(path: Path) -> int:
    """Return the sequence hash of a path, from the formula."""
    locals_ = [local_block_hashes(b.tokens, BLOCK_SIZE, seed=hash_seed(*b.namespace))[0] for b in path]
    return chain(locals_)[-1]


class Fold:
    """The blocks held according to the canonical events alone; it fails at an event that changes nothing."""

    def __init__(self) -> None:
        self.held: set[tuple[int, Tier]] = set()
        self.place: dict[int, tuple[int | None, int]] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            for block in event.sequence_hashes:
                self.held.remove((block, event.tier))
        else:
            cleared = {(block, tier) for block, tier in self.held if tier is event.tier}
            assert cleared
            self.held -= cleared

    def _store(self, event: Stored) -> None:
        parent = event.parent
        for position, block in enumerate(event.sequence_hashes, event.start):
            assert (block, event.tier) not in self.held
            assert self.place.setdefault(block, (parent, position)) == (parent, position)
            self.held.add((block, event.tier))
            parent = block


def check(mirror: RankMirror, told: list[Told]) -> None:
    model, fold = Model(), Fold()
    for engine_event, source in told:
        model.apply(engine_event, source)
        for event in mirror.apply(engine_event, source):
            fold.apply(event)
        assert fold.held == {(name(path), tier) for path, tier in model.held}
        for path, _ in model.held:
            assert fold.place[name(path)] == (name(path[:-1]) if path[:-1] else None, len(path) - 1)
    check_proof(mirror, fold)


def check_proof(mirror: RankMirror, fold: Fold) -> None:
    on = {tier: [block for block, where in fold.held if where is tier] for tier in TIERS}
    assert mirror.digests() == tuple(SetDigest(blocks).of_tier(tier) for tier, blocks in on.items() if blocks)
    dumped: set[int] = set()
    everything = {block for block, _ in fold.held}
    for row in mirror.dump():
        assert row.sequence_hash not in dumped
        assert row.parent == fold.place[row.sequence_hash][0]
        assert row.parent in dumped or row.parent not in everything
        assert {(row.sequence_hash, tier) for tier in row.tiers} == {
            at for at in fold.held if at[0] == row.sequence_hash
        }
        dumped.add(row.sequence_hash)
    assert dumped == everything
    assert mirror.bucket_table() == bucket_table(SetDigest(on[tier]).buckets for tier in TIERS)
    for bucket in {block >> 56 for block in everything}:
        of_bucket = {block for block in everything if block >> 56 == bucket}
        assert {
            row.sequence_hash for row in mirror.dump((1 << bucket).to_bytes(BUCKET_SET_BYTES, "little"))
        } == of_bucket


@example([])
@given(events)
@settings(max_examples=examples(400))
def test_folding_what_the_mirror_gives_out_gives_what_the_sources_said(told: list[Told]) -> None:
    check(RankMirror(BLOCK_SIZE), told)
