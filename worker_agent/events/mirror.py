"""The mirror of one rank's KV cache: engine events with engine hashes in, canonical events out.

    block  = our sequence hash -> parent, position, and per tier the number of usable names
    name   = engine hash of one source -> block, and per (tier, attention group) stores minus removals
    usable = a name is usable on a tier while every attention group that was ever stored there has a copy
    former = names that were removed lately (bounded): an engine may report an offload only by name, in the same
             batch in which it evicts the block

Rules
* A block's sequence hash is chained from its parent's. The parent is found by its engine hash: among the names of the
  event's source, then among the other sources' names. An unknown parent means that events were lost: the event is
  dropped and counted, and never becomes a root. Tokens, LoRA, salt and multimodal hashes are in the hash; each rank has
  its own mirror. A store without LoRA or salt inherits its parent's: some engines send both only at a chain's start.
* A block is held on a tier while at least one name of any source is usable there: `Stored` goes out with the
  first such name, `Removed` with the last.
* A store without tokens reports the tier of a block that the same or another source described before; an undescribed
  name is dropped and counted. The names of such a store have no order; one that occurs twice counts as two copies.
  The store revives a block whose last name was removed lately, if the block is a root or its parent is held: else the
  block is useless.
* An engine hash names one block: stored again with other content, it names the first block no more, on any tier; an
  event that describes a hash twice (or as its own parent) is ambiguous and dropped.
* The set of held blocks, its digests and the outgoing events always agree: folding the events gives the set.

Stores are counted because some engines store one block twice (two requests computed it at once) and remove it twice.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from kv_protocol.digest import BUCKETS, SetDigest, TierDigest, bucket_table
from kv_protocol.events import TIERS, Cleared, Event, Removed, Stored, Tier
from kv_protocol.hashing import Namespace, chain, hash_seed, local_block_hashes
from kv_protocol.recovery import HeldBlock
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored

FORMER_NAMES_MAX = 16_384


class MirrorBlock:
    """One block: its place in its sequence, the number of its names, and per tier the number of usable names."""

    __slots__ = ("names", "namespace", "parent", "position", "sequence_hash", "usable")

    def __init__(self, sequence_hash: int, parent: int | None, position: int, namespace: Namespace) -> None:
        self.sequence_hash = sequence_hash
        self.parent = parent
        self.position = position
        self.namespace = namespace
        self.names = 0
        self.usable = [0] * len(TIERS)


class EngineName:
    """One engine hash, while its source holds a copy under it."""

    __slots__ = ("block", "copies", "usable_bits")

    def __init__(self, block: MirrorBlock) -> None:
        self.block = block
        self.copies: dict[tuple[Tier, int], int] = {}
        self.usable_bits = 0

    def is_usable(self, tier: Tier) -> bool:
        """Return whether the block can be used from `tier` by this name."""
        return bool(self.usable_bits >> tier & 1)


class SourceNames:
    """The names of one source on one rank."""

    def __init__(self) -> None:
        self._names: dict[int, EngineName] = {}
        self._groups: defaultdict[Tier, set[int]] = defaultdict(set)
        self._former: OrderedDict[int, MirrorBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def get(self, engine_hash: int) -> EngineName | None:
        """Return the name with this hash; None: no copy has it now."""
        return self._names.get(engine_hash)

    def meaning(self, engine_hash: int) -> MirrorBlock | None:
        """Return the block that the engine hash names, or named lately; None: neither is known."""
        name = self._names.get(engine_hash)
        return self._former.get(engine_hash) if name is None else name.block

    def store(self, engine_hash: int, block: MirrorBlock, tier: Tier, group_idx: int) -> tuple[bool, bool]:
        """Add a copy; return whether the name became usable on `tier`, and whether the group had one there already."""
        name = self._names.get(engine_hash)
        if name is None:
            name = self._names[engine_hash] = EngineName(block)
        groups, place = self._groups[tier], (tier, group_idx)
        groups.add(group_idx)
        count = name.copies.get(place, 0)
        name.copies[place] = count + 1
        became_usable = not name.is_usable(tier) and all((tier, group) in name.copies for group in groups)
        name.usable_bits |= became_usable << tier
        return became_usable, count > 0

    def remove(self, engine_hash: int, tier: Tier, group_idx: int) -> bool | None:
        """Remove a copy; return whether the name ceased to be usable on `tier`; None: there was no copy."""
        name, place = self._names.get(engine_hash), (tier, group_idx)
        if name is None or place not in name.copies:
            return None
        name.copies[place] -= 1
        if name.copies[place]:
            return False
        del name.copies[place]
        ceased = name.is_usable(tier)
        name.usable_bits &= ~(1 << tier)
        if not name.copies:
            self._give_up(engine_hash, name)
        return ceased

    def take(self, engine_hash: int) -> EngineName:
        """Remove and return an existing name."""
        name = self._names[engine_hash]
        self._give_up(engine_hash, name)
        return name

    def clear(self) -> list[EngineName]:
        """Remove and return all names."""
        names = list(self._names.values())
        self._names.clear()
        self._groups.clear()
        self._former.clear()
        return names

    def _give_up(self, engine_hash: int, name: EngineName) -> None:
        del self._names[engine_hash]
        self._former[engine_hash] = name.block
        self._former.move_to_end(engine_hash)
        if len(self._former) > FORMER_NAMES_MAX:
            self._former.popitem(last=False)


class HeldBlocks:
    """The held blocks in a set of `buckets`, or all held ones if it is empty; iterating yields rows, parents first."""

    def __init__(self, tier_bits: Mapping[int, int], blocks: Mapping[int, MirrorBlock], buckets: bytes) -> None:
        self._tier_bits = dict(tier_bits) if not buckets else _of_buckets(tier_bits, buckets)
        self._blocks = dict(blocks) if not buckets else {each: blocks[each] for each in self._tier_bits}

    def __len__(self) -> int:
        return len(self._tier_bits)

    def __iter__(self) -> Iterator[HeldBlock]:
        tier_bits, blocks = self._tier_bits, self._blocks
        visited = set[int]()
        for block in tier_bits:
            chain = list[int]()
            at: int | None = block
            while at is not None and at in tier_bits and at not in visited:
                visited.add(at)
                chain.append(at)
                at = blocks[at].parent
            for each in reversed(chain):
                yield HeldBlock(each, blocks[each].parent, tier_bits[each])


def _of_buckets(tier_bits: Mapping[int, int], buckets: bytes) -> dict[int, int]:
    is_requested = [bool(buckets[bucket >> 3] >> (bucket & 7) & 1) for bucket in range(BUCKETS)]
    return {block: bits for block, bits in tier_bits.items() if is_requested[block >> 56]}


NAMES_MAX = 1 << 24
"""How many names the blocks of a rank may have, from all sources: some 8 GB, and more than any engine has blocks."""
ENGINE = "engine"
"""The source of a worker's events if it has only one."""


