"""A request to another path of engines: it goes to a worker that states the path, and is passed on as it is.

Its limits, retries before the first byte and metrics are those of all requests; its mode in metrics is `other`. It is
placed by load, `/v1/messages` by its text. `data.passed_paths` has the open paths.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kv_protocol.body_limits import Body
from kv_protocol.openai.decoding import decode_passed
from kv_protocol.openai.endpoints import CLOSED_PATHS
from kv_protocol.openai.passed import PassedInbound, passed_form
from kv_protocol.openai.requests import RequestInvalid
from router.fleet.registry import Fleet
from router.http.exchange import Exchange
from router.request.bodies import BodyParser, ReadBody

if TYPE_CHECKING:
    from router.request.serving import FleetRequest

METHODS = ("GET", "POST")
MODE = "other"
_BEGINNING = 64
"""Bytes in which the first one of a JSON object is looked for."""


def is_passed(path: str, allowed: Sequence[str]) -> bool:
    """Return whether requests to the path are passed on: it is in `allowed`, or below one that ends with a slash."""
    if path in allowed:
        return True
    return path not in CLOSED_PATHS and any(each.endswith("/") and path.startswith(each) for each in allowed)


async def read_passed(request: "FleetRequest", bodies: BodyParser, fleet: Fleet) -> ReadBody:
    """Return the body of such a request, parsed if it is JSON; raise `RequestInvalid`."""
    exchange = request.exchange
    path, data = exchange.path, exchange.body
    if data[:_BEGINNING].lstrip()[:1] != b"{":
        return Body(data), _completed(passed_form(path, data), exchange, fleet)
    body, inbound = await request.later(bodies.read(path, data, decode_passed))
    assert isinstance(inbound, PassedInbound)
    return body, _completed(inbound, exchange, fleet)


def _completed(inbound: PassedInbound, exchange: Exchange, fleet: Fleet) -> PassedInbound:
    """Return the request with its query and a model: if it names none, that of the workers that state the path.

    Raises:
        RequestInvalid: they serve several.
    """
    path = f"{exchange.path}?{exchange.query}" if exchange.query else exchange.path
    if inbound.model:
        return replace(inbound, path=path)
    registrations = [worker.registration for worker in fleet.workers()]
    names = {each.served_names[0] for each in registrations if exchange.path in each.api_endpoints}
    if len(names) > 1:
        raise RequestInvalid("model", None, f"one of {', '.join(sorted(names))}")
    return replace(inbound, path=path, model=next(iter(names), ""))
