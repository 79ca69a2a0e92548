"""The paged block pool of one rank, with prefix reuse.

    used     = blocks of running sequences: their own, not yet in the tree, and those of the tree on their paths
    cached   = blocks of the tree on the GPU that no sequence has
    free     = the rest;  used + cached + free = total
    reserved = blocks that running sequences may yet ask for;  reserved <= cached + free

The reuse tree is a dictionary (parent block, tokens, LoRA, salt) -> block; its full blocks can be reused. With a host
tier some of them are there, and are copied back when they are reused.

A sequence gets the blocks of its prompt when admitted, and one at a time later; at the end of its context the full
blocks of all prompt tokens but the last enter the tree, at its release all computed tokens do, the last block perhaps
partial. If an equal block is in the tree already, the sequence takes that one and gives its own back: no event, and
reservations stay valid, because one block becomes used and one free. (If the equal block is on the host, the sequence's
own block replaces it in the tree.)

Eviction takes the cached block that was released longest ago. A sequence uses the complete path of each of its blocks
and releases it from the end to the root, so a parent is always released after its children: the evicted block is a
leaf, no child is orphaned, and every cached block is reachable. No scan, no count of children.

The host tier takes full blocks that are evicted from the GPU. A block is on the GPU or on the host; a full host drops
its oldest block for good. No block outlives its parent there either: the parent comes to the host after all its
children, and is dropped after them. The blocks of a prefix on the GPU come first, those on the host follow.

Source: `docs/SOURCES.md` E1.1, E1.3, E3.3.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from kv_protocol.events import Tier
from worker_agent.engines.simulated.events import RankEventLog, stored_block
from worker_agent.engines.simulated.identity import Block, BlockHash, BlockKey, EngineNamespace, trtllm_hash
from worker_agent.port.types import EngineDescription


class HostTier:
    """A tier of `total_blocks`, 1 or more. `moved_blocks` counts copies between GPU and host, since the start."""

    def __init__(self, total_blocks: int, events: RankEventLog) -> None:
        self._total_blocks = total_blocks
        self._events = events
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self.moved_blocks = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    def offload(self, block: Block) -> list[Block]:
        """Take a block that leaves the GPU; return the blocks that are dropped, which the tree must remove."""
        dropped: list[Block] = []
        if len(self._blocks) == self._total_blocks:
            oldest, _ = self._blocks.popitem(last=False)
            self._events.removed(oldest.engine_hash)
            dropped.append(oldest)
        self._blocks[block] = None
        self._move(block, on_gpu=False)
        return dropped

    def onboard(self, block: Block) -> None:
        """Bring a block that is only on the host back to the GPU."""
        del self._blocks[block]
        self._move(block, on_gpu=True)

    def _move(self, block: Block, *, on_gpu: bool) -> None:
        block.on_gpu = on_gpu
        self.moved_blocks += 1
        tiers = (Tier.HOST, Tier.GPU) if on_gpu else (Tier.GPU, Tier.HOST)
        self._events.moved(block.engine_hash, *tiers)


class BlockTable:
    """The blocks of one running sequence: `path` in the tree, then `own_blocks` more, then a reservation."""

    __slots__ = ("namespace", "own_blocks", "path", "reserved_blocks", "reused_blocks")

    def __init__(self, namespace: EngineNamespace, path: list[Block], reserved_blocks: int) -> None:
        self.namespace = namespace
        self.path = path
        self.reused_blocks = len(path)
        self.own_blocks = 0
        self.reserved_blocks = reserved_blocks


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks now, by state."""

    used_blocks: int
    cached_blocks: int
    free_blocks: int
    reserved_blocks: int
    host_blocks: int