class RankMirror:
    """The blocks of one rank, by our hashes. `apply` returns the canonical events of the change.

    With `is_eagle` a block's content is its own tokens and the next one, as a drafting engine keys its cache.
    """

    def __init__(self, block_size: int, *, is_eagle: bool = False) -> None:
        self._block_size = block_size
        self._is_eagle = is_eagle
        self._blocks: dict[int, MirrorBlock] = {}
        self._names: defaultdict[str, SourceNames] = defaultdict(SourceNames)
        self._tier_bits: dict[int, int] = {}
        self._digests = {tier: SetDigest() for tier in TIERS}
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Results of each source's events so far, in blocks unless named otherwise.

        `stored`, `removed`: the block became held on a tier, or ceased to be. `deduplicated`: neither, as another name
        or copy holds it, or another group has no copy yet. `duplicate`: stored although this copy existed already.
        """

    def apply(self, event: EngineEvent, source: str = ENGINE) -> list[Event]:
        """Apply one event of a source; return the canonical events of the change, in order."""
        match event:
            case EngineStored():
                return self._store(event, source)
            case EngineRemoved():
                return self._remove(event, source)
            case EngineCleared():
                self.counts[source]["cleared_events"] += 1
                return self.clear(source)

    def unfit(self, event: EngineStored) -> str:
        """Return why a store does not fit this rank's blocks; empty if it does."""
        if sum(map(len, self._names.values())) + len(event.block_hashes) > NAMES_MAX:
            return f"block_hashes: found more than {NAMES_MAX} blocks of the rank"
        if event.names_only:
            return ""
        if event.block_size != self._block_size:
            return f"block_size: found {event.block_size}, allowed {self._block_size}"
        if event.is_eagle != self._is_eagle:
            found, allowed = ("bigrams", "tokens") if event.is_eagle else ("tokens", "bigrams")
            return f"token_ids: found {found}, allowed {allowed}"
        return ""

    def clear(self, source: str = ENGINE) -> list[Event]:
        """Remove all names of `source`; return the events of the blocks no longer held."""
        gone: dict[Tier, list[int]] = {tier: [] for tier in TIERS}
        for name in self._names[source].clear():
            for tier in self._release(name):
                gone[tier].append(name.block.sequence_hash)
        return [
            Removed(tuple(hashes), tier) if self._digests[tier].block_count else Cleared(tier)
            for tier, hashes in gone.items()
            if hashes
        ]

    def _store(self, event: EngineStored, source: str) -> list[Event]:
        counts, blocks = self.counts[source], len(event.block_hashes)
        if self.unfit(event):
            counts["unfit"] += blocks
            return []
        if event.names_only:
            return self._store_by_name(event, source)
        if len({*event.block_hashes, event.parent_block_hash}) <= blocks:
            counts["ambiguous"] += blocks
            return []
        parent, position, above = None, 0, Namespace()
        if event.parent_block_hash is not None:
            parent = self._known(event.parent_block_hash, source)
            if parent is None:
                counts["unknown_parent"] += blocks
                return []
            position, above = parent.position + 1, parent.namespace
        namespace = event.namespace.below(above)
        parent_hash = None if parent is None else parent.sequence_hash
        hashes = self._hashes(event, parent_hash, namespace)
        left = self._leave_others(zip(event.block_hashes, hashes, strict=True), source)
        new = []
        for at, (engine_hash, sequence_hash) in enumerate(zip(event.block_hashes, hashes, strict=True)):
            if (block := self._blocks.get(sequence_hash)) is None:
                above_hash = hashes[at - 1] if at else parent_hash
                block = self._blocks[sequence_hash] = MirrorBlock(sequence_hash, above_hash, position + at, namespace)
            if self._hold(engine_hash, block, event, source):
                new.append(at)
        return [*left, *_runs(new, hashes, parent_hash, position, event.tier)]

    def _hashes(self, event: EngineStored, parent: int | None, namespace: Namespace) -> list[int]:
        seed = hash_seed(*namespace)
        return chain(
            local_block_hashes(
                event.token_ids, self._block_size, seed=seed, mm_hashes=event.mm_hashes, is_eagle=self._is_eagle
            ),
            parent,
        )

    def _known(self, engine_hash: int, source: str) -> MirrorBlock | None:
        for names in (self._names[source], *self._names.values()):
            if (name := names.get(engine_hash)) is not None:
                return name.block
        return None

    def _store_by_name(self, event: EngineStored, source: str) -> list[Event]:
        new: list[Event] = []
        for engine_hash in sorted(event.block_hashes, key=lambda each: self._depth(each, source)):
            block = next(filter(None, map(self._live, self._meanings(engine_hash, source))), None)
            if block is None:
                self.counts[source]["unknown_name"] += 1
            elif self._hold(engine_hash, block, event, source):
                new.append(Stored((block.sequence_hash,), block.parent, block.position, event.tier))
        return new

    def _depth(self, engine_hash: int, source: str) -> int:
        return next((block.position for block in self._meanings(engine_hash, source)), 0)

    def _meanings(self, engine_hash: int, source: str) -> Iterator[MirrorBlock]:
        for names in (self._names[source], *self._names.values()):
            if (block := names.meaning(engine_hash)) is not None:
                yield block

    def _live(self, former: MirrorBlock) -> MirrorBlock | None:
        """Return the block if it is held, else revive it; None: its parent is not held."""
        block = self._blocks.get(former.sequence_hash)
        if block is None and (former.parent is None or former.parent in self._blocks):
            block = self._blocks[former.sequence_hash] = former
        return block

    def _leave_others(self, named: Iterable[tuple[int, int]], source: str) -> list[Event]:
        names = self._names[source]
        left: list[Event] = []
        for engine_hash, sequence_hash in named:
            former = names.get(engine_hash)
            if former is not None and former.block.sequence_hash != sequence_hash:
                gone = self._release(names.take(engine_hash))
                left += [Removed((former.block.sequence_hash,), tier) for tier in gone]
        return left

    def _hold(self, engine_hash: int, block: MirrorBlock, event: EngineStored, source: str) -> bool:
        names, sequence_hash, counts = self._names[source], block.sequence_hash, self.counts[source]
        block.names += names.get(engine_hash) is None
        is_usable, is_duplicate = names.store(engine_hash, block, event.tier, event.group_idx)
        block.usable[event.tier] += is_usable
        if is_usable and block.usable[event.tier] == 1:
            self._digests[event.tier].add(sequence_hash)
            self._tier_bits[sequence_hash] = self._tier_bits.get(sequence_hash, 0) | 1 << event.tier
            counts["stored"] += 1
            return True
        counts["duplicate"] += is_duplicate
        counts["deduplicated"] += not is_duplicate
        return False

    def _remove(self, event: EngineRemoved, source: str) -> list[Event]:
        names, counts = self._names[source], self.counts[source]
        gone = []
        for engine_hash in event.block_hashes:
            name = names.get(engine_hash)
            ceased = names.remove(engine_hash, event.tier, event.group_idx)
            if name is None or ceased is None:
                counts["unknown_removal"] += 1
                continue
            if ceased and self._let_go(name.block, event.tier):
                gone.append(name.block.sequence_hash)
                counts["removed"] += 1
            else:
                counts["deduplicated"] += 1
            if not name.copies:
                self._unname(name.block)
        return [Removed(tuple(gone), event.tier)] if gone else []

    def _release(self, name: EngineName) -> list[Tier]:
        """Remove a name with all its copies; return the tiers where its block is no longer held."""
        gone = [tier for tier in TIERS if name.is_usable(tier) and self._let_go(name.block, tier)]
        self._unname(name.block)
        return gone

    def _unname(self, block: MirrorBlock) -> None:
        block.names -= 1
        if not block.names:
            del self._blocks[block.sequence_hash]

    def _let_go(self, block: MirrorBlock, tier: Tier) -> bool:
        sequence_hash = block.sequence_hash
        block.usable[tier] -= 1
        if block.usable[tier]:
            return False
        self._digests[tier].discard(sequence_hash)
        bits = self._tier_bits.get(sequence_hash, 0)
        assert bits >> tier & 1, "held no more, and let go"
        self._tier_bits[sequence_hash] = bits & ~(1 << tier)
        if bits == 1 << tier:
            del self._tier_bits[sequence_hash]
        return True

    def digests(self) -> tuple[TierDigest, ...]:
        """Return the digest of each tier that holds something."""
        return tuple(digest.of_tier(tier) for tier, digest in self._digests.items() if digest.block_count)

    def bucket_table(self) -> bytes:
        """Return the digests of all buckets of all tiers."""
        return bucket_table(digest.buckets for digest in self._digests.values())

    @property
    def held_blocks(self) -> int:
        """How many blocks are held, on whatever tiers."""
        return len(self._tier_bits)

    def dump(self, buckets: bytes = b"") -> HeldBlocks:
        """Return a copy of what is held now in a set of buckets (empty: in all)."""
        return HeldBlocks(self._tier_bits, self._blocks, buckets)


def _runs(new: list[int], hashes: list[int], parent: int | None, position: int, tier: Tier) -> Iterator[Stored]:
    start = 0
    for index, at in enumerate(new):
        if index + 1 == len(new) or new[index + 1] != at + 1:
            first = new[start]
            above = hashes[first - 1] if first else parent
            yield Stored(tuple(hashes[first : at + 1]), above, position + first, tier)
            start = index + 1
