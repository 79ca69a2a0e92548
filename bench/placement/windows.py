"""Simulated sliding windows: some layers see only the last tokens, and their blocks are a pool of their own.

    window before a token   the `window_size` tokens that end with it; a block that lies wholly before it has no use
    reuse of L blocks       the widest pool holds all of them, every narrow pool those of the window before token L + 1
    promised                the most blocks that the running sequences may have at once; promised <= total

The widest pool is `BlockPool`. The narrow pools use its hashes and chain for their copies of the blocks. A narrow
pool, too, gives a sequence blocks for its whole prompt when it is admitted. They enter the narrow tree when those of
the widest pool enter theirs; then those before the window are released: cached if they are in the tree, free otherwise.
A narrow pool alone cannot serve a prefix, so blocks may be cached without the ones before them, partial
blocks are not kept, and nothing goes to the host. Source: `docs/SOURCES.md` E1.3, E7 (11).
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from worker_agent.engines.simulated.blocks import BlockPool, BlockTable, HostTier
from worker_agent.engines.simulated.events import RankEventLog, WindowLog, stored_block
from worker_agent.engines.simulated.identity import Block, BlockHash, EngineNamespace, trtllm_hash
from worker_agent.port.types import EngineDescription


def windowed_pool(
    engine: EngineDescription, events: RankEventLog, block_hash: BlockHash, *, narrow_windows: tuple[int, ...]
) -> BlockPool:
    """Return one rank's pools: one of each window, in tokens, with as many blocks as the widest."""
    blocks, block_size = engine.total_kv_blocks, engine.block_size
    widest = events.window(engine.max_seq_len, blocks)
    narrow = [NarrowPool(each, blocks, block_size, events.window(each, blocks)) for each in narrow_windows]
    return WindowedPool(blocks, block_size, widest, block_hash, narrow=narrow)


class NarrowBlock:
    """A block of a narrow tree, by its engine hash."""

    __slots__ = ("engine_hash", "sequences")

    def __init__(self, engine_hash: int) -> None:
        self.engine_hash = engine_hash
        self.sequences = 0


class NarrowTable:
    """One running sequence's blocks of a narrow pool, from number `first` on; None: one that is not in the tree."""

    __slots__ = ("blocks", "first", "promised_blocks")

    def __init__(self, first: int, blocks: Iterable[NarrowBlock], promised_blocks: int) -> None:
        self.first = first
        self.blocks: deque[NarrowBlock | None] = deque(blocks)
        self.promised_blocks = promised_blocks

    @property
    def end(self) -> int:
        """The number of the block after the last."""
        return self.first + len(self.blocks)


