"""The stand-alone index's HTTP API.

POST /v1/overlap {"sequence_hashes": [...], "ranks": [["worker", 0], ...] | absent: all}    overlap by rank
GET  /v1/ranks, /v1/ranks/{worker}/{dp_rank}/blocks      the state of every rank; one rank's blocks
GET  /v1/prefix-tree      the tree, node by node (with /v1/ranks: `indexer/service/routes.py`)
GET  /ready               503 while the index catches up, or a rank is refused or blind (`status.is_blind`)
GET  /health, /live, /version, /metrics

Sequence hashes are JSON numbers up to 2^64 - 1: clients need a JSON parser with 64-bit integers.
"""

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from indexer.embedded import EmbeddedIndex, is_blind
from indexer.service.routes import refused_of
from kv_protocol.errors import UNDECODABLE
from kv_protocol.ids import WorkerRank, checked_dp_rank, checked_u64, checked_worker_id
from kv_runtime.http.access import require_token
from kv_runtime.http.answers import error_response, json_response, life_routes, openai_errors
from kv_runtime.http.metrics import metrics_handler

BODY_BYTES_MAX = 16 << 20


class OverlapQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `/v1/overlap`: the u64 sequence hashes of a prompt's blocks, in order."""

    sequence_hashes: list[int]
    ranks: list[tuple[str, int]] | None = None

    def __post_init__(self) -> None:
        for sequence_hash in self.sequence_hashes:
            checked_u64("sequence_hashes", sequence_hash)
        for worker_id, dp_rank in self.ranks or ():
            checked_worker_id(worker_id)
            checked_dp_rank(dp_rank)


def index_app(index: EmbeddedIndex, registry: CollectorRegistry, *, token: str) -> web.Application:
    """Return the application that serves the endpoints of one index."""

    async def overlap(request: web.Request) -> web.Response:
        try:
            query = msgspec.json.decode(await request.read(), type=OverlapQuery)
        except UNDECODABLE as error:
            return error_response(400, f"body: {error}", param="body")
        ranks = index.ranks() if query.ranks is None else [WorkerRank(*rank) for rank in query.ranks]
        views = zip(ranks, index.overlap(query.sequence_hashes, ranks), strict=True)
        return json_response({"ranks": [{**rank._asdict(), **msgspec.structs.asdict(view)} for rank, view in views]})

    def ready() -> dict[str, object]:
        stale = {str(rank): stream.stale for rank, stream in index.statistics().streams.items() if stream.stale}
        refused, catching_up = refused_of(index.refused_ranks()), index.catching_up()
        is_ready = not catching_up and not refused and not any(map(is_blind, stale.values()))
        return {"ready": is_ready, "catching_up": catching_up, "stale": stale, "refused": refused}

    app = web.Application(middlewares=[openai_errors, require_token(token)], client_max_size=BODY_BYTES_MAX)
    app.add_routes(
        [
            web.post("/v1/overlap", overlap),
            *index.routes(),
            *life_routes(ready),
            web.get("/metrics", metrics_handler(registry)),
        ]
    )
    return app
