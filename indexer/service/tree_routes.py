"""The HTTP route of the prefix tree, in every control plane with an index.

GET /v1/prefix-tree?behind=&order_by=&offset=&limit=&ranks=     a page of a node's children (`prefix_explorer.py`)
"""

import re
from collections.abc import Mapping, Sequence

from aiohttp import web

from indexer.index.outline import OUTLINE_ORDERS
from indexer.service.prefix_explorer import PrefixExplorer, TreeQuery
from kv_protocol.openai.errors import as_json
from kv_protocol.splitmix import U64_MASK
from kv_runtime.http.answers import BadRequest, error_response, json_response

OFFSET_MAX, LIMIT_MAX, RANKS_SHOWN_MAX = 10_000, 200, 64
_DECIMAL = re.compile(r"[0-9]{1,20}")
_NUMBERS = {"behind": (0, U64_MASK), "offset": (0, OFFSET_MAX), "limit": (1, LIMIT_MAX), "ranks": (0, RANKS_SHOWN_MAX)}


class BadParameter(BadRequest):
    """A parameter of a request is not what it may be."""

    def __init__(self, field: str, found: str, allowed: str) -> None:
        super().__init__(field, f"{field}: found {as_json(found)}, allowed {allowed}")


def tree_routes(explorer: PrefixExplorer) -> Sequence[web.RouteDef]:
    """Return the route, for an application to add."""

    async def page(request: web.Request) -> web.Response:
        return await tree_page(explorer, request.query)

    return [web.get("/v1/prefix-tree", page)]


async def tree_page(explorer: PrefixExplorer, parameters: Mapping[str, str]) -> web.Response:
    """Return the page that the parameters ask for, or an error response; raise `BadParameter`."""
    query = tree_query(parameters)
    found = await explorer.page(query)
    if found is None:
        message = f"behind: found {query.behind}, allowed a block that the index has had for some seconds"
        return error_response(404, message, "invalid_request_error", param="behind")
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
