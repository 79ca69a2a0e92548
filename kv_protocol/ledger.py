"""What happens to promised work: the events that a router's ledger folds and replicas exchange.

Every booking is a lease: it ends by `Finished` or `Cancelled`, or the ledger itself ends it (`Expired`).
"""

import msgspec


class Routed(msgspec.Struct, frozen=True, tag="routed", kw_only=True):
    """A request was given to a rank: `blocks` are its sequence hashes, `uncached_tokens` what it must still prefill."""

    lease_id: str
    worker_id: str
    dp_rank: int
    blocks: tuple[int, ...]
    uncached_tokens: int
    extra_blocks: int = 0
    """Blocks of the request without a sequence hash (the partial last one)."""
    epoch: int = 0
    """Of the rank's stream as it stood then; 0: none was heard."""


class FirstToken(msgspec.Struct, frozen=True, tag="first_token", kw_only=True):
    """The request's prefill is over; its blocks stay in use."""

    lease_id: str


class Renewed(msgspec.Struct, frozen=True, tag="renewed", kw_only=True):
    """Bytes still flow: the lease runs anew."""

    lease_id: str


class Finished(msgspec.Struct, frozen=True, tag="finished", kw_only=True):
    """The request was answered, or failed; its blocks are free."""

    lease_id: str


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", kw_only=True):
    """The client went away; its blocks are free."""

    lease_id: str


class Expired(msgspec.Struct, frozen=True, tag="expired", kw_only=True):
    """Nothing was heard of the lease for its whole time; the ledger ended it."""

    lease_id: str


class Reconciled(msgspec.Struct, frozen=True, tag="reconciled", kw_only=True):
    """What the rank's engine itself reports of its load."""

    worker_id: str
    dp_rank: int
    running_requests: int
    waiting_requests: int
    used_blocks: int


LedgerEvent = Routed | FirstToken | Renewed | Finished | Cancelled | Expired | Reconciled