class NarrowPool:
    """The blocks of one window that is not the widest; full blocks that enter and leave its tree are reported."""

    def __init__(self, window_size: int, total_blocks: int, block_size: int, events: WindowLog) -> None:
        self._window_size = window_size
        self._total_blocks = total_blocks
        self._block_size = block_size
        self._events = events
        self._tree: dict[int, NarrowBlock] = {}
        self._cached: OrderedDict[NarrowBlock, None] = OrderedDict()
        self._promised = 0
        self.free_blocks = total_blocks
        self.used_blocks = 0

    @property
    def cached_blocks(self) -> int:
        """How many blocks of the tree no sequence has."""
        return len(self._cached)

    def reusable_blocks(self, path: Sequence[Block], blocks_max: int) -> int:
        """Return the most blocks of `path`, `blocks_max` at most, after which a sequence can continue."""
        at = blocks_max
        while at > self._first(blocks_max * self._block_size + 1):
            at -= 1
            if path[at].engine_hash not in self._tree:
                blocks_max = at
        return blocks_max

    def can_admit(self, prompt_tokens: int, tokens_max: int) -> bool:
        """Return whether the blocks that such a request may need can be promised."""
        return self._promised + self._blocks_max(prompt_tokens, tokens_max) <= self._total_blocks

    def admit(self, path: Sequence[Block], prompt_tokens: int, tokens_max: int) -> NarrowTable:
        """Return a table with the prompt's blocks: those of `path` in the window of the next token, and new ones."""
        promised_blocks = self._blocks_max(prompt_tokens, tokens_max)
        self._promised += promised_blocks
        first = self._first(len(path) * self._block_size + 1)
        reused = [self._tree[block.engine_hash] for block in path[first:]]
        for block in reused:
            self._take(block)
        table = NarrowTable(first, reused, promised_blocks)
        self._grow(table, prompt_tokens)
        return table

    def extend(self, table: NarrowTable, tokens: int) -> None:
        """Take a new block if the last of `tokens` tokens needs one; before, release the blocks before its window."""
        if table.end * self._block_size < tokens:
            self._slide(table, tokens)
            self._grow(table, tokens)

    def reserve(self, table: NarrowTable, tokens: int) -> bool:
        """Promise `table` what it may need for `tokens` tokens; return False if that is not left."""
        more_blocks = max(0, self._blocks_max(0, tokens) - table.promised_blocks)
        if self._promised + more_blocks > self._total_blocks:
            return False
        table.promised_blocks += more_blocks
        self._promised += more_blocks
        return True

    def store(self, table: NarrowTable, path: Sequence[Block], tokens: int) -> None:
        """Put the full blocks of `path` into the tree; of `table` only the window of the token after `tokens` stays."""
        for at in range(table.first, min(len(path), table.end)):
            if table.blocks[at - table.first] is None and len(path[at].key.tokens) == self._block_size:
                table.blocks[at - table.first] = self._in_tree(path[at])
        self._slide(table, tokens + 1)

    def release(self, table: NarrowTable) -> None:
        """Release all blocks; `table` is invalid afterwards."""
        self._promised -= table.promised_blocks
        while table.blocks:
            self._give_back(table.blocks.pop())

    def held_hashes(self) -> frozenset[int]:
        """Return the engine hashes of the blocks of the tree."""
        return frozenset(self._tree)

    def _first(self, tokens: int) -> int:
        """Return the first block of the window that ends with the last of so many tokens."""
        return max(0, tokens - self._window_size) // self._block_size

    def _blocks_max(self, prompt_tokens: int, tokens_max: int) -> int:
        """Return the most blocks that a request may have at once: all of its prompt's, then a window's."""
        sizes = (prompt_tokens, tokens_max, self._window_size)
        context_blocks, blocks, window_blocks = (-(-size // self._block_size) for size in sizes)
        return max(context_blocks, min(blocks, window_blocks + 1))

    def _take(self, block: NarrowBlock) -> None:
        if not block.sequences:
            del self._cached[block]
            self.used_blocks += 1
        block.sequences += 1

    def _give_back(self, block: NarrowBlock | None) -> None:
        if block is None:
            self.used_blocks -= 1
            self.free_blocks += 1
            return
        block.sequences -= 1
        if not block.sequences:
            self.used_blocks -= 1
            self._cached[block] = None

    def _slide(self, table: NarrowTable, tokens: int) -> None:
        while table.blocks and table.first < self._first(tokens):
            self._give_back(table.blocks.popleft())
            table.first += 1

    def _grow(self, table: NarrowTable, tokens: int) -> None:
        while table.end * self._block_size < tokens:
            if self.free_blocks:
                self.free_blocks -= 1
            else:
                evicted, _ = self._cached.popitem(last=False)
                del self._tree[evicted.engine_hash]
                self._events.removed(evicted.engine_hash)
            self.used_blocks += 1
            table.blocks.append(None)

    def _in_tree(self, block: Block) -> NarrowBlock:
        """Return the tree's copy of `block`, which takes the place of one that is not in the tree."""
        held = self._tree.get(block.engine_hash)
        if held:
            self._give_back(None)
            self._take(held)
            return held
        named = self._tree[block.engine_hash] = NarrowBlock(block.engine_hash)
        named.sequences = 1
        self._events.stored(block.parent_hash, [stored_block(block)])
        return named


class WindowedPool(BlockPool):
    """A widest pool and narrow ones: sequences are admitted, stored and released in all of them."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        events: WindowLog,
        block_hash: BlockHash = trtllm_hash,
        host: HostTier | None = None,
        *,
        narrow: Sequence[NarrowPool],
    ) -> None:
        super().__init__(total_blocks, block_size, events, block_hash, host)
        self._narrow = narrow
        self._narrow_tables: dict[BlockTable, list[NarrowTable]] = {}

    def match(self, prompt: Sequence[int], namespace: EngineNamespace) -> list[Block]:
        """Return the blocks that a sequence with this prompt would reuse in all windows."""
        path = super().match(prompt, namespace)
        blocks, before = len(path), -1
        while blocks != before:
            before = blocks
            for pool in self._narrow:
                blocks = pool.reusable_blocks(path, blocks)
        return path[:blocks]

    def admit(
        self, prompt: Sequence[int], tokens_max: int, namespace: EngineNamespace, *, spare_blocks: int = 0
    ) -> BlockTable | None:
        """Return a table with the prompt's blocks in all pools; None if a pool has too few."""
        if not all(pool.can_admit(len(prompt), tokens_max) for pool in self._narrow):
            return None
        table = super().admit(prompt, tokens_max, namespace, spare_blocks=spare_blocks)
        if table:
            self._narrow_tables[table] = [pool.admit(table.path, len(prompt), tokens_max) for pool in self._narrow]
        return table

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Make room in all pools for the last of `tokens` tokens."""
        super().extend(table, tokens)
        for pool, narrow in zip(self._narrow, self._narrow_tables[table], strict=True):
            pool.extend(narrow, tokens)

    def reserve(self, table: BlockTable, tokens: int) -> bool:
        """Reserve in all pools what `table` needs for its first `tokens` tokens; return False if a pool has too few."""
        return super().reserve(table, tokens) and all(
            pool.reserve(narrow, tokens) for pool, narrow in zip(self._narrow, self._narrow_tables[table], strict=True)
        )

    def store_context(self, table: BlockTable, prompt: Sequence[int]) -> None:
        """Make the prompt's blocks reusable in all pools, as far as their windows reach."""
        super().store_context(table, prompt)
        for pool, narrow in zip(self._narrow, self._narrow_tables[table], strict=True):
            pool.store(narrow, table.path, len(prompt))

    def release(self, table: BlockTable, computed: Sequence[int]) -> None:
        """Cache the computed tokens in all pools, release everything else."""
        super().release(table, computed)
        for pool, narrow in zip(self._narrow, self._narrow_tables.pop(table), strict=True):
            pool.store(narrow, table.path, len(computed))
            pool.release(narrow)
