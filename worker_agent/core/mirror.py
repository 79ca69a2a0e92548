"""The mirror of one rank's KV cache: engine hashes end here, canonical events come out.

    block  = our sequence hash -> parent, position, and per tier the engine blocks that are it
    alias  = engine hash -> our sequence hash

Rules
* A block's sequence hash is chained from its parent's, found by the parent's engine hash. An unknown parent means that
  something was lost: the event is dropped and counted, and never becomes a root.
* Two engine blocks may be one block of ours (same content). It is held on a tier while at least one of them is there:
  `Stored` goes out for the first, `Removed` for the last.
* Stores and removals of the same engine block on the same tier are idempotent. An engine hash names one block: stored
  again as another, it leaves the first on all tiers; twice in one event, it says nothing, and the event is dropped.
* The set, its digests and the events given out agree at any time: folding the events gives the set.
"""

from collections.abc import Iterator

import msgspec

from kv_protocol.digest import SetDigest, TierDigest
from kv_protocol.events import TIERS, Cleared, Event, Removed, Stored, Tier
from kv_protocol.hashing import chain, hash_seed, local_block_hashes
from kv_protocol.recovery import HeldBlock, parents_first
from worker_agent.core.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored


class MirrorCounts(msgspec.Struct, kw_only=True):
    """What the mirror made of the engine's events so far, in blocks unless named otherwise."""

    stored: int = 0
    removed: int = 0
    cleared_events: int = 0
    deduplicated: int = 0
    ambiguous: int = 0
    unknown_parent: int = 0
    unknown_removal: int = 0
    wrong_block_size: int = 0


class _Block:
    __slots__ = ("aliases", "parent", "position")

    def __init__(self, parent: int | None, position: int) -> None:
        self.parent = parent
        self.position = position
        self.aliases: tuple[set[int], ...] = (set(), set(), set(), set())

    @property
    def tier_bits(self) -> int:
        return sum(1 << tier for tier in TIERS if self.aliases[tier])

    def tiers_of(self, engine_hash: int) -> list[Tier]:
        return [tier for tier in TIERS if engine_hash in self.aliases[tier]]


class RankMirror:
    """What one rank holds, by our hashes. `apply` returns the canonical events that tell of the change."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[int, _Block] = {}
        self._sequence_hash_of: dict[int, int] = {}
        self._digests = {tier: SetDigest() for tier in TIERS}
        self.counts = MirrorCounts()

    def apply(self, event: EngineEvent) -> list[Event]:
        """Fold one engine event in; return what it changed, in order."""
        match event:
            case EngineStored():
                return self._store(event)
            case EngineRemoved():
                return self._remove(event)
            case EngineCleared():
                self.counts.cleared_events += 1
                return self.clear()

    def clear(self) -> list[Event]:
        """Hold nothing any more."""
        held = [tier for tier in TIERS if self._digests[tier].block_count]
        self._blocks.clear()
        self._sequence_hash_of.clear()
        self._digests = {tier: SetDigest() for tier in TIERS}
        return [Cleared(tier) for tier in held]

    def _store(self, event: EngineStored) -> list[Event]:
        if event.block_size != self._block_size:
            self.counts.wrong_block_size += len(event.block_hashes)
            return []
        if len(set(event.block_hashes)) < len(event.block_hashes):
            self.counts.ambiguous += len(event.block_hashes)
            return []
        parent: int | None = None
        position = 0
        if event.parent_block_hash is not None:
            parent = self._sequence_hash_of.get(event.parent_block_hash)
            if parent is None:
                self.counts.unknown_parent += len(event.block_hashes)
                return []
            position = self._blocks[parent].position + 1
        seed = hash_seed(event.lora_name, event.cache_salt)
        hashes = chain(local_block_hashes(event.token_ids, self._block_size, seed=seed), parent)
        left = self._leave_others(dict(zip(event.block_hashes, hashes, strict=True)))
        new = []
        for at, (engine_hash, sequence_hash) in enumerate(zip(event.block_hashes, hashes, strict=True)):
            above = hashes[at - 1] if at else parent
            if self._hold(engine_hash, sequence_hash, above, position + at, event.tier):
                new.append(at)
        return [*left, *_runs(new, hashes, parent, position, event.tier)]

    def _leave_others(self, sequence_hash_of: dict[int, int]) -> list[Event]:
        left: list[Event] = []
        for engine_hash, sequence_hash in sequence_hash_of.items():
            former = self._sequence_hash_of.get(engine_hash, sequence_hash)
            if former != sequence_hash:
                for tier in self._blocks[former].tiers_of(engine_hash):
                    left += self._remove(EngineRemoved(block_hashes=(engine_hash,), tier=tier))
        return left

    def _hold(self, engine_hash: int, sequence_hash: int, parent: int | None, position: int, tier: Tier) -> bool:
        block = self._blocks.setdefault(sequence_hash, _Block(parent, position))
        self._sequence_hash_of[engine_hash] = sequence_hash
        is_new = not block.aliases[tier]
        block.aliases[tier].add(engine_hash)
        if is_new:
            self._digests[tier].add(sequence_hash)
            self.counts.stored += 1
        else:
            self.counts.deduplicated += 1
        return is_new

    def _remove(self, event: EngineRemoved) -> list[Event]:
        gone = []
        for engine_hash in event.block_hashes:
            sequence_hash = self._sequence_hash_of.get(engine_hash)
            if sequence_hash is None or engine_hash not in self._blocks[sequence_hash].aliases[event.tier]:
                self.counts.unknown_removal += 1
            elif self._let_go(engine_hash, sequence_hash, event.tier):
                gone.append(sequence_hash)
        return [Removed(tuple(gone), event.tier)] if gone else []

    def _let_go(self, engine_hash: int, sequence_hash: int, tier: Tier) -> bool:
        block = self._blocks[sequence_hash]
        block.aliases[tier].discard(engine_hash)
        if not block.tiers_of(engine_hash):
            del self._sequence_hash_of[engine_hash]
        if block.aliases[tier]:
            self.counts.deduplicated += 1
            return False
        self._digests[tier].discard(sequence_hash)
        self.counts.removed += 1
        if not block.tier_bits:
            del self._blocks[sequence_hash]
        return True

    def digests(self) -> tuple[TierDigest, ...]:
        """Return the digest of each tier that holds something."""
        return tuple(digest.of_tier(tier) for tier, digest in self._digests.items() if digest.block_count)

    def dump(self) -> Iterator[HeldBlock]:
        """Yield every block, parents first; the mirror must not change meanwhile."""
        for sequence_hash in parents_first({key: block.parent for key, block in self._blocks.items()}):
            block = self._blocks[sequence_hash]
            yield HeldBlock(sequence_hash, block.parent, block.tier_bits)


def _runs(new: list[int], hashes: list[int], parent: int | None, position: int, tier: Tier) -> Iterator[Stored]:
    start = 0
    for index, at in enumerate(new):
        if index + 1 == len(new) or new[index + 1] != at + 1:
            first = new[start]
            above = hashes[first - 1] if first else parent
            yield Stored(tuple(hashes[first : at + 1]), above, position + first, tier)
            start = index + 1
