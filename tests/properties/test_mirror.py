"""Whatever an engine says: folding what the mirror gives out gives the mirror's set, and that is what the engine said.

The model knows blocks by their whole path of tokens, keeps a set of (engine hash, tier), and nothing else.
"""

from itertools import accumulate
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS, Cleared, Event, Removed, Stored, Tier
from kv_protocol.hashing import chain, hash_seed, local_block_hashes
from worker_agent.core.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from worker_agent.core.mirror import RankMirror

BLOCK_SIZE = 2


class Block(NamedTuple):
    """A block's own tokens and namespace."""

    tokens: tuple[int, ...]
    lora_name: str | None
    cache_salt: str | None


Path = tuple[Block, ...]
Held = set[tuple[Path, Tier]]

engine_hashes = st.integers(0, 5)
tiers = st.sampled_from([Tier.GPU, Tier.GPU, Tier.HOST, Tier.EXTERNAL])


def store_of(
    hashes: list[int], parent: int | None, tier: Tier, cache_salt: str | None, block_size: int, shift: int
) -> EngineStored:
    """Return a store in which all even hashes name equal tokens, as all odd ones do; mostly the same each time."""
    return EngineStored(
        block_hashes=tuple(hashes),
        parent_block_hash=parent,
        token_ids=tuple((engine_hash + shift) % 2 for engine_hash in hashes for _ in range(block_size)),
        block_size=block_size,
        tier=tier,
        cache_salt=cache_salt,
    )


stores = st.builds(
    store_of,
    st.lists(engine_hashes, max_size=3),
    st.none() | st.none() | engine_hashes,
    tiers,
    st.sampled_from([None] * 5 + ["", "salt"]),
    st.sampled_from([BLOCK_SIZE] * 9 + [BLOCK_SIZE + 1]),
    st.sampled_from([0] * 5 + [1]),
)
removals = st.builds(
    lambda hashes, tier: EngineRemoved(block_hashes=tuple(hashes), tier=tier),
    st.lists(engine_hashes, max_size=3) | st.sampled_from([[0, 2, 4], [5, 3, 1]]),
    tiers,
)
events = st.lists(st.one_of(stores, stores, removals), max_size=20) | st.lists(
    st.one_of(stores, stores, stores, removals, st.just(EngineCleared())), max_size=20
)


class Model:
    """What the engine said that it holds."""

    def __init__(self) -> None:
        self.path_of: dict[int, Path] = {}
        self.there: set[tuple[int, Tier]] = set()

    def apply(self, event: EngineEvent) -> None:
        if isinstance(event, EngineCleared):
            self.there = set()
        elif isinstance(event, EngineRemoved):
            self.there -= {(engine_hash, event.tier) for engine_hash in event.block_hashes}
        elif event.block_size == BLOCK_SIZE and len(set(event.block_hashes)) == len(event.block_hashes):
            self.store(event)

    def store(self, event: EngineStored) -> None:
        parent: Path = ()
        if event.parent_block_hash is not None:
            if all(engine_hash != event.parent_block_hash for engine_hash, _ in self.there):
                return
            parent = self.path_of[event.parent_block_hash]
        tokens = [event.token_ids[at : at + BLOCK_SIZE] for at in range(0, len(event.token_ids), BLOCK_SIZE)]
        own = [Block(each, event.lora_name or None, event.cache_salt or None) for each in tokens]
        paths = list(accumulate(own, lambda path, block: (*path, block), initial=parent))[1:]
        for engine_hash, path in zip(event.block_hashes, paths, strict=True):
            if self.path_of.get(engine_hash) != path:
                self.there -= {(engine_hash, tier) for tier in TIERS}
            self.path_of[engine_hash] = path
            self.there.add((engine_hash, event.tier))

    @property
    def held(self) -> Held:
        return {(self.path_of[engine_hash], tier) for engine_hash, tier in self.there}


def name(path: Path) -> int:
    """Return the sequence hash of a path, from the formula."""
    locals_ = [local_block_hashes(b.tokens, BLOCK_SIZE, seed=hash_seed(b.lora_name, b.cache_salt))[0] for b in path]
    return chain(locals_)[-1]


class Fold:
    """What somebody holds who heard the canonical events alone, and believed none that changes nothing."""

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


def check(mirror: RankMirror, engine_events: list[EngineEvent]) -> None:
    model, fold = Model(), Fold()
    for engine_event in engine_events:
        model.apply(engine_event)
        for event in mirror.apply(engine_event):
            fold.apply(event)
        assert fold.held == {(name(path), tier) for path, tier in model.held}
        for path, _ in model.held:
            assert fold.place[name(path)] == (name(path[:-1]) if path[:-1] else None, len(path) - 1)
    check_proof(mirror, fold)
    assert mirror.counts.stored - mirror.counts.removed >= 0


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


@example([])
@given(events)
@settings(max_examples=300, deadline=None)
def test_folding_what_the_mirror_gives_out_gives_what_the_engine_said(engine_events: list[EngineEvent]) -> None:
    check(RankMirror(BLOCK_SIZE), engine_events)


# -------------------------------------------------------------------- planted bugs
class RemovesWithTheFirst(RankMirror):
    """Takes one of several equal engine blocks for the last."""

    def _let_go(self, engine_hash: int, sequence_hash: int, tier: Tier) -> bool:
        for other in self._blocks[sequence_hash].aliases[tier] - {engine_hash}:
            super()._let_go(other, sequence_hash, tier)
        return super()._let_go(engine_hash, sequence_hash, tier)


class NeverRemovesTheSecond(RankMirror):
    """Lets go of one engine block only."""

    def _let_go(self, engine_hash: int, sequence_hash: int, tier: Tier) -> bool:
        return len(self._blocks[sequence_hash].aliases[tier]) == 1 and super()._let_go(engine_hash, sequence_hash, tier)


class RootsOrphans(RankMirror):
    """Takes a block of an unknown parent for a root."""

    def _store(self, event: EngineStored) -> list[Event]:
        if event.parent_block_hash not in self._sequence_hash_of:
            event = msgspec.structs.replace(event, parent_block_hash=None)
        return super()._store(event)


class ForgetsTheSalt(RankMirror):
    """Gives equal tokens of two tenants one name."""

    def _store(self, event: EngineStored) -> list[Event]:
        return super()._store(msgspec.structs.replace(event, cache_salt=None))


class KeepsFormerNames(RankMirror):
    """Leaves a block behind when its engine hash comes to name another."""

    def _leave_others(self, sequence_hash_of: dict[int, int]) -> list[Event]:
        return [] if sequence_hash_of else super()._leave_others(sequence_hash_of)


class ClearsTheGpuAlone(RankMirror):
    """Says nothing of other tiers."""

    def clear(self) -> list[Event]:
        return [event for event in super().clear() if event == Cleared(Tier.GPU)]


@pytest.mark.parametrize(
    "planted",
    [RemovesWithTheFirst, NeverRemovesTheSecond, RootsOrphans, ForgetsTheSalt, KeepsFormerNames, ClearsTheGpuAlone],
)
def test_the_property_fails_on_a_planted_bug(planted: type[RankMirror]) -> None:
    @settings(max_examples=6000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(events)
    def search(engine_events: list[EngineEvent]) -> None:
        check(planted(BLOCK_SIZE), engine_events)

    with pytest.raises((AssertionError, KeyError)):
        search()
