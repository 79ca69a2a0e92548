"""Endpoints that only show: the fleet now and before, trends, the event log. docs/WIRE.md has the answers."""

import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from indexer.embedded import BadParameter, EmbeddedIndex
from kv_runtime.http.answers import error_response, json_response
from router.journal.log import JournalWriter
from router.live.service import Live

_COUNTS = (
    "applied", "gaps", "replays", "repairs", "resyncs", "digest_mismatches", "heals", "last_healing_s",
)  # fmt: skip
_DECIMAL = re.compile(r"[0-9]{1,20}")


def live_routes(live: Live, marks: Collection[object]) -> Sequence[web.RouteDef]:
    """Return the routes of the fleet now and before, of its history with the `marks`, and of trends."""

    async def fleet(request: web.Request) -> web.Response:
        at_s = unix_time(request.query)
        if at_s is None:
            return json_response({"source": "now", **await live.fleet()})
        if (data := live.ring.at(at_s)) is None:
            first_s = next(iter(live.ring.samples), None)
            allowed = "nothing yet" if first_s is None else f"{first_s} and later"
            message = f"at: found {at_s}, kept are {allowed}"
            return error_response(404, message, param="at", code="not_recorded")
        return json_response({"source": "ring", **msgspec.json.decode(zlib.decompress(data))})

    def history() -> dict[str, object]:
        return {"now_s": round(live.clock.wall_ns() / 1e9, 3), "ring": live.ring.shown(), "marks": list(marks)}

    trends = json_route("/v1/trends", live.trends)
    return [web.get("/v1/fleet", fleet), json_route("/v1/history", history), trends]


def json_route(path: str, make: Callable[[], object]) -> web.RouteDef:
    """Return a route that answers with what `make` returns, as JSON."""

    async def answer(_: web.Request) -> web.Response:
        return json_response(make())

    return web.get(path, answer)


def number_of(query: Mapping[str, str], field: str, default: str, least: int, most: int) -> int:
    """Return a parameter that is a whole number in these bounds; raise `BadParameter` for anything else."""
    text = query.get(field, default)
    if not _DECIMAL.fullmatch(text) or not least <= int(text) <= most:
        raise BadParameter(field, text, f"{least}..{most}")
    return int(text)


def list_limit(query: Mapping[str, str]) -> int:
    """Return how many decisions are asked for; raise `BadParameter`."""
    return number_of(query, "limit", "50", 1, 1000)


def unix_time(query: Mapping[str, str]) -> float | None:
    """Return the parameter `at` as a Unix time, None if it is not given; raise `BadParameter` for anything else."""
    text = query.get("at")
    return None if text is None else seconds_of("at", text, "a Unix time in seconds, as now_s of /v1/history")


def seconds_of(field: str, text: str, allowed: str, *, least: float = 0.0, most: float = sys.float_info.max) -> float:
    """Return a parameter that is a number of seconds; raise `BadParameter` for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= most:
        raise BadParameter(field, text, allowed)
    return seconds


def event_log_route(index: EmbeddedIndex, journal: JournalWriter | None = None) -> web.RouteDef:
    """Return the route of the event log's health. Without `journal` the answer's `journal` is null."""

    def shown() -> dict[str, object]:
        log, snapshots, streams = index.log_statistics(), index.snapshot_statistics(), index.statistics().streams
        ranks: dict[str, list[Any]] = {
            "worker_id": [rank.worker_id for rank in streams],
            "dp_rank": [rank.dp_rank for rank in streams],
            "epoch": [str(stream.epoch) for stream in streams.values()],
            "seq": [stream.cursor for stream in streams.values()],
            "logged_seq": [stream.logged_seq for stream in streams.values()],
            "stale": [stream.stale for stream in streams.values()],
            **{name: [getattr(stream.counts, name) for stream in streams.values()] for name in _COUNTS},
        }
        written = journal and {
            "written": journal.records_total,
            "lost": journal.lost(),
            "waiting": journal.waiting(),
            "failures": journal.failures_total,
        }
        return {
            "connected": log.connected,
            "reconnects": log.reconnects_total,
            "read_anew": log.read_anew_total,
            "applied_seq": index.log_seq(),
            "catching_up": index.catching_up(),
            "ranks": ranks,
            "snapshot": {
                "age_s": snapshots.newest_age_s,
                "stream_seq": snapshots.newest_seq,
                "bytes": snapshots.newest_bytes,
                "failures": snapshots.failures_total,
            },
            "journal": written,
        }

    return json_route("/v1/event-log", shown)
