"""Reads a request: from the client's bytes to its parsed body and its prompt.

    body -> inbound -> prompt
     |         |         |
     +---------+---------+--> refused: the client's fault, named; no worker, or no capacity

A subclass says which prompt is needed (`_ask_prompt`), what follows (`_on_read`) and how a refusal is answered
(`_refuse`). Large bodies are parsed, and long prompts encoded, off the event loop; the reader stops when the client
leaves meanwhile.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import structlog

from kv_protocol.body_limits import Body
from kv_protocol.openai.requests import Inbound, RequestInvalid
from kv_runtime.text.chat_template import TextError
from router.prompt import EncodedPrompt, EncodersBusy
from router.request import refusals
from router.request.bodies import BodyParser, ReadBody
from router.request.refusals import Refusal, RequestRejected
from router.server.exchange import Exchange

_log = structlog.get_logger("router")


class RequestReader(ABC):
    """Reads one request. `body` and `inbound` are set when `_ask_prompt` is called."""

    __slots__ = ("_awaited", "_began_s", "_bodies", "_is_stopped", "body", "exchange", "inbound")

    body: Body
    inbound: Inbound

    def __init__(self, exchange: Exchange, bodies: BodyParser) -> None:
        self.exchange, self._bodies = exchange, bodies
        self._awaited: asyncio.Future[ReadBody] | asyncio.Future[EncodedPrompt] | None = None
        self._is_stopped = False

    @abstractmethod
    def _ask_prompt(self, read_s: float) -> "EncodedPrompt | asyncio.Future[EncodedPrompt] | None":
        """Return the prompt, now or later; None if none is needed. The body took `read_s` to parse.

        Raises:
            RequestInvalid, TextError, EncodersBusy, RequestRejected: there is none.
        """

    @abstractmethod
    def _on_read(self, prompt: EncodedPrompt | None, prompt_s: float) -> None:
        """Continue with the prompt, which took `prompt_s` to make. May raise what `_ask_prompt` may."""

    @abstractmethod
    def _refuse(self, refusal: Refusal) -> None:
        """End the request with this refusal."""

    def _log_names(self) -> dict[str, str]:
        """Return the ids that a log line of this request has, as far as they are known."""
        return {}

    @property
    def model(self) -> str:
        """The requested model's name; empty until the body is parsed."""
        return self.inbound.model if hasattr(self, "inbound") else ""

    def read(self) -> None:
        """Read the request; `_on_read` or `_refuse` is called, now or later."""
        self._refusing(self._read)

    def stop_reading(self) -> None:
        """Stop: neither `_on_read` nor `_refuse` is called any more."""
        self._is_stopped = True
        if self._awaited is not None:
            self._awaited.cancel()

    def _read(self) -> None:
        self._began_s = perf_counter()
        read = self._read_body()
        if isinstance(read, asyncio.Future):
            self._awaited = read
            read.add_done_callback(self._body_read)
        else:
            self._prompt_of(read)

    def _read_body(self) -> "ReadBody | asyncio.Future[ReadBody]":
        """Return the parsed body, now or later; raise `RequestInvalid`."""
        return self._bodies.read(self._path(), self.exchange.body)

    def _path(self) -> str:
        """Return the path of the endpoint that the request is for; raise `RequestInvalid`."""
        return self.exchange.path

    def _body_read(self, awaited: "asyncio.Future[ReadBody]") -> None:
        self._awaited = None
        if not self._is_stopped and not awaited.cancelled():
            self._go_on(awaited, self._prompt_of)

    def _prompt_of(self, read: ReadBody) -> None:
        self.body, self.inbound = read
        began_s, self._began_s = self._began_s, perf_counter()
        prompt = self._ask_prompt(self._began_s - began_s)
        if isinstance(prompt, asyncio.Future):
            self._awaited = prompt
            prompt.add_done_callback(self._prompted)
        else:
            self._on_read(prompt, perf_counter() - self._began_s)

    def _prompted(self, awaited: "asyncio.Future[EncodedPrompt]") -> None:
        self._awaited = None
        if not self._is_stopped and not awaited.cancelled():
            self._go_on(awaited, lambda prompt: self._on_read(prompt, perf_counter() - self._began_s))

    def _go_on(self, awaited: "asyncio.Future[Any]", step: Callable[[Any], None]) -> None:
        """Take the step with the result. An error is not raised: it would then refer to the future that has it."""
        error = awaited.exception()
        if error is None:
            self._refusing(partial(step, awaited.result()))
        else:
            self._refuse(self._refusal_of(error))

    def _refusing(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
            self._refuse(self._refusal_of(error))

    def _refusal_of(self, error: BaseException) -> Refusal:
        if isinstance(error, (RequestInvalid, TextError)):
            return refusals.bad_request(error)
        if isinstance(error, EncodersBusy):
            return refusals.unavailable(str(error), "overloaded")
        if isinstance(error, RequestRejected):
            return error.refusal
        _log.error("request_failed", path=self.exchange.path, exc_info=error, **self._log_names())
        return refusals.our_fault(error)
