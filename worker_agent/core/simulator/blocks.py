"""The paged block pool of one rank, with prefix reuse.

    used     = blocks that a running sequence has: its own, which nobody else knows, and those of the tree on its path
    cached   = blocks of the tree that no sequence has
    free     = the rest;  used + cached + free = total
    reserved = blocks that running sequences may yet ask for;  reserved <= cached + free

The reuse tree is a dictionary (parent block, tokens, LoRA, salt) -> block; its full blocks are what can be reused.

A sequence gets the blocks of its prompt when admitted, and one at a time later; at the end of its context the full
blocks of all prompt tokens but the last enter the tree, at its release all computed tokens do, the last block perhaps
partial. Where an equal block stands in the tree already, the sequence takes that one and gives its own back: no event,
and what was promised to others stays true, because one block becomes used and one free.

Eviction takes the cached block that was released longest ago. A sequence has the whole path of each of its blocks and
releases it from the end to the root, so a parent is always released after its children: the oldest cached block is a
leaf, no eviction orphans a child, and every cached block can be had. No scan, no count of children: O(1).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple, Self

import msgspec

from kv_protocol.hashing import lora_id
from kv_protocol.trtllm_hash import trtllm_block_hash
from worker_agent.core.simulator.events import EventLog, stored_block


class Namespace(msgspec.Struct, frozen=True):
    """What keeps equal tokens apart: the adapter and the salt, and the numbers by which the engine hashes them."""

    lora_name: str | None = None
    cache_salt: str | None = None
    lora_task_id: int | None = None
    cache_salt_id: int | None = None

    @classmethod
    def of(cls, lora_name: str | None, cache_salt: str | None) -> Self:
        """Return the namespace; an empty name or salt is an absent one. Source: `event_plane.md` section 1.6."""
        salt_id = int.from_bytes(sha256(cache_salt.encode()).digest()[:8], "little") if cache_salt else None
        return cls(lora_name or None, cache_salt or None, lora_id(lora_name) if lora_name else None, salt_id)


BlockHash = Callable[[Sequence[int], int, Namespace], int]
"""The engine hash of a block: its tokens, its parent's hash (0: none) and its namespace in, a u64 out."""


def trtllm_hash(tokens: Sequence[int], parent: int, namespace: Namespace) -> int:
    """Return TensorRT-LLM's own hash of a block."""
    lora_task_id, cache_salt_id = namespace.lora_task_id, namespace.cache_salt_id
    return trtllm_block_hash(tokens, parent, lora_task_id=lora_task_id, cache_salt_id=cache_salt_id)


class _Key(NamedTuple):
    parent: "Block | None"
    tokens: tuple[int, ...]
    lora_name: str | None
    cache_salt: str | None


class Block:
    """One block of the reuse tree, full or partial."""

    __slots__ = ("engine_hash", "key", "sequences")

    def __init__(self, key: _Key, engine_hash: int) -> None:
        self.key = key
        self.engine_hash = engine_hash
        self.sequences = 0


