"""The events of the ledger of promised work; replicas exchange them.

Every booking is a lease. It ends by `Finished` or `Cancelled`, or the ledger ends it (`Expired`).
"""

from typing import Literal

import msgspec

from kv_protocol.errors import LimitExceeded

_BLOCK_BYTES = 8
_COUNT_MAX = (1 << 40) - 1
"""Tokens or blocks of one request: sums over all leases of a router still fit 64 bits."""

ExpiryCause = Literal["silence", "engine"]
"""No event of the lease came for its duration; or its rank's engine has reported fewer requests for a while."""


class Routed(msgspec.Struct, frozen=True, tag="routed", kw_only=True, gc=False):
    """A request was routed to a rank.

    `blocks` are its sequence hashes (u64s, little-endian, in the order of the chain), `uncached_tokens` the tokens to
    prefill.

    Raises:
        LimitExceeded: `blocks` is cut within a block, or a count is not within 0..2^40-1.
    """

    lease_id: str
    worker_id: str
    dp_rank: int
    blocks: bytes
    uncached_tokens: int
    extra_blocks: int = 0
    """Blocks of the request without a sequence hash (the partial last one)."""
    epoch: int = 0
    """Epoch of the rank's stream at that time; 0: none was received."""
    session_id: str = ""
    """The request's session, for affinity; empty: none."""

    def __post_init__(self) -> None:
        if len(self.blocks) % _BLOCK_BYTES:
            raise LimitExceeded("blocks", len(self.blocks), f"a multiple of {_BLOCK_BYTES} bytes")
        if not (0 <= self.uncached_tokens <= _COUNT_MAX and 0 <= self.extra_blocks <= _COUNT_MAX):
            found = (self.uncached_tokens, self.extra_blocks)
            raise LimitExceeded("uncached_tokens and extra_blocks", found, f"0..{_COUNT_MAX}")


class FirstToken(msgspec.Struct, frozen=True, tag="first_token", kw_only=True, gc=False):
    """The request's prefill is over; its blocks stay in use."""

    lease_id: str


class Renewed(msgspec.Struct, frozen=True, tag="renewed", kw_only=True, gc=False):
    """Bytes of the answer still arrive: the lease's timeout starts again."""

    lease_id: str


class Finished(msgspec.Struct, frozen=True, tag="finished", kw_only=True, gc=False):
    """The request succeeded or failed; its blocks are free."""

    lease_id: str


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", kw_only=True, gc=False):
    """The client left; the request's blocks are free."""

    lease_id: str


class Expired(msgspec.Struct, frozen=True, tag="expired", kw_only=True):
    """The ledger ended the lease."""

    lease_id: str
    cause: ExpiryCause = "silence"


class Reconciled(msgspec.Struct, frozen=True, tag="reconciled", kw_only=True):
    """The load that the rank's engine reports."""

    worker_id: str
    dp_rank: int
    running_requests: int
    waiting_requests: int
    used_blocks: int


class Unreported(msgspec.Struct, frozen=True, tag="unreported", kw_only=True):
    """The rank's engine has not reported its load for a while: its last report no longer counts."""

    worker_id: str
    dp_rank: int


LeaseEvent = Routed | FirstToken | Renewed | Finished | Cancelled | Expired
"""What replicas exchange; each replica receives load reports itself."""
LedgerEvent = LeaseEvent | Reconciled | Unreported
ENDINGS = Finished | Cancelled | Expired
"""The events that end a lease."""
