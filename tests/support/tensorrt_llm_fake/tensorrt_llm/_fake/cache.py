"""One window's paged KV cache: a tree of blocks by content, held by sequences or waiting to be reused or evicted.

    usable tokens     all but the last of a sequence: its KV does not exist yet
    after prefill     the prompt's full blocks are stored, the new ones in one event that names the last known one
    at the end        the sequence's full blocks and the partial last one are stored likewise, then let go, leaf first
    reuse             full blocks along the tree; then, with partial reuse, the longest common beginning of one more
                      block, which is copied and makes no event
    room              a free block, else the least recently let go; what lies below it in the tree goes with it, removed
                      from the leaves up. With a host pool it moves there instead, if the priority of all blocks is high
                      enough: `updated`. Reused on the host, it comes back: `updated`

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
    level: int = 0
    refs: int = 0
    let_go: int = 0
    children: dict[tuple[Any, ...], "Block"] = field(default_factory=dict)


@dataclass(eq=False)
class Held:
    """What a sequence holds: its blocks in the tree, the rest of its own, and how many prompt tokens it found."""

    blocks: list[Block]
    own: int
    cached_tokens: int
    reserved: int


class WindowCache:
    """`blocks` on the GPU, `host_blocks` beside it; tells `events` what happens."""

    def __init__(self, window: int, block_size: int, blocks: int, host_blocks: int, events: RankEvents) -> None:
        self.window, self.block_size, self.capacity = window, block_size, blocks
        self.host_capacity, self._events = host_blocks, events
        self.offload_priority: int = PRIORITY
        self.reuse, self.partial_reuse, self.algorithm = True, True, "v1_block_key"
        self._roots: dict[tuple[Any, ...], Block] = {}
        self._let_go: dict[Block, None] = {}
        self._tree_blocks = [0, 0]
        self._own_blocks = self._reserved = self._clock = 0
        self.alloc_total = self.alloc_new = self.reused = self.missed = 0
        events.created(window, [blocks, host_blocks])

    @property
    def used(self) -> int:
        """Return how many GPU blocks sequences hold."""
        return self._tree_blocks[0] - sum(block.level == 0 for block in self._let_go) + self._own_blocks

    def begin(self, tokens: list[int], capacity_tokens: int, identity: Identity) -> Held | None:
        """Return what a new sequence holds, with room for its prompt; None where its whole length has no room yet."""
        found, cached = self._match(tokens, identity) if self.reuse else ([], 0)
        held_now = self.used + sum(block.refs == 0 for block in found)
        needed = -(-capacity_tokens // self.block_size) - len(found)
        if held_now + self._reserved + needed > self.capacity:
            return None
        for block in found:  # all of them before the first makes room: none may have to give way to another
            self._hold(block)
        for block in found:
            if block.level == 1:
                self._make_room()
                self._move(block, 0)
        held = Held(found, 0, cached, needed)
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
                if known.level != 0:
                    break
                held.own, self._own_blocks = held.own - 1, self._own_blocks - 1
                self._hold(known)
            else:
                siblings[block.key] = known = block
                held.own, self._own_blocks = held.own - 1, self._own_blocks - 1
                self._tree_blocks[0] += 1
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
                self._clock += 1
                block.let_go = self._clock
                self._let_go[block] = None
        held.blocks, held.own, held.reserved = [], 0, 0

    def hashes(self, level: int = 0) -> set[Any]:
        """Return the hashes of the blocks of a level."""
        stack, found = list(self._roots.values()), set()
        while stack:
            block = stack.pop()
            stack.extend(block.children.values())
            if block.level == level:
                found.add(block.hash)
        return found

    # ------------------------------------------------------------------------------------------ tree
    def _match(self, tokens: list[int], identity: Identity) -> tuple[list[Block], int]:
        usable, size = len(tokens) - 1, self.block_size
        found: list[Block] = []
        children = self._roots
        for start in range(0, usable - size + 1, size):
            block = children.get(self._key(tokens, start, start + size, identity))
            if block is None:
                break
            found.append(block)
            children = block.children
        cached = len(found) * size
        if self.partial_reuse:
            rest = tuple(tokens[cached:usable])
            extras = self._key(tokens, cached, cached, identity)[1:]
            cached += max(
                (_common(rest, each.tokens) for each in children.values() if each.key[1:] == extras), default=0
            )
        return found, cached

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
        self._events.stored(self.window, None if parent is None else parent.hash, told)

    # ------------------------------------------------------------------------------------------ room
    def _hold(self, block: Block) -> None:
        block.refs += 1
        self._let_go.pop(block, None)

    def _make_room(self) -> None:
        if self._tree_blocks[0] + self._own_blocks < self.capacity:
            return
        victim = self._oldest(0)
        assert victim is not None, "`begin` asks for no more than there is"
        goes_to_host = self.offload_priority <= PRIORITY and self._host_has_room()
        if victim not in self._let_go:
            return  # it hung on what gave way to it in the host
        if goes_to_host:
            self._move(victim, 1)
        else:
            self._remove(victim)

    def _host_has_room(self) -> bool:
        """Whether one more block can lie in the host: the oldest there that no request holds gives way."""
        if self._tree_blocks[1] >= self.host_capacity:
            oldest = self._oldest(1)
            if oldest is None:
                return False
            self._remove(oldest)
        return True

    def _oldest(self, level: int) -> Block | None:
        waiting = [block for block in self._let_go if block.level == level]
        return min(waiting, key=lambda block: block.let_go, default=None)

    def _move(self, block: Block, level: int) -> None:
        self._events.updated(self.window, block.hash, block.level, level)
        self._tree_blocks[block.level] -= 1
        self._tree_blocks[level] += 1
        block.level = level

    def _remove(self, block: Block) -> None:
        for child in list(block.children.values()):
            self._remove(child)
        siblings = self._roots if block.parent is None else block.parent.children
        del siblings[block.key]
        del self._let_go[block]
        self._tree_blocks[block.level] -= 1
        self._events.removed(self.window, block.hash)


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def _mm_key(algorithm: str, key: tuple[str, int, str | None]) -> dict[str, Any]:
    digest, offset, uuid = key
    if algorithm == "v1_block_key":
        return {"type": "mm_key", "hash": uuid or digest, "start_offset": offset}
    told: dict[str, Any] = {"type": "mm_key", "hash": digest, "start_offset": offset}
    return told if uuid is None else told | {"uuid": uuid}
