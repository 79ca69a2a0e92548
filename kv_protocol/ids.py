"""Identifiers: a worker, and its data-parallel rank (one KV cache)."""

import re
from typing import Annotated, NamedTuple

import msgspec

from kv_protocol.errors import LimitExceeded
from kv_protocol.splitmix import U64_MASK

WORKER_ID_PATTERN = r"[a-z0-9-]{1,64}"
DP_RANK_MAX = 4095
"""More ranks in one worker than any engine has; a bound on what one registration can make us allocate."""
BLOCK_SIZE_MAX = 4096

_WORKER_ID = re.compile(WORKER_ID_PATTERN)

# Types whose ranges msgspec checks when it decodes:
TokenId = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
WorkerId = Annotated[str, msgspec.Meta(pattern=rf"^{WORKER_ID_PATTERN}\Z")]
DpRank = Annotated[int, msgspec.Meta(ge=0, le=DP_RANK_MAX)]
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=BLOCK_SIZE_MAX)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
"""Enough for msgpack, which has no larger integers; integers from JSON also need `checked_u64`."""


class WorkerRank(NamedTuple):
    """One KV cache of the fleet: a worker and one of its data-parallel ranks."""

    worker_id: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.dp_rank}"


def checked_worker_id(value: str) -> str:
    """Return `value` if it may be used in a subject; raise `LimitExceeded` otherwise."""
    if not _WORKER_ID.fullmatch(value):
        raise LimitExceeded("worker_id", value, f"^{WORKER_ID_PATTERN}$")
    return value


def checked_dp_rank(value: int) -> int:
    """Return `value` if it is in 0..DP_RANK_MAX; raise `LimitExceeded` otherwise."""
    if not 0 <= value <= DP_RANK_MAX:
        raise LimitExceeded("dp_rank", value, f"0..{DP_RANK_MAX}")
    return value


def checked_block_size(value: int) -> int:
    """Return `value`, in tokens, if it is in 1..BLOCK_SIZE_MAX; raise `LimitExceeded` otherwise."""
    if not 1 <= value <= BLOCK_SIZE_MAX:
        raise LimitExceeded("block_size", value, f"1..{BLOCK_SIZE_MAX} tokens")
    return value


def checked_u64(field: str, value: int) -> int:
    """Return `value` if it is in 0..2^64-1; raise `LimitExceeded` otherwise. JSON allows more, msgpack does not."""
    if not 0 <= value <= U64_MASK:
        raise LimitExceeded(field, value, "u64")
    return value
