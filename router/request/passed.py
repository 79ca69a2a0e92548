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
from router.request.bodies import ReadBody
from router.request.events import Send
from router.request.served import Served
from router.request.serving import Serving
from router.server.exchange import Exchange, OutboundCall
from router.server.stream_replay import StreamReplayBuffer

if TYPE_CHECKING:
    import asyncio

    from router.prompt import EncodedPrompt

METHODS = ("GET", "POST")
_OTHER = "other"
_BEGINNING = 64
"""Bytes in which the first one of a JSON object is looked for."""


def is_passed(path: str, allowed: Sequence[str]) -> bool:
    """Return whether requests to the path are passed on: it is in `allowed`, or below one that ends with a slash."""
    if path in allowed:
        return True
    return path not in CLOSED_PATHS and any(each.endswith("/") and path.startswith(each) for each in allowed)


class PassedRequest(Served):
    """One such request. `begin` starts it."""

    __slots__ = ()

    def __init__(self, exchange: Exchange, serving: Serving) -> None:
        super().__init__(exchange, serving)
        self._mode = _OTHER

    def _read_body(self) -> "ReadBody | asyncio.Future[ReadBody]":
        exchange = self.exchange
        path, body = exchange.path, exchange.body
        if body[:_BEGINNING].lstrip()[:1] == b"{":
            return self._bodies.read(path, body, decode_passed)
        return ReadBody(Body(body), passed_form(path, body))

    def _ask_prompt(self, read_s: float) -> "EncodedPrompt | asyncio.Future[EncodedPrompt] | None":
        exchange, inbound = self.exchange, self.inbound
        assert isinstance(inbound, PassedInbound)
        path = f"{exchange.path}?{exchange.query}" if exchange.query else exchange.path
        self.inbound = replace(inbound, path=path, model=inbound.model or self._only_model(exchange.path))
        return super()._ask_prompt(read_s)

    def _only_model(self, path: str) -> str:
        """Return the model of the workers that state the path; raise `RequestInvalid` if they serve several."""
        registrations = [worker.registration for worker in self.serving.routing.state.fleet.workers()]
        names = {each.served_names[0] for each in registrations if path in each.api_endpoints}
        if len(names) > 1:
            raise RequestInvalid("model", None, f"one of {', '.join(sorted(names))}")
        return next(iter(names), "")

    def _call(self, send: Send, buffer: StreamReplayBuffer | None) -> OutboundCall | None:
        call = super()._call(send, buffer)
        return None if call is None else call._replace(method=self.exchange.method)
