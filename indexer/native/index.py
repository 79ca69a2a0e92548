"""`NativeIndex`: the prefix index in C++. Frequent calls go directly to the extension; this module adapts the others.

Thread-safe: each call holds the interpreter's lock while it uses the tree; `outline` releases it between slices.
A prompt's blocks are hashed by the C++ core if it was built with xxhash's header, 0.8.1 or newer.
"""

import secrets
from collections.abc import Iterator
from time import perf_counter

from typing_extensions import Buffer

from indexer.index import snapshot
from indexer.index.prefix_index import IndexStatistics
from indexer.native import core
from indexer.native._core import Tree
from kv_protocol.codec import pack_u64
from kv_protocol.digest import TierDigest
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.events import Tier
from kv_protocol.hashing import Hashing, chain, local_block_hashes, unpack_tokens
from kv_protocol.ids import checked_u64
from kv_protocol.recovery import CHUNK_BLOCKS_MAX, BlockColumns
from kv_runtime.config.sections import IndexSection


class NativeIndex(Tree):
    """A `PrefixIndex`.

    `memory_bytes_max` is in bytes; 0: no limit. `seed` (u64) only decides the positions of blocks in the hash map.
    Servers draw it at random, so that clients cannot guess it.
    """

    def digest(self, rank: int, tier: Tier) -> TierDigest:
        """Return the digest of the blocks of `rank` on `tier`."""
        return TierDigest(tier, *self._digest(rank, tier))

    def dump(self, rank: int, chunk_blocks: int = CHUNK_BLOCKS_MAX) -> Iterator[BlockColumns]:
        """Return the present blocks of `rank`, parents first, in chunks."""
        return iter([BlockColumns(*columns) for columns in self._dump(rank, chunk_blocks)])

    def snapshot(self) -> bytes:
        """Return the state of all ranks."""
        return snapshot.seal(self._snapshot())

    def restore(self, data: Buffer) -> None:
        """Replace the state by a snapshot's."""
        body = snapshot.unseal(data)
        try:
            self._restore(bytes(body))
        except MalformedMessage as error:
            raise MalformedMessage(snapshot.HEAD_BYTES + error.offset, error.reason) from None

    def statistics(self) -> IndexStatistics:
        """Return the present state and the counts."""
        return IndexStatistics(**dict(zip(IndexStatistics.__struct_fields__, self._figures(), strict=True)))


def make_index(settings: IndexSection) -> NativeIndex:
    """Return an empty index with the limits of `settings`."""
    return NativeIndex(
        memory_bytes_max=settings.memory_bytes_max,
        seed=secrets.randbits(64),  # clients choose prompts, and so hashes: they must not predict collisions
    )


def hash_by_package(tokens: bytes | tuple[str, ...], hashing: Hashing, seed: int) -> tuple[int, bytes, float]:
    """Return what `hash_blocks` returns, computed by the `xxhash` package.

    Raises:
        LimitExceeded: the bytes are no u32s, the block size or `seed` is out of range.
    """
    began_s = perf_counter()
    checked_u64("seed", seed)
    data = tokens if isinstance(tokens, bytes) else "".join(tokens).encode("utf-32-le", "surrogatepass")
    if len(data) % 4:
        raise LimitExceeded("tokens", f"{len(data)} bytes", "u32s of 4 bytes each")
    ids = unpack_tokens(data)
    hashes = chain(local_block_hashes(ids, hashing.block_size, seed=seed, is_eagle=hashing.is_eagle))
    return len(ids), pack_u64(hashes), perf_counter() - began_s


hash_blocks = core.hash_blocks if core.HAS_XXHASH else hash_by_package
"""Returns the number of a text-only prompt's tokens, the sequence hash (little-endian u64) of each full block, and the
seconds that hashing took. `tokens` are little-endian u32s, or the code points of strings; `seed` is a `hash_seed`.
Other threads run while many tokens are hashed."""
chat_pieces = core.chat_pieces
"""Returns a chat of the byte model as strings: the code points of their characters are the tokens."""
