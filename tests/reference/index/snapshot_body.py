"""Writes snapshot bodies as `indexer/index/snapshot.py` describes them; the index itself writes in C++."""

import struct

from indexer.index.snapshot import Holders, Snapshot
from kv_protocol.codec import pack_u64

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_RUN, _PARKED = struct.Struct("<BQIdI"), struct.Struct("<IBQQ")
_HAS_PARENT, _PARENT_UNKNOWN = 1, 2


def write_body(snapshot: Snapshot) -> bytes:
    """Encode a snapshot as a body."""
    sets: dict[Holders, int] = {}
    for run in snapshot.runs:
        if run.holders:
            sets.setdefault(run.holders, len(sets) + 1)
    parts = [_U32.pack(len(snapshot.ranks)), *map(_U32.pack, snapshot.ranks), _U32.pack(len(sets))]
    for holders in sets:
        parts += [_U32.pack(len(holders)), *(_U32.pack(rank << 4 | bits) for rank, bits in holders)]
    parts.append(_U64.pack(len(snapshot.runs)))
    for run in snapshot.runs:
        flags = _HAS_PARENT if run.parent is not None else 0 if run.parent_known else _PARENT_UNKNOWN
        number = sets[run.holders] if run.holders else 0
        parts += [_RUN.pack(flags, run.parent or 0, number, run.last_stored_s, len(run.hashes)), pack_u64(run.hashes)]
    parts.append(_U32.pack(len(snapshot.parked)))
    parts += [_PARKED.pack(*each) for each in snapshot.parked]
    return b"".join(parts)