class BlockTable:
    """What one running sequence has of the pool: `path` in the tree, then `own_blocks` more, then a reservation."""

    __slots__ = ("namespace", "own_blocks", "path", "reserved_blocks", "reused_blocks")

    def __init__(self, namespace: Namespace, path: list[Block], reserved_blocks: int) -> None:
        self.namespace = namespace
        self.path = path
        self.reused_blocks = len(path)
        self.own_blocks = 0
        self.reserved_blocks = reserved_blocks


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks now, by state, and since the start: given to sequences, of these new, reused, and missed by prompts."""

    used_blocks: int
    cached_blocks: int
    free_blocks: int
    reserved_blocks: int
    alloc_total_blocks: int
    alloc_new_blocks: int
    reused_blocks: int
    missed_blocks: int


class BlockPool:
    """The blocks of one rank; what enters and leaves the tree is told to `events`."""

    def __init__(
        self, total_blocks: int, block_size: int, events: EventLog, block_hash: BlockHash = trtllm_hash
    ) -> None:
        self._block_size = block_size
        self._block_hash = block_hash
        self._events = events
        self._tree: dict[_Key, Block] = {}
        self._cached: OrderedDict[Block, None] = OrderedDict()
        self._free = total_blocks
        self._used = 0
        self._reserved = 0
        self._alloc_new = 0
        self._reused = 0
        self._missed = 0

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self._block_size)

    def match(self, prompt: Sequence[int], namespace: Namespace) -> list[Block]:
        """Return the blocks that a sequence with this prompt would reuse: of all tokens but the last, full blocks."""
        path: list[Block] = []
        for at in range(0, len(prompt) - self._block_size, self._block_size):
            block = self._tree.get(self._key(path, prompt, at, namespace))
            if block is None:
                break
            path.append(block)
        return path

    def admit(self, prompt: Sequence[int], tokens_max: int, namespace: Namespace) -> BlockTable | None:
        """Return a table with the prompt's blocks and the rest of `tokens_max` reserved, or None where they lack."""
        path = self.match(prompt, namespace)
        own_blocks = self.blocks_of(len(prompt)) - len(path)
        reserved_blocks = self.blocks_of(tokens_max) - len(path)
        revived_blocks = sum(not block.sequences for block in path)
        if reserved_blocks + revived_blocks > self._free + len(self._cached) - self._reserved:
            return None
        for block in path:
            self._have(block)
        table = BlockTable(namespace, path, reserved_blocks)
        self._reserved += reserved_blocks
        self._reused += len(path)
        self._missed += own_blocks
        for _ in range(own_blocks):
            self._allocate(table)
        return table

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Make room in `table` for its first `tokens` tokens, within its reservation."""
        if len(table.path) + table.own_blocks < self.blocks_of(tokens):
            self._allocate(table)

    def store_context(self, table: BlockTable, prompt: Sequence[int]) -> None:
        """Make the full blocks of all prompt tokens but the last reusable; the sequence goes on."""
        self._store(table, prompt[: (len(prompt) - 1) // self._block_size * self._block_size])

    def release(self, table: BlockTable, computed: Sequence[int]) -> None:
        """Cache the computed tokens, give back everything else; `table` is void afterwards."""
        self._store(table, computed)
        self._free += table.own_blocks
        self._used -= table.own_blocks
        self._reserved -= table.reserved_blocks
        for block in reversed(table.path):
            block.sequences -= 1
            if not block.sequences:
                self._cached[block] = None
                self._used -= 1

    def held_hashes(self) -> frozenset[int]:
        """Return the engine hashes of all full blocks of the tree."""
        return frozenset(b.engine_hash for b in self._tree.values() if len(b.key.tokens) == self._block_size)

    def statistics(self) -> PoolStatistics:
        """Return the counts of blocks."""
        return PoolStatistics(
            used_blocks=self._used,
            cached_blocks=len(self._cached),
            free_blocks=self._free,
            reserved_blocks=self._reserved,
            alloc_total_blocks=self._alloc_new + self._reused,
            alloc_new_blocks=self._alloc_new,
            reused_blocks=self._reused,
            missed_blocks=self._missed,
        )

    def _key(self, path: list[Block], tokens: Sequence[int], at: int, namespace: Namespace) -> _Key:
        block_tokens = tuple(tokens[at : at + self._block_size])
        return _Key(path[-1] if path else None, block_tokens, namespace.lora_name, namespace.cache_salt)

    def _have(self, block: Block) -> None:
        if not block.sequences:
            del self._cached[block]
            self._used += 1
        block.sequences += 1

    def _allocate(self, table: BlockTable) -> None:
        assert table.reserved_blocks, "a sequence outgrew its reservation"
        if self._free:
            self._free -= 1
        else:
            block, _ = self._cached.popitem(last=False)
            del self._tree[block.key]
            self._events.removed(block.engine_hash)
        self._used += 1
        self._alloc_new += 1
        self._reserved -= 1
        table.reserved_blocks -= 1
        table.own_blocks += 1

    def _store(self, table: BlockTable, tokens: Sequence[int]) -> None:
        new: list[Block] = []
        for at in range(len(table.path) * self._block_size, len(tokens), self._block_size):
            key = self._key(table.path, tokens, at, table.namespace)
            block = self._tree.get(key)
            if block is None:
                block = self._insert(key, table.namespace)
                new.append(block)
            else:
                self._have(block)
                self._free += 1
                self._used -= 1
            table.path.append(block)
            table.own_blocks -= 1
        if new:
            parent = new[0].key.parent
            self._events.stored(
                parent.engine_hash if parent else None,
                [stored_block(block.engine_hash, block.key.tokens, block.key.cache_salt) for block in new],
            )

    def _insert(self, key: _Key, namespace: Namespace) -> Block:
        engine_hash = self._block_hash(key.tokens, key.parent.engine_hash if key.parent else 0, namespace)
        block = self._tree[key] = Block(key, engine_hash)
        block.sequences = 1
        return block
