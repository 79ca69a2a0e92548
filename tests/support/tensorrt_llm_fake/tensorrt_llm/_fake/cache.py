"""A rank's paged KV cache: a tree of blocks by content, held by sequences or waiting to be reused or evicted.

    usable tokens     all but the last of a sequence: its KV does not exist yet
    after prefill     the prompt's full blocks are stored, the new ones in one event that names the last known one
    at the end        the sequence's full blocks and the partial last one are stored likewise, then let go, leaf first
    reuse             full blocks along the tree
    room              a free block, else the least recently let go, which is a leaf

Full and partial blocks have one life: a partial block that is filled later is another block.
Source: `docs/SOURCES.md` E1.3, E1.4; cpp `kvCacheManager.cpp` (storeContextBlocks, releaseBlocks, getFreeBlock);
docs `features/kvcache.md` (LRU). Differences from the real one: `SURFACE.md`,
"What is simpler in the fake".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .events import PRIORITY, RankEvents, stored_block
from .hashing import block_hash, number_of

MmKeys = tuple[tuple[str, int, str | None], ...]


@dataclass(frozen=True)
class Identity:
    """What a sequence's blocks depend on beside its tokens; `mm_keys(start, end)` names the media in a block."""

    lora_id: int | None = None
    cache_salt: str | None = None
    mm_keys: Callable[[int, int], MmKeys] = lambda _start, _end: ()


@dataclass(eq=False)
class Block:
    """A block in the tree; `refs` sequences hold it."""

    key: tuple[Any, ...]
    tokens: tuple[int, ...]
    hash: Any
    parent: "Block | None"
    refs: int = 0
    children: dict[tuple[Any, ...], "Block"] = field(default_factory=dict)


@dataclass(eq=False)
class Held:
    """What a sequence holds: its blocks in the tree, the rest of its own, and how many prompt tokens it found."""

    blocks: list[Block] = field(default_factory=list)
    own: int = 0
    cached_tokens: int = 0
    reserved: int = 0


