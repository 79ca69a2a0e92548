"""The paged block pool of one rank, with prefix reuse, and its KV events.

    used     = blocks of running sequences: their own, not yet in the tree, and those in the tree on their paths
    cached   = blocks of the tree on the GPU that no sequence has
    free     = the rest;  used + cached + free = total
    reserved = blocks that running sequences may yet ask for;  reserved <= cached + free

The reuse tree is a dictionary (parent block, tokens, LoRA, salt) -> block; its full blocks can be reused. With a host
tier some of its blocks lie in host memory; a block is copied back to the GPU when it is reused.

A sequence gets the blocks of its prompt when admitted, then one at a time. At the end of its context the full blocks of
all prompt tokens but the last enter the tree; at its release the blocks of all computed tokens do, and the last one may
be partial. If an equal block is in the tree already, the sequence takes that one and gives its own back: no event, and
reservations stay valid, because one block becomes used and one free. (If the equal block is on the host, the sequence's
own block replaces it in the tree.)

Eviction takes the cached block that was released longest ago. A sequence uses the complete path of each of its blocks
and releases it from the end to the root, so a parent is always released after its children: the evicted block is a
leaf, no child is orphaned, and every cached block is reachable, without a scan or a count of children.

The host tier takes full blocks that are evicted from the GPU. A block is on the GPU or on the host; a full host drops
its oldest block for good. No block outlives its parent there either: the parent comes to the host after all its
children, and is dropped after them. The first blocks of a prefix are on the GPU, the rest on the host.

Events have TensorRT-LLM's JSON shape and numbering:

    event_id    from 0, incremented for each event of the rank; a hole means that an event was lost on its way
    created     the first event: how many blocks the pool has on GPU and on host
    stored      new blocks in chain order; `parent_hash` is the block before the first of them
    removed     removals in a row, up to another event or the end of the iteration, are one event
    updated     a block that stays in the tree has moved between GPU (0) and host (1)

Source: `docs/SOURCES.md` E1.1, E1.3 to E1.5, E3.3.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from kv_protocol.events import Tier
from kv_protocol.hashing import Namespace

_PRIORITY = 35
"""The retention priority of every block: the engine's default. Source: `docs/SOURCES.md` E1.3."""
EngineEvent = dict[str, Any]
"""One event, as the engine's JSON has it."""


def named_block(tokens: Sequence[int], parent: int, namespace: Namespace) -> int:
    """Return the engine hash, a u64, of a full or partial block after the block with the hash `parent` (0: none).

    Readers of events cannot compute it: every engine has a hash function of its own.
    """
    return xxh3_64_intdigest(msgspec.msgpack.encode((tokens, parent, namespace)))


class BlockKey(NamedTuple):
    """The key of a block under its parent. In `namespace` an absent text is None, never empty."""

    parent: "Block | None"
    tokens: tuple[int, ...]
    namespace: Namespace


class Block:
    """One block of the reuse tree, full or partial. `sequences` counts the running sequences that have it."""

    __slots__ = ("engine_hash", "key", "on_gpu", "sequences")

    def __init__(self, key: BlockKey, engine_hash: int) -> None:
        self.key = key
        self.engine_hash = engine_hash
        self.on_gpu = True
        self.sequences = 1


