"""Checks arguments of the index before anything changes: numbers, buffers of hashes and of depths.

sequence hashes   a sequence of numbers, or a contiguous buffer: u64s, or bytes (little-endian)
depths            a writable buffer of int32s: 4 rows of equal length, one column a rank

The C++ core (`indexer/native/python_input.cpp`) calls some of these functions by name.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from typing_extensions import Buffer

from indexer.index.prefix_index import RANK_MAX, Hashes
from kv_protocol.codec import unpack_u64
from kv_protocol.digest import BUCKET_SET_BYTES, BUCKETS, buckets_in
from kv_protocol.errors import LimitExceeded
from kv_protocol.events import TIERS, U32_LIMIT, Tier
from kv_protocol.recovery import BlockColumns
from kv_protocol.splitmix import U64_MASK

DEPTH_ROWS = len(TIERS)
_U64_BYTES, _INT32_BYTES = 8, 4
_U64S = ("Q", "L")
_WIRE_U64S = ("B", "<Q", "<L")
_INT32S = ("i", "l")
_HASHES = "u64 numbers, or a contiguous buffer of them"

# ------------------------------------------------------------------------------------------------- numbers


def checked_rank(rank: int) -> int:
    """Return the rank; raise `LimitExceeded` if it is out of range."""
    if not 0 <= rank <= RANK_MAX:
        raise LimitExceeded("rank", rank, f"0..{RANK_MAX}")
    return rank


def checked_capacity(capacity_blocks: int) -> int:
    """Return the capacity, in blocks; raise `LimitExceeded` if it is not a u32."""
    if not 0 <= capacity_blocks < U32_LIMIT:
        raise LimitExceeded("capacity_blocks", capacity_blocks, f"0..{U32_LIMIT - 1}")
    return capacity_blocks


def checked_tier(tier: int) -> Tier:
    """Return the tier of this number; raise `LimitExceeded` if there is none."""
    if not 0 <= tier < len(TIERS):
        raise LimitExceeded("tier", tier, f"0..{len(TIERS) - 1}")
    return TIERS[tier]


def checked_now(now_s: float) -> float:
    """Return the time, in seconds; raise `LimitExceeded` if it is not finite."""
    if not math.isfinite(now_s):
        raise LimitExceeded("now_s", now_s, "a finite number")
    return now_s


def checked_hash(field: str, sequence_hash: object) -> int:
    """Return the hash; raise `LimitExceeded`, which names `field`, if it is not a u64."""
    if not _is_u64(sequence_hash):
        raise LimitExceeded(field, sequence_hash, "u64")
    return sequence_hash


def checked_limit(limit: int) -> int:
    """Return the limit, lowered to the largest u64; raise `LimitExceeded` if it is negative."""
    if limit < 0:
        raise LimitExceeded("limit", limit, "0 or more")
    return min(limit, U64_MASK)


# ------------------------------------------------------------------------------------------------- buffers


def checked_hashes(hashes: Hashes) -> Sequence[int]:
    """Return a copy as numbers; raise `LimitExceeded` if they are not sequence hashes."""
    view = _view(hashes)
    if view is None:
        if not isinstance(hashes, Sequence):
            raise LimitExceeded("sequence_hashes", type(hashes).__name__, _HASHES)
        return _checked_numbers(hashes)
    if view.ndim == 1 and view.c_contiguous:
        if view.format in _WIRE_U64S and view.nbytes % _U64_BYTES == 0:
            return unpack_u64(view.tobytes())
        if view.format in _U64S and view.itemsize == _U64_BYTES:
            return tuple(view.tolist())
    raise LimitExceeded("sequence_hashes", _found(view), _HASHES)


def _view(given: object) -> memoryview | None:
    try:
        return memoryview(given)  # type: ignore[arg-type]  # raises for other types
    except TypeError:
        return None


def _found(view: memoryview) -> str:
    return f"{view.nbytes} bytes of {view.format!r}"


def _checked_numbers(hashes: Sequence[int]) -> Sequence[int]:
    try:
        return array("Q", hashes)
    except (OverflowError, TypeError) as error:
        raise LimitExceeded("sequence_hash", _first_bad(hashes), "u64") from error


def _first_bad(hashes: Sequence[object]) -> object:
    return next((each for each in hashes if not _is_u64(each)), hashes)


def _is_u64(number: object) -> TypeGuard[int]:
    return isinstance(number, int) and 0 <= number <= U64_MASK


def checked_buckets(buckets: Buffer) -> bytes:
    """Return a copy of the set of buckets; raise `LimitExceeded` if its size is wrong."""
    view = _view(buckets)
    if view is None or view.nbytes != BUCKET_SET_BYTES:
        found = type(buckets).__name__ if view is None else _found(view)
        raise LimitExceeded("buckets", found, f"{BUCKET_SET_BYTES} bytes, a bit for each of {BUCKETS}")
    return view.tobytes()


def checked_rows(chunks: Iterable[BlockColumns], buckets: bytes) -> list[BlockColumns]:
    """Return the chunks as a list; raise `LimitExceeded` if one has a block outside `buckets`."""
    rows, allowed = list(chunks), bytes(buckets_in(buckets))
    for columns in rows:
        top_bytes = columns.hashes[_U64_BYTES - 1 :: _U64_BYTES]
        if outside := top_bytes.translate(None, allowed):
            raise LimitExceeded("bucket", outside[0], "the named buckets")
    return rows


def checked_depths(out: Buffer, columns_min: int) -> memoryview:
    """Return `out` as int32s; raise `LimitExceeded` if it is too small, or of another form."""
    view = _view(out)
    if view is not None and _is_int32s(view):
        numbers = view.nbytes // _INT32_BYTES
        if numbers >= DEPTH_ROWS * columns_min and not numbers % DEPTH_ROWS:
            return view.cast("B").cast("i")
    found = type(out).__name__ if view is None else _found(view)
    raise LimitExceeded("out", found, f"writable int32s, {DEPTH_ROWS} rows of {columns_min} columns or more")


def _is_int32s(view: memoryview) -> bool:
    return not view.readonly and view.c_contiguous and view.format in _INT32S and view.itemsize == _INT32_BYTES