class BlockCache:
    """`blocks` on the GPU; tells `events` what happens."""

    def __init__(self, block_size: int, blocks: int, events: RankEvents) -> None:
        self.block_size, self.capacity = block_size, blocks
        self._events = events
        self.reuse, self.algorithm = True, "v1_block_key"
        self._roots: dict[tuple[Any, ...], Block] = {}
        self._let_go: dict[Block, None] = {}
        self._tree_blocks = self._own_blocks = self._reserved = 0
        self.alloc_total = self.alloc_new = self.reused = self.missed = 0
        events.created([blocks, 0])

    @property
    def used(self) -> int:
        """Return how many GPU blocks sequences hold."""
        return self._tree_blocks - len(self._let_go) + self._own_blocks

    def begin(self, tokens: list[int], capacity_tokens: int, identity: Identity) -> Held | None:
        """Return what a new sequence holds, with room for its prompt; None where its whole length has no room yet."""
        found = self._match(tokens, identity) if self.reuse else []
        held_now = self.used + sum(block.refs == 0 for block in found)
        needed = -(-capacity_tokens // self.block_size) - len(found)
        if held_now + self._reserved + needed > self.capacity:
            return None
        for block in found:  # all of them before the first makes room: none may have to give way to another
            self._hold(block)
        held = Held(found, 0, len(found) * self.block_size, needed)
        self._reserved += needed
        self.reused += len(found)
        self.alloc_total += len(found)
        self.missed += -(-len(tokens) // self.block_size) - len(found)
        self.grow(held, len(tokens))
        return held

    def grow(self, held: Held, tokens: int) -> None:
        """Give a sequence blocks for so many tokens; there is room, by `begin`."""
        while len(held.blocks) + held.own < -(-tokens // self.block_size):
            self._make_room()
            held.own, self._own_blocks = held.own + 1, self._own_blocks + 1
            held.reserved, self._reserved = held.reserved - 1, self._reserved - 1
            self.alloc_total, self.alloc_new = self.alloc_total + 1, self.alloc_new + 1

    def store(self, held: Held, tokens: list[int], identity: Identity, *, partial: bool) -> None:
        """Put the sequence's computed blocks into the tree."""
        if not self.reuse:
            return
        usable, size = len(tokens) - 1, self.block_size
        end = usable if partial else usable // size * size
        new: list[Block] = []
        parent = held.blocks[-1] if held.blocks else None
        for start in range(len(held.blocks) * size, end, size):
            block = self._block(tokens, start, min(start + size, end), identity, parent)
            siblings = self._roots if parent is None else parent.children
            known = siblings.get(block.key)
            if known is not None:  # computed by another sequence meanwhile: that block stays, ours is free again
                held.own, self._own_blocks = held.own - 1, self._own_blocks - 1
                self._hold(known)
            else:
                siblings[block.key] = known = block
                held.own, self._own_blocks = held.own - 1, self._own_blocks - 1
                self._tree_blocks += 1
                block.refs = 1
                new.append(block)
            held.blocks.append(known)
            parent = known
        if new:
            self._tell(new, identity, (len(held.blocks) - len(new)) * size)

    def end(self, held: Held) -> None:
        """Let go of all that a sequence holds."""
        self._own_blocks -= held.own
        self._reserved -= held.reserved
        for block in reversed(held.blocks):
            block.refs -= 1
            if block.refs == 0:
                self._let_go[block] = None
        held.blocks, held.own, held.reserved = [], 0, 0

    def hashes(self) -> set[Any]:
        """Return the hashes of all blocks in the tree."""
        stack, found = list(self._roots.values()), set()
        while stack:
            block = stack.pop()
            stack.extend(block.children.values())
            found.add(block.hash)
        return found

    # ------------------------------------------------------------------------------------------ tree
    def _match(self, tokens: list[int], identity: Identity) -> list[Block]:
        size, found, children = self.block_size, list[Block](), self._roots
        for start in range(0, len(tokens) - size, size):
            block = children.get(self._key(tokens, start, start + size, identity))
            if block is None:
                break
            found.append(block)
            children = block.children
        return found

    def _key(self, tokens: list[int], start: int, end: int, identity: Identity) -> tuple[Any, ...]:
        salt = identity.cache_salt if start == 0 else None
        return (tuple(tokens[start:end]), identity.lora_id, salt, identity.mm_keys(start, max(end, start + 1)))

    def _block(self, tokens: list[int], start: int, end: int, identity: Identity, parent: Block | None) -> Block:
        key = self._key(tokens, start, end, identity)
        extras = tuple(number_of(f"{digest}:{offset}:{uuid}") for digest, offset, uuid in key[3])
        extras += () if identity.lora_id is None else (identity.lora_id,)
        salt = None if identity.cache_salt is None else number_of(identity.cache_salt)
        hashed = block_hash(self.algorithm, key[0], None if parent is None else parent.hash, extras, salt)
        return Block(key, key[0], hashed, parent)

    def _tell(self, new: list[Block], identity: Identity, first_token: int) -> None:
        told = []
        for at, block in enumerate(new):
            start = first_token + at * self.block_size
            keys = [_mm_key(self.algorithm, each) for each in identity.mm_keys(start, start + len(block.tokens))]
            told.append(stored_block(block.hash, block.tokens, PRIORITY, keys, identity.cache_salt))
        parent = new[0].parent
        self._events.stored(None if parent is None else parent.hash, told)

    # ------------------------------------------------------------------------------------------ room
    def _hold(self, block: Block) -> None:
        block.refs += 1
        self._let_go.pop(block, None)

    def _make_room(self) -> None:
        if self._tree_blocks + self._own_blocks < self.capacity:
            return
        block = next(iter(self._let_go))
        siblings = self._roots if block.parent is None else block.parent.children
        assert not block.children
        del siblings[block.key], self._let_go[block]
        self._tree_blocks -= 1
        self._events.removed(block.hash)


def _mm_key(algorithm: str, key: tuple[str, int, str | None]) -> dict[str, Any]:
    digest, offset, uuid = key
    if algorithm == "v1_block_key":
        return {"type": "mm_key", "hash": uuid or digest, "start_offset": offset}
    told: dict[str, Any] = {"type": "mm_key", "hash": digest, "start_offset": offset}
    return told if uuid is None else told | {"uuid": uuid}
