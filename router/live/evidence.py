"""What the router's trust stands on, as JSON: predicted and reported reuse by rank, and the health of the event log.

GET /v1/predictions     of this process's requests; with `router --processes` the sums of all
GET /v1/event-log       connection, every rank's stream and recoveries, snapshot, journal
"""

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from indexer.embedded import EmbeddedIndex
from kv_runtime.http.answers import json_response
from router.decision.routing import Routing
from router.fleet.calibration import ENOUGH, WINDOW
from router.journal.writer import JournalWriter

_COUNTS = (
    "applied", "gaps", "replays", "repairs", "resyncs", "digest_mismatches", "heals", "last_healing_s",
)  # fmt: skip


def prediction_routes(routing: Routing) -> Sequence[web.RouteDef]:
    """Return the route of predictions, for an application to add."""

    async def shown(_: web.Request) -> web.Response:
        return json_response({"window": WINDOW, "enough": ENOUGH, "ranks": routing.calibration.rows()})

    return [web.get("/v1/predictions", shown)]


def event_log_routes(index: EmbeddedIndex, journal: JournalWriter | None = None) -> Sequence[web.RouteDef]:
    """Return the route of the event log's health; without `journal` that of the journal is null."""

    async def shown(_: web.Request) -> web.Response:
        health = index.health()
        return json_response(
            {
                "connected": health.log.connected,
                "reconnects": health.log.reconnects_total,
                "read_anew": health.log.read_anew_total,
                "applied_seq": health.applied_seq,
                "catching_up": index.catching_up(),
                "ranks": _columns(index),
                "snapshot": {
                    "age_s": health.snapshots.newest_age_s,
                    "stream_seq": health.snapshots.newest_seq,
                    "bytes": health.snapshots.newest_bytes,
                    "failures": health.snapshots.failures_total,
                },
                "journal": None if journal is None else _journal(journal),
            }
        )

    return [web.get("/v1/event-log", shown)]


def _columns(index: EmbeddedIndex) -> dict[str, list[Any]]:
    streams = index.statistics().streams
    return {
        "worker_id": [rank.worker_id for rank in streams],
        "dp_rank": [rank.dp_rank for rank in streams],
        "epoch": [str(stream.epoch) for stream in streams.values()],
        "seq": [stream.cursor for stream in streams.values()],
        "logged_seq": [stream.logged_seq for stream in streams.values()],
        "stale": [stream.stale for stream in streams.values()],
        **{name: [getattr(stream.counts, name) for stream in streams.values()] for name in _COUNTS},
    }


def _journal(writer: JournalWriter) -> dict[str, Any]:
    return {
        "written": writer.records_total,
        "lost": writer.lost(),
        "waiting": writer.waiting(),
        "failures": writer.failures_total,
    }