class BlockPool:
    """The blocks of one rank; `events` records changes of the tree, `host` holds evicted blocks."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        events: RankEventLog,
        block_hash: BlockHash = trtllm_hash,
        host: HostTier | None = None,
    ) -> None:
        self._block_size = block_size
        self._block_hash = block_hash
        self._events = events
        self._host = host
        self._tree: dict[BlockKey, Block] = {}
        self._cached: OrderedDict[Block, None] = OrderedDict()
        self._free = total_blocks
        self._used = 0
        self._reserved = 0

    @property
    def moved_blocks(self) -> int:
        """How many blocks were copied between GPU and host since the start."""
        return 0 if self._host is None else self._host.moved_blocks

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self._block_size)

    def match(self, prompt: Sequence[int], namespace: EngineNamespace) -> list[Block]:
        """Return the full blocks that a sequence with this prompt would reuse, of all tokens but the last."""
        path: list[Block] = []
        for at in range(0, len(prompt) - self._block_size, self._block_size):
            block = self._tree.get(self._key(path, prompt, at, namespace))
            if block is None:
                break
            path.append(block)
        return path

    def admit(
        self, prompt: Sequence[int], tokens_max: int, namespace: EngineNamespace, *, spare_blocks: int = 0
    ) -> BlockTable | None:
        """Return a table with the prompt's blocks and the rest of `tokens_max` reserved.

        None if blocks are missing, or fewer than `spare_blocks` would be left.
        """
        path = self.match(prompt, namespace)
        own_blocks = self.blocks_of(len(prompt)) - len(path)
        reserved_blocks = self.blocks_of(tokens_max) - len(path)
        revived_blocks = sum(not block.sequences for block in path)
        if reserved_blocks + revived_blocks + spare_blocks > self._free + len(self._cached) - self._reserved:
            return None
        onboarded_blocks = sum([self._have(block) for block in path])
        for _ in range(onboarded_blocks):  # after all are the sequence's: an eviction may drop what lies on the host
            self._claim()
        table = BlockTable(namespace, path, reserved_blocks)
        self._reserved += reserved_blocks
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
        if self._free + len(self._cached) <= self._reserved:
            return False
        table.reserved_blocks += 1
        self._reserved += 1
        return True

    def store_context(self, table: BlockTable, prompt: Sequence[int]) -> None:
        """Make the full blocks of all prompt tokens but the last reusable; the sequence continues."""
        self._store(table, prompt[: (len(prompt) - 1) // self._block_size * self._block_size])

    def release(self, table: BlockTable, computed: Sequence[int]) -> None:
        """Cache the computed tokens, free everything else; `table` is invalid afterwards."""
        self._store(table, computed)
        self._free += table.own_blocks
        self._used -= table.own_blocks
        self._reserved -= table.reserved_blocks
        for block in reversed(table.path):
            block.sequences -= 1
            if not block.sequences:
                self._cached[block] = None
                self._used -= 1

    def held_hashes(self, tier: Tier = Tier.GPU) -> frozenset[int]:
        """Return the engine hashes of all full blocks of the tree that lie on `tier`, GPU or host."""
        full = [block for block in self._tree.values() if len(block.key.tokens) == self._block_size]
        if tier is Tier.GPU:
            return frozenset(block.engine_hash for block in full if block.on_gpu)
        return frozenset(block.engine_hash for block in full if self._host is not None and block in self._host)

    def statistics(self) -> PoolStatistics:
        """Return the counts of blocks."""
        return PoolStatistics(
            used_blocks=self._used,
            cached_blocks=len(self._cached),
            free_blocks=self._free,
            reserved_blocks=self._reserved,
            host_blocks=0 if self._host is None else len(self._host),
        )

    def _key(self, path: list[Block], tokens: Sequence[int], at: int, namespace: EngineNamespace) -> BlockKey:
        block_tokens = tuple(tokens[at : at + self._block_size])
        return BlockKey(path[-1] if path else None, block_tokens, namespace.lora_name, namespace.cache_salt)

    def _have(self, block: Block) -> bool:
        """Let one more sequence use the block; return whether it must be copied from the host to the GPU."""
        is_onboarded = not block.on_gpu
        if not block.sequences:
            self._used += 1
            if self._host is not None and is_onboarded:
                self._host.onboard(block)
            else:
                del self._cached[block]
        block.sequences += 1
        return is_onboarded

    def _allocate(self, table: BlockTable) -> None:
        assert table.reserved_blocks, "a sequence outgrew its reservation"
        self._claim()
        self._used += 1
        self._reserved -= 1
        table.reserved_blocks -= 1
        table.own_blocks += 1

    def _claim(self) -> None:
        """Take a block of the GPU away from those that are free, or else cached."""
        if self._free:
            self._free -= 1
        else:
            self._evict(self._cached.popitem(last=False)[0])

    def _evict(self, block: Block) -> None:
        if self._host is not None and len(block.key.tokens) == self._block_size:
            gone = self._host.offload(block)
        else:
            self._events.removed(block.engine_hash)
            gone = [block]
        for each in gone:
            del self._tree[each.key]

    def _store(self, table: BlockTable, tokens: Sequence[int]) -> None:
        new: list[Block] = []
        for at in range(len(table.path) * self._block_size, len(tokens), self._block_size):
            key = self._key(table.path, tokens, at, table.namespace)
            block = self._tree.get(key)
            if block is None:
                block = self._insert(key, table)
                new.append(block)
            else:
                self._used -= 1
                if not self._have(block):
                    self._free += 1
            table.path.append(block)
            table.own_blocks -= 1
        if new:
            self._events.stored(new[0].parent_hash, list(map(stored_block, new)))

    def _insert(self, key: BlockKey, table: BlockTable) -> Block:
        engine_hash = self._block_hash(key.tokens, key.parent.engine_hash if key.parent else 0, table.namespace)
        block = self._tree[key] = Block(key, engine_hash)
        block.sequences = 1
        return block


def rank_pool(
    engine: EngineDescription, events: RankEventLog, block_hash: BlockHash, *, host_blocks: int = 0
) -> BlockPool:
    """Return one rank's pool, whose changes go to `events`; `host_blocks`: of its host tier, 0: it has none."""
    events.created(engine.total_kv_blocks, host_blocks)
    host = HostTier(host_blocks, events) if host_blocks else None
    return BlockPool(engine.total_kv_blocks, engine.block_size, events, block_hash, host)


NewPool = Callable[[EngineDescription, RankEventLog, BlockHash], BlockPool]
