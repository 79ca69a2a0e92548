"""The snapshot format: the whole state of an index. Little-endian.

    frame  = b"KVROUTER" | version u32 = 1 | reserved u32 = 0 | body length u64 | xxh3_64(body) u64 | body
    body   = ranks:  count u32, then each u32, ascending
           | sets:   count u32, then each: members u32 >= 1, then by rank ascending (rank u32 << 4 | tier bits 1..15)
           | runs:   count u64, then each: flags u8, parent u64, set u32, last_stored_s f64, n u32 >= 1, n x u64 hashes
           | reserved u32 = 0

A run is consecutive blocks, in chain order, with the same holders on the same tiers: the members of set number `set`,
none for 0. Flags: bit 0, it has a known parent (`parent` is 0 otherwise); bit 1, its parent is unknown. Parents come
before children; a run without holders must have another run behind its last block. The index itself reads and writes
bodies (`indexer/native/snapshot.cpp`); the frame around them is made here.

The body is not trusted: every count is checked against the remaining bytes. Offsets count from the frame's first byte.
"""

import struct

from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from kv_protocol.errors import MalformedMessage

MAGIC = b"KVROUTER"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")
HEAD_BYTES = _HEAD.size


def seal(body: bytes) -> bytes:
    """Return the frame of `body`."""
    return _head(body) + body


def _head(body: Buffer) -> bytes:
    view = memoryview(body)
    return _HEAD.pack(MAGIC, VERSION, 0, len(view), xxh3_64_intdigest(view))


def unseal(data: Buffer) -> memoryview:
    """Return the body of a frame, not copied; raise `MalformedMessage` if it is malformed or damaged."""
    view = memoryview(data).cast("B")
    body = view[HEAD_BYTES:]
    if view[:HEAD_BYTES] != _head(body):
        raise MalformedMessage(0, f"no snapshot of version {VERSION}, or a damaged one")
    return body
