"""The stand-alone index over HTTP, on its control plane.

POST /v1/overlap {"sequence_hashes": [...], "ranks": [["worker", 0], ...] | absent: all}    who holds how much
GET  /v1/ranks            every rank's place in the log, what it holds, and what is wrong with it
GET  /v1/ranks/{worker}/{dp_rank}/blocks    what one rank holds, parents first
GET  /health, /live, /ready, /version, /metrics
"""

from importlib.metadata import version

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from indexer.embedded import EmbeddedIndex
from kv_protocol.errors import UNDECODABLE
from kv_protocol.events import TIERS
from kv_protocol.ids import WorkerRank, checked_dp_rank, checked_u64, checked_worker_id
from kv_runtime.http import error_response, json_response, metrics_handler, openai_errors, require_token

BODY_BYTES_MAX = 16 << 20


class OverlapQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question to the index: the u64 sequence hashes of a prompt's blocks, in order."""

    sequence_hashes: list[int]
    ranks: list[tuple[str, int]] | None = None

    def __post_init__(self) -> None:
        for sequence_hash in self.sequence_hashes:
            checked_u64("sequence_hashes", sequence_hash)
        for worker_id, dp_rank in self.ranks or ():
            checked_worker_id(worker_id)
            checked_dp_rank(dp_rank)


class IndexApi:
    """The endpoints of one index."""

    def __init__(self, index: EmbeddedIndex) -> None:
        self._index = index

    def app(self, registry: CollectorRegistry, *, token: str) -> web.Application:
        """Return the application that serves the endpoints."""
        app = web.Application(middlewares=[openai_errors, require_token(token)], client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.post("/v1/overlap", self._overlap),
                web.get("/v1/ranks", self._ranks),
                web.get("/v1/ranks/{worker}/{dp_rank}/blocks", self._blocks),
                web.get("/health", self._health),
                web.get("/live", self._health),
                web.get("/ready", self._ready),
                web.get("/version", self._version),
                web.get("/metrics", metrics_handler(registry)),
            ]
        )
        return app

    async def _overlap(self, request: web.Request) -> web.Response:
        try:
            query = msgspec.json.decode(await request.read(), type=OverlapQuery)
        except UNDECODABLE as error:
            return error_response(400, f"body: {error}", "invalid_request_error", param="body")
        ranks = (
            list(self._index.statistics().streams)
            if query.ranks is None
            else [WorkerRank(worker_id, dp_rank) for worker_id, dp_rank in query.ranks]
        )
        views = self._index.overlap(query.sequence_hashes, ranks)
        return json_response(
            {
                "ranks": [
                    {"worker_id": r.worker_id, "dp_rank": r.dp_rank, **msgspec.structs.asdict(v)}
                    for r, v in zip(ranks, views, strict=True)
                ]
            }
        )

    async def _ranks(self, _: web.Request) -> web.Response:
        statistics = self._index.statistics()
        return json_response(
            {
                "ranks": [
                    {
                        "worker_id": rank.worker_id,
                        "dp_rank": rank.dp_rank,
                        "blocks": {tier.name.lower(): statistics.blocks[rank][tier] for tier in TIERS},
                        **msgspec.structs.asdict(stream),
                    }
                    for rank, stream in statistics.streams.items()
                ]
            }
        )

    async def _blocks(self, request: web.Request) -> web.Response:
        asked = f"{request.match_info['worker']}/{request.match_info['dp_rank']}"
        known = {str(rank): rank for rank in self._index.statistics().streams}
        if asked not in known:
            allowed = ", ".join(known) or "none yet"
            return error_response(404, f"rank: found {asked}, allowed {allowed}", "invalid_request_error")
        return json_response({"blocks": [block._asdict() for block in self._index.held(known[asked])]})

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        stale = {str(rank): stream.stale for rank, stream in self._index.statistics().streams.items() if stream.stale}
        return json_response({"ready": not stale, "stale": stale}, status=503 if stale else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": version("kv-router"), "index": "python"})
