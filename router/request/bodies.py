"""Decodes request bodies: small ones at once, large ones on a thread, within bounds.

    SCANNED_BYTES at most    decoded on the event loop: a few milliseconds at worst
    larger                   scanned, its images cut out, decoded: on a thread (`kv_protocol/body_limits.py`)

The threads (`encoding_pool.py`) are apart from those that encode, so that a body never waits for another request's
prompt; bodies of more than 1 MiB have one of their own.
"""

import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kv_protocol.body_limits import SCANNED_BYTES, Body, BodyLimits, Bytes, read_body
from kv_protocol.openai.decoding import decode_passed
from kv_protocol.openai.inbound import PassedInbound, passed_form
from kv_protocol.openai.requests import Inbound, RequestInvalid, decode_inbound
from router.fleet.registry import Fleet
from router.http.exchange import Exchange
from router.prompt.encoding_pool import EncodingPool

if TYPE_CHECKING:
    import asyncio

    from router.request.serving import FleetRequest

_BEGINNING = 64
"""Bytes in which the first one of a JSON object is looked for."""

ReadBody = tuple[Body, Inbound]
"""A request body, and the fields that the router reads of it."""


class BodyParser:
    """Parses the bodies of all requests. The data plane bounds the bodies that wait: `data.bodies_bytes_max`."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self.pool = EncodingPool(1, sys.maxsize, name="body-reader")
        """Its parts have to run: its threads parse large bodies."""

    def read(
        self, path: str, data: Bytes, decode: Callable[[str, Bytes], Inbound] = decode_inbound
    ) -> "ReadBody | asyncio.Future[ReadBody]":
        """Return the parsed body of a request to `path`, or its future.

        Raises (also the future):
            RequestInvalid: it is no request; `BodyTooLarge`: it exceeds a bound.
        """
        if len(data) <= SCANNED_BYTES:
            return Body(data), decode(path, data)

        def read_large() -> ReadBody:
            body = read_body(data, self._limits, uuid.uuid4().hex)
            return body, decode(path, body.text)

        return self.pool.submit(read_large, len(data))


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
