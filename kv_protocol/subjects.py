"""Names on NATS. `<model>` is a slug, made from any model name; a rank is a decimal number.

Source: `docs/WIRE.md`.
"""

import re
from functools import partial

from xxhash import xxh3_64_intdigest

from kv_protocol.errors import MalformedMessage, shortened
from kv_protocol.ids import DP_RANK_MAX, WORKER_ID_PATTERN, WorkerRank, checked_dp_rank, checked_worker_id

EVENTS_STREAM = "KV_EVENTS"
FLEET_STREAM = "KV_FLEET"
JOURNAL_STREAM = "KV_JOURNAL"
SNAPSHOT_BUCKET = "KV_SNAPSHOTS"

EVENTS_ALL = "kv.v1.events.>"
FLEET_ALL = "kv.v1.fleet.>"
JOURNAL_ALL = "kv.v1.journal.>"
HEARTBEAT_ALL = "kv.v1.heartbeat.>"
LOAD_ALL = "kv.v1.load.>"
LEDGER = "kv.v1.ledger.all"
"""The subject on which each router tells all others about promised work."""

_SLUG_CHARACTERS_MAX = 48
_OF_RANK = re.compile(rf"kv\.v1\.[a-z]+\.[a-z0-9-]+\.({WORKER_ID_PATTERN})\.(0|[1-9][0-9]{{0,3}})")


def model_slug(model: str) -> str:
    """Return a subject token for a model: readable, and unique by 8 hex digits of its name's hash."""
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:_SLUG_CHARACTERS_MAX]
    return f"{words or 'model'}-{xxh3_64_intdigest(model.encode()) >> 32:08x}"


def _of_slug(kind: str, slug: str, rank: WorkerRank) -> str:
    return f"kv.v1.{kind}.{slug}.{checked_worker_id(rank.worker_id)}.{checked_dp_rank(rank.dp_rank)}"


def _of_rank(kind: str, model: str, rank: WorkerRank) -> str:
    return _of_slug(kind, model_slug(model), rank)


events = partial(_of_rank, "events")
"""Returns the subject of the canonical batches of a model's rank."""
heartbeat = partial(_of_rank, "heartbeat")
"""Returns the subject of the rank's heartbeats."""
load = partial(_of_rank, "load")
"""Returns the subject of the rank's load reports."""
recover = partial(_of_rank, "recover")
"""Returns the subject on which the rank's consolidator answers with a replay, a repair or a dump."""
recover_slug = partial(_of_slug, "recover")
"""Returns the subject that `recover` returns, from the model's slug in place of its name."""


def slug_of(subject: str) -> str:
    """Return the model's slug that a per-rank subject names; pass only subjects that `rank_of` accepted."""
    return subject.split(".")[3]


def fleet(model: str, worker_id: str) -> str:
    """Return the subject of a worker's fleet events."""
    return f"kv.v1.fleet.{model_slug(model)}.{checked_worker_id(worker_id)}"


def journal(router_id: str) -> str:
    """Return the subject of a router's journal."""
    return f"kv.v1.journal.{checked_worker_id(router_id)}"


def ledger_of(router_id: str) -> str:
    """Return the subject for questions and answers about promised work to one router."""
    return f"{LEDGER}.{checked_worker_id(router_id)}"


def pattern(kind: str, *, slug: str = "", worker_id: str = "", dp_rank: int | None = None) -> str:
    """Return the subject pattern for messages of a kind (events, heartbeat, fleet), of all or of the named sources."""
    rank = ["*" if dp_rank is None else str(dp_rank)] if kind != "fleet" else []
    return ".".join(["kv.v1", kind, slug or "*", worker_id or "*", *rank])


def rank_of(subject: str) -> WorkerRank:
    """Return the rank that a per-rank subject names; raise `MalformedMessage` if it names none."""
    found = _OF_RANK.fullmatch(subject)
    if found is None or int(found[2]) > DP_RANK_MAX:
        raise MalformedMessage(0, f"subject {shortened(subject)!r}, allowed kv.v1.<kind>.<model>.<worker>.<rank>")
    return WorkerRank(found[1], int(found[2]))


def message_id(rank: WorkerRank, epoch: int, seq: int) -> str:
    """Return the `Nats-Msg-Id` by which JetStream drops a batch that it has already stored."""
    return f"{rank.worker_id}/{rank.dp_rank}/{epoch}/{seq}"
