"""Reads a request: from the client's bytes to the `RouteRequest`.

    body -> inbound -> prompt -> route request
     |         |         |
     +---------+---------+--> refused: the client's fault, named; no worker, or no capacity

A subclass says what follows (`_on_parsed`) and how a refusal is answered (`_refuse`). Large bodies are parsed, and long
prompts encoded, off the event loop; the reader stops when the client leaves meanwhile.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter

import structlog

from kv_protocol.body_limits import Body
from kv_protocol.openai.requests import Inbound, RequestInvalid
from kv_runtime.text.chat_template import TextError
from router.decision.view import RouteRequest
from router.prompt import EncodedPrompt, EncodersBusy
from router.request import refusals
from router.request.bodies import ReadBody
from router.request.refusals import Refusal, RequestRejected
from router.request.serving import Serving
from router.server.exchange import Exchange

_log = structlog.get_logger("router")


class RequestReader(ABC):
    """Reads one request. `body`, `inbound`, `prompt` and `route` are set when `_on_parsed` is called."""

    __slots__ = ("_awaited", "_began_s", "_over", "body", "exchange", "inbound", "prompt", "route", "serving")

    body: Body
    inbound: Inbound
    prompt: EncodedPrompt | None
    route: RouteRequest

    def __init__(self, exchange: Exchange, serving: Serving) -> None:
        self.exchange, self.serving = exchange, serving
        self._awaited: asyncio.Future[ReadBody] | asyncio.Future[EncodedPrompt] | None = None
        self._over = False

    @abstractmethod
    def _on_parsed(self) -> None:
        """Continue with the parsed request. May raise `RequestRejected`."""

    @abstractmethod
    def _refuse(self, refusal: Refusal) -> None:
        """End the request with this refusal."""

    @property
    def model(self) -> str:
        """The requested model's name; empty until the body is parsed."""
        return self.inbound.model if hasattr(self, "inbound") else ""

    def read(self) -> None:
        """Read the request; `_on_parsed` or `_refuse` is called, now or later."""
        self._refusing(self._read)

    def stop_reading(self) -> None:
        """Stop: neither `_on_parsed` nor `_refuse` is called any more."""
        self._over = True
        if self._awaited is not None:
            self._awaited.cancel()

    def _read(self) -> None:
        self._began_s = perf_counter()
        read = self.serving.bodies.read(self._path(), self.exchange.body)
        if isinstance(read, asyncio.Future):
            self._awaited = read
            read.add_done_callback(self._body_read)
        else:
            self._prompt_of(read)

    def _path(self) -> str:
        """Return the path of the endpoint that the request is for; raise `RequestInvalid`."""
        return self.exchange.path

    def _body_read(self, awaited: "asyncio.Future[ReadBody]") -> None:
        self._awaited = None
        if not self._over and not awaited.cancelled():
            self._refusing(lambda: self._prompt_of(awaited.result()))

    def _prompt_of(self, read: ReadBody) -> None:
        self.body, self.inbound = read
        began_s, self._began_s = self._began_s, perf_counter()
        self.serving.metrics.parsed(self._began_s - began_s)
        prompt = self.serving.prompt_of(self.inbound, self.body)
        if isinstance(prompt, asyncio.Future):
            self._awaited = prompt
            prompt.add_done_callback(self._prompted)
        else:
            self._go_on(prompt)

    def _prompted(self, awaited: "asyncio.Future[EncodedPrompt]") -> None:
        self._awaited = None
        if not self._over and not awaited.cancelled():
            self._refusing(lambda: self._go_on(awaited.result()))

    def _go_on(self, prompt: EncodedPrompt | None) -> None:
        if prompt is not None:
            self.serving.metrics.stage("tokenize", perf_counter() - self._began_s)
        self.prompt = prompt
        self.route = self.serving.route_request(self.inbound, self.exchange.headers, prompt)
        self._on_parsed()

    def _refusing(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (RequestInvalid, TextError) as error:
            self._refuse(refusals.bad_request(error))
        except EncodersBusy as error:
            self._refuse(refusals.unavailable(str(error), "overloaded"))
        except RequestRejected as refused:
            self._refuse(refused.refusal)
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
            _log.exception("request_failed", path=self.exchange.path)
            self._refuse(refusals.our_fault(error))
