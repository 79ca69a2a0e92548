"""The HTTP routes about ranks, in every control plane with an index.

GET  /v1/ranks            every rank's place, blocks and status; refused ranks
GET  /v1/ranks/{worker}/{dp_rank}/blocks?format=      one rank's place and its blocks there, parents first:
                              json (the default)          a list of blocks
                              columns                     msgpack (`follow/rank_state.py`): a seventh of the size

A rank's place, blocks and digests are of one moment.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from indexer.follow.fold import FoldStatistics
from indexer.follow.rank_state import RankState, encode_state
from kv_protocol.events import TIERS
from kv_protocol.ids import WorkerRank
from kv_protocol.openai.errors import as_json
from kv_runtime.http.answers import error_response, json_response, large_json_response

FORMATS = ("json", "columns")


class ServedRanks(Protocol):
    """The index that the routes read."""

    def ranks(self) -> list[WorkerRank]:
        """Return all ranks that have a slot in the index."""

    def refused_ranks(self) -> dict[WorkerRank, str]:
        """Return the refused ranks, as far as they are named, and why."""

    def state(self, rank: WorkerRank) -> RankState | None:
        """Return the state of a rank."""

    def statistics(self) -> FoldStatistics:
        """Return the figures of all ranks."""


def rank_routes(index: ServedRanks) -> Sequence[web.RouteDef]:
    """Return the routes, for an application to add."""
    views = _RankViews(index)
    return [web.get("/v1/ranks", views.all), web.get("/v1/ranks/{worker}/{dp_rank}/blocks", views.one)]


def refused_of(index: ServedRanks) -> dict[str, str]:
    """Return the refused ranks by their names."""
    return {str(rank): reason for rank, reason in index.refused_ranks().items()}


class _RankViews:
    def __init__(self, index: ServedRanks) -> None:
        self._index = index

    async def all(self, _: web.Request) -> web.Response:
        statistics, refused = self._index.statistics(), refused_of(self._index)

        def made() -> dict[str, object]:
            ranks = [
                {
                    **rank._asdict(),
                    "blocks": {tier.name.lower(): statistics.blocks[rank][tier] for tier in TIERS},
                    **msgspec.structs.asdict(stream),
                }
                for rank, stream in statistics.streams.items()
            ]
            return {"ranks": ranks, "refused": refused}

        return await large_json_response(made)

    async def one(self, request: web.Request) -> web.Response:
        name = f"{request.match_info['worker']}/{request.match_info['dp_rank']}"
        known = {str(rank): rank for rank in self._index.ranks()}
        state = self._index.state(known[name]) if name in known else None
        if state is None:
            allowed = ", ".join(known) or "none yet"
            return error_response(404, f"rank: found {name}, allowed {allowed}", "invalid_request_error")
        shape = request.query.get("format", FORMATS[0])
        if shape not in FORMATS:
            message = f"format: found {as_json(shape)}, allowed {', '.join(FORMATS)}"
            return error_response(400, message, "invalid_request_error", param="format")
        if shape == "columns":
            return web.Response(body=encode_state(state), content_type="application/msgpack")
        return json_response(_shown(state))


def _shown(state: RankState) -> dict[str, object]:
    return {
        **{field: getattr(state, field) for field in ("worker_id", "dp_rank", "epoch", "seq", "logged_seq", "stale")},
        "digests": {digest.tier.name.lower(): digest.digest for digest in state.digests},
        "blocks": [block._asdict() for block in state.blocks()],
    }