class RankEvents:
    """Numbers the events of one rank's pool, and keeps them until they are taken, once per iteration.

    Events of an engine with one rank do not name it: `attention_dp_rank` is None.
    """

    def __init__(self, window_size: int, attention_dp_rank: int | None = None) -> None:
        self._common: EngineEvent = {"window_size": window_size}
        if attention_dp_rank is not None:
            self._common["attention_dp_rank"] = attention_dp_rank
        self._next_id = 0
        self._events: list[EngineEvent] = []
        self._removed: list[int] = []

    def created(self, gpu_blocks: int, host_blocks: int) -> None:
        """Record the new pool."""
        self._append("created", num_blocks_per_cache_level=[gpu_blocks, host_blocks])

    def stored(self, blocks: Sequence[Block]) -> None:
        """Record new blocks on the GPU."""
        self._close_removal()
        parent = blocks[0].key.parent
        self._append(
            "stored",
            parent_hash=None if parent is None else parent.engine_hash,
            blocks=[
                {
                    "type": "stored_block",
                    "block_hash": block.engine_hash,
                    "tokens": [
                        {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in block.key.tokens
                    ],
                    "cache_level": Tier.GPU.value,
                    "priority": _PRIORITY,
                    "mm_keys": [],
                    "cache_salt": block.key.namespace.cache_salt,
                }
                for block in blocks
            ],
        )

    def removed(self, block: Block) -> None:
        """Record a removal; removals in a row become one event."""
        self._removed.append(block.engine_hash)

    def moved(self, block: Block, old: Tier, new: Tier) -> None:
        """Record that a block lies on another tier."""
        self._close_removal()
        level = {"type": "event_diff", "new_value": new.value, "old_value": old.value}
        self._append("updated", block_hash=block.engine_hash, cache_level=level, priority=None)

    def take(self) -> list[EngineEvent]:
        """Return the events since the last call."""
        self._close_removal()
        taken, self._events = self._events, []
        return taken

    def _append(self, kind: str, **data: Any) -> None:  # noqa: ANN401 - JSON
        self._events.append({"event_id": self._next_id, "data": {"type": kind, **data}, **self._common})
        self._next_id += 1

    def _close_removal(self) -> None:
        """Append the event of the removals so far, so that the next removal begins a new event."""
        if self._removed:
            removed, self._removed = self._removed, []
            self._append("removed", block_hashes=removed)


class BlockTable:
    """The blocks of one running sequence: `path` in the tree, then `own_blocks` more, then a reservation."""

    __slots__ = ("namespace", "own_blocks", "path", "reserved_blocks", "reused_blocks")

    def __init__(self, namespace: Namespace, path: list[Block], reserved_blocks: int) -> None:
        self.namespace = namespace
        self.path = path
        self.reused_blocks = len(path)
        self.own_blocks = 0
        self.reserved_blocks = reserved_blocks


class BlockPool:
    """The blocks of one rank, and `events`, the changes of its tree; `host_blocks` 0: there is no host tier."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        events: RankEvents,
        *,
        host_blocks: int = 0,
    ) -> None:
        self._block_size = block_size
        self.events = events
        self._tree: dict[BlockKey, Block] = {}
        self._cached: OrderedDict[Block, None] = OrderedDict()
        self._host_blocks_max = host_blocks
        self._on_host: OrderedDict[Block, None] = OrderedDict()
        self.free_blocks = total_blocks
        self.used_blocks = 0
        self.reserved_blocks = 0
        self.moved_blocks = 0
        """How many blocks were copied between GPU and host since the start."""
        events.created(total_blocks, host_blocks)

    @property
    def cached_blocks(self) -> int:
        """How many blocks of the GPU are cached."""
        return len(self._cached)

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self._block_size)

    def match(self, prompt: Sequence[int], namespace: Namespace) -> list[Block]:
        """Return the full blocks that a sequence with this prompt would reuse, of all tokens but the last."""
        path: list[Block] = []
        for at in range(0, len(prompt) - self._block_size, self._block_size):
            block = self._tree.get(self._key(path, prompt, at, namespace))
            if block is None:
                break
            path.append(block)
        return path

    def admit(
        self, prompt: Sequence[int], tokens_max: int, namespace: Namespace, *, spare_blocks: int = 0
    ) -> BlockTable | None:
        """Return a table with the prompt's blocks and the rest of `tokens_max` reserved.

        None if blocks are missing, or fewer than `spare_blocks` would be left.
        """
        path = self.match(prompt, namespace)
        own_blocks = self.blocks_of(len(prompt)) - len(path)
        reserved_blocks = self.blocks_of(tokens_max) - len(path)
        revived_blocks = sum(not block.sequences for block in path)
        if (
            reserved_blocks + revived_blocks + spare_blocks
            > self.free_blocks + self.cached_blocks - self.reserved_blocks
        ):
            return None
        onboarded_blocks = sum([self._have(block) for block in path])
        for _ in range(onboarded_blocks):  # only now: an eviction may drop host blocks that no sequence has yet
            self._claim()
        table = BlockTable(namespace, path, reserved_blocks)
        self.reserved_blocks += reserved_blocks
        for _ in range(own_blocks):
            self._allocate(table)
        return table

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Make room in `table` for its first `tokens` tokens, within its reservation."""
        if len(table.path) + table.own_blocks < self.blocks_of(tokens):
            self._allocate(table)

    def reserve(self, table: BlockTable, tokens: int) -> bool:
        """Reserve a block if `table` needs one more for its first `tokens` tokens; return False if none is left."""
        if len(table.path) + table.own_blocks + table.reserved_blocks >= self.blocks_of(tokens):
            return True
        if self.free_blocks + self.cached_blocks <= self.reserved_blocks:
            return False
        table.reserved_blocks += 1
        self.reserved_blocks += 1
        return True

    def store_context(self, table: BlockTable, prompt: Sequence[int]) -> None:
        """Make the full blocks of all prompt tokens but the last reusable; the sequence continues."""
        self._store(table, prompt[: (len(prompt) - 1) // self._block_size * self._block_size])

    def release(self, table: BlockTable, computed: Sequence[int]) -> None:
        """Cache the computed tokens, free everything else; `table` is invalid afterwards."""
        self._store(table, computed)
        self.free_blocks += table.own_blocks
        self.used_blocks -= table.own_blocks
        self.reserved_blocks -= table.reserved_blocks
        for block in reversed(table.path):
            block.sequences -= 1
            if not block.sequences:
                self._cached[block] = None
                self.used_blocks -= 1

    def _key(self, path: list[Block], tokens: Sequence[int], at: int, namespace: Namespace) -> BlockKey:
        return BlockKey(path[-1] if path else None, tuple(tokens[at : at + self._block_size]), namespace)

    def _have(self, block: Block) -> bool:
        """Let one more sequence use the block; return whether it must be copied from the host to the GPU."""
        is_onboarded = not block.on_gpu
        if is_onboarded:
            del self._on_host[block]
            self._move(block, Tier.HOST, Tier.GPU)
        elif not block.sequences:
            del self._cached[block]
        self.used_blocks += not block.sequences
        block.sequences += 1
        return is_onboarded

    def _allocate(self, table: BlockTable) -> None:
        assert table.reserved_blocks, "a sequence outgrew its reservation"
        self._claim()
        self.used_blocks += 1
        self.reserved_blocks -= 1
        table.reserved_blocks -= 1
        table.own_blocks += 1

    def _claim(self) -> None:
        """Take a free block of the GPU, or evict a cached one if none is free."""
        if self.free_blocks:
            self.free_blocks -= 1
        else:
            self._evict(self._cached.popitem(last=False)[0])

    def _evict(self, block: Block) -> None:
        if not self._host_blocks_max or len(block.key.tokens) < self._block_size:
            self._drop(block)
            return
        if len(self._on_host) == self._host_blocks_max:
            self._drop(self._on_host.popitem(last=False)[0])
        self._on_host[block] = None
        self._move(block, Tier.GPU, Tier.HOST)

    def _drop(self, block: Block) -> None:
        del self._tree[block.key]
        self.events.removed(block)

    def _move(self, block: Block, old: Tier, new: Tier) -> None:
        block.on_gpu = new is Tier.GPU
        self.moved_blocks += 1
        self.events.moved(block, old, new)

    def _store(self, table: BlockTable, tokens: Sequence[int]) -> None:
        new: list[Block] = []
        for at in range(len(table.path) * self._block_size, len(tokens), self._block_size):
            key = self._key(table.path, tokens, at, table.namespace)
            block = self._tree.get(key)
            if block is None:
                parent = 0 if key.parent is None else key.parent.engine_hash
                block = self._tree[key] = Block(key, named_block(key.tokens, parent, key.namespace))
                new.append(block)
            else:
                self.used_blocks -= 1
                if not self._have(block):
                    self.free_blocks += 1
            table.path.append(block)
            table.own_blocks -= 1
        if new:
            self.events.stored(new)
