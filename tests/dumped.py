"""A rank's answer with all that it holds, as one that keeps nothing else would give it."""

from collections.abc import Iterable

from kv_protocol.recovery import CHUNK_BLOCKS_MAX, BlockColumns, DumpChunk, HeldBlock, block_columns

_NO_BLOCKS = BlockColumns(b"", b"", b"")


def dump_chunks(
    request_id: int,
    epoch: int,
    last_seq: int,
    blocks: Iterable[HeldBlock],
    *,
    buckets: bytes = b"",
    chunk_blocks: int = CHUNK_BLOCKS_MAX,
) -> list[DumpChunk]:
    """Return the chunks of a dump or, of `buckets`, of a repair: at least one; `blocks` come parents first."""
    parts = list(block_columns(blocks, chunk_blocks)) or [_NO_BLOCKS]
    return [
        DumpChunk(
            request_id=request_id,
            epoch=epoch,
            last_seq=last_seq,
            chunk=index,
            of=len(parts),
            parents=part.parents,
            hashes=part.hashes,
            tiers=part.tiers,
            buckets=buckets,
        )
        for index, part in enumerate(parts)
    ]
