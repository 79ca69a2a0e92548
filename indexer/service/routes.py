"""The HTTP routes of every control plane with an index.

GET  /v1/ranks            every rank's place, blocks and status; refused ranks
GET  /v1/ranks/{worker}/{dp_rank}/blocks?format=      one rank's place and its blocks there, parents first:
                              json (the default)          a list of blocks
                              columns                     msgpack (`follow/checkpoint.py`): a seventh of the size
GET  /v1/prefix-tree?behind=&order_by=&offset=&limit=&ranks=     a page of a node's children (`prefix_explorer.py`)

A rank's place, blocks and digests are of one moment.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from indexer.follow.checkpoint import RankState, encode_state
from indexer.follow.fold import IndexFold
from indexer.index.prefix_index import OUTLINE_ORDERS
from indexer.service.prefix_explorer import PrefixExplorer, TreeQuery
from kv_protocol.events import TIERS
from kv_protocol.ids import WorkerRank
from kv_protocol.openai.errors import as_json
from kv_protocol.splitmix import U64_MASK
from kv_runtime.http.answers import BadRequest, error_response, json_response, large_json_response

FORMATS = ("json", "columns")
OFFSET_MAX, LIMIT_MAX, RANKS_SHOWN_MAX = 10_000, 200, 64
_DECIMAL = re.compile(r"[0-9]{1,20}")
_NUMBERS = {"behind": (0, U64_MASK), "offset": (0, OFFSET_MAX), "limit": (1, LIMIT_MAX), "ranks": (0, RANKS_SHOWN_MAX)}


class BadParameter(BadRequest):
    """A parameter of a request has a value that is not allowed."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(field, f"{field}: found {as_json(found)}, allowed {allowed}")


def index_routes(fold: IndexFold, explorer: PrefixExplorer) -> Sequence[web.RouteDef]:
    """Return the routes, for an application to add."""

    async def every_rank(_: web.Request) -> web.Response:
        statistics, refused = fold.statistics(), refused_of(fold.refused_ranks())

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

    async def one_rank(request: web.Request) -> web.Response:
        name = f"{request.match_info['worker']}/{request.match_info['dp_rank']}"
        known = {str(rank): rank for rank in fold.ranks()}
        state = fold.state(known[name]) if name in known else None
        if state is None:
            allowed = ", ".join(known) or "none yet"
            return error_response(404, f"rank: found {name}, allowed {allowed}")
        shape = request.query.get("format", FORMATS[0])
        if shape not in FORMATS:
            raise BadParameter("format", shape, ", ".join(FORMATS))
        if shape == "columns":
            return web.Response(body=encode_state(state), content_type="application/msgpack")
        return json_response(_shown(state))

    async def page(request: web.Request) -> web.Response:
        return await tree_page(explorer, request.query)

    return [
        web.get("/v1/ranks", every_rank),
        web.get("/v1/ranks/{worker}/{dp_rank}/blocks", one_rank),
        web.get("/v1/prefix-tree", page),
    ]


def refused_of(refused: Mapping[WorkerRank, str]) -> dict[str, str]:
    """Return why each refused rank is refused, by the rank's name."""
    return {str(rank): reason for rank, reason in refused.items()}


def _shown(state: RankState) -> dict[str, object]:
    return {
        **state.place(),
        "digests": {digest.tier.name.lower(): digest.digest for digest in state.digests},
        "blocks": [block._asdict() for block in state.blocks()],
    }


async def tree_page(explorer: PrefixExplorer, parameters: Mapping[str, str]) -> web.Response:
    """Return the page that the parameters ask for, or an error response; raise `BadParameter` for a bad one."""
    query = tree_query(parameters)
    found = await explorer.page(query)
    if found is None:
        message = f"behind: found {query.behind}, allowed a block that the index has had for some seconds"
        return error_response(404, message, param="behind")
    return json_response(found)


def tree_query(parameters: Mapping[str, str]) -> TreeQuery:
    """Return the query of these parameters; raise `BadParameter`, which names the first bad one."""
    numbers = {}
    for field, (least, most) in _NUMBERS.items():
        if (text := parameters.get(field)) is None:
            continue
        if not _DECIMAL.fullmatch(text) or not least <= int(text) <= most:
            raise BadParameter(field, text, f"{least}..{most}")
        numbers[field] = int(text)
    order_by = parameters.get("order_by", OUTLINE_ORDERS[0])
    for order in OUTLINE_ORDERS:
        if order == order_by:
            return TreeQuery(order_by=order, **numbers)
    raise BadParameter("order_by", order_by, ", ".join(OUTLINE_ORDERS))
