"""Reads a request to pools: from the client's bytes to the input of the grids.

| read | from |
|---|---|
| TTFT and ITL targets, ms | `nvext.router.ttft_target`, `nvext.router.itl_target` |
| priority | `x-request-priority`, `nvext.agent_hints.priority`, `priority`; none: no override applies |
| ISL, where a grid reads it | token ids, counted; else the model's tokenizer; without one the bytes of `prompt` or |
| | `messages` as they stand in the body, by `pools.characters_per_token` |

Headers and body are read as the router reads them (`router/request/route_request.py`), and refused as it refuses them.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import msgspec
import structlog

from kv_protocol.body_limits import Body
from kv_protocol.hashing import Hashing
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS
from kv_protocol.openai.requests import ChatInbound, CompletionInbound, Inbound, RequestInvalid
from kv_runtime.text.chat_template import TextError
from router.decision.view import RouteRequest
from router.pools.attempts import PoolSequence
from router.pools.selection import SelectionInput, Targets
from router.pools.service import PoolService
from router.prompt import EncodedPrompt, EncodersBusy
from router.request import refusals
from router.request.bodies import ReadBody
from router.request.refusals import Refusal
from router.server.exchange import Exchange

_HASHING = Hashing(64)
"""For prompts without use of their hashes."""
_MS_PER_S = 1000
_ID_BYTES = 4

IslOrigin = Literal["tokens", "estimate", "unread"]
_log = structlog.get_logger("pools")


class SelectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a request's selection."""

    request_id: str
    model: str
    asked: SelectionInput
    isl_origin: IslOrigin


class PoolRequestReader(ABC):
    """Reads one request. `body`, `inbound`, `question` and `plans` are set when `_on_parsed` is called."""

    __slots__ = ("_awaited", "_over", "body", "exchange", "inbound", "plans", "question", "service")

    body: Body
    inbound: Inbound
    question: SelectionRequest
    plans: tuple[PoolSequence, ...]

    def __init__(self, exchange: Exchange, service: PoolService) -> None:
        self.exchange, self.service = exchange, service
        self._awaited: asyncio.Future[ReadBody] | asyncio.Future[EncodedPrompt] | None = None
        self._over = False

    @abstractmethod
    def _on_parsed(self) -> None:
        """Continue with the parsed request."""

    @abstractmethod
    def _refuse(self, refusal: Refusal) -> None:
        """End the request with this refusal."""

    def read(self) -> None:
        """Read the request; `_on_parsed` or `_refuse` is called, now or later."""
        self._refusing(self._read)

    def stop_reading(self) -> None:
        """Stop: neither `_on_parsed` nor `_refuse` is called any more."""
        self._over = True
        if self._awaited is not None:
            self._awaited.cancel()

    def _read(self) -> None:
        read = self.service.bodies.read(self.exchange.path, self.exchange.body)
        if isinstance(read, asyncio.Future):
            self._awaited = read
            read.add_done_callback(self._body_read)
        else:
            self._measure(read)

    def _body_read(self, awaited: "asyncio.Future[ReadBody]") -> None:
        self._awaited = None
        if not self._over and not awaited.cancelled():
            self._refusing(lambda: self._measure(awaited.result()))

    def _measure(self, read: ReadBody) -> None:
        """Continue as soon as the prompt's length is known, if a grid reads it."""
        self.body, inbound = read
        self.inbound = inbound
        if inbound.endpoint not in DEFAULT_ENDPOINTS:
            raise RequestInvalid("input", inbound.endpoint, "messages or prompt: pools serve chats and completions")
        models = self.service.identity.models
        if inbound.model not in models:
            self._refuse(refusals.unknown_model(inbound.model, models))
        elif not self.service.reads_isl:
            self._go_on(None, "unread")
        elif (count := _count_of_ids(inbound)) is not None:
            self._go_on(count, "tokens")
        elif self.service.prompts is None:
            text_bytes = len(inbound.messages if isinstance(inbound, ChatInbound) else _prompt(inbound))
            self._go_on(math.ceil(text_bytes / self.service.config.characters_per_token), "estimate")
        else:
            prompt = self.service.prompts.prompt(inbound, _HASHING, body=self.body)
            if isinstance(prompt, asyncio.Future):
                self._awaited = prompt
                prompt.add_done_callback(self._prompted)
            else:
                self._go_on(prompt.token_count, "tokens")

    def _prompted(self, awaited: "asyncio.Future[EncodedPrompt]") -> None:
        self._awaited = None
        if not self._over and not awaited.cancelled():
            self._refusing(lambda: self._go_on(awaited.result().token_count, "tokens"))

    def _go_on(self, isl_tokens: int | None, isl_origin: IslOrigin) -> None:
        inbound, headers = self.inbound, self.exchange.headers
        route = self.service.route_request(inbound, headers, _HASHING, None, lora="", tenant="")
        is_prioritised = b"x-request-priority" in headers or inbound.priority is not None
        has_priority = is_prioritised or inbound.extension.hints.priority is not None
        selection_input = SelectionInput(isl_tokens, _targets(route), route.priority if has_priority else None)
        self.question = SelectionRequest(
            request_id=route.request_id, model=inbound.model, asked=selection_input, isl_origin=isl_origin
        )
        self.plans = self.service.plans(selection_input, one_token=inbound.limit_tokens == 1)
        self._on_parsed()

    def _refusing(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (RequestInvalid, TextError) as error:
            self._refuse(refusals.bad_request(error))
        except EncodersBusy as error:
            self._refuse(refusals.unavailable(str(error), "overloaded"))
        except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the client gets an answer
            _log.exception("request_failed", path=self.exchange.path)
            self._refuse(refusals.our_fault(error))


def _count_of_ids(inbound: Inbound) -> int | None:
    """Return how many token ids a request has; None if it has text."""
    given = inbound.token_data()
    if given is None and isinstance(inbound, CompletionInbound) and bytes(memoryview(inbound.prompt)[:1]) == b"[":
        read = inbound.read_prompt()
        given = read if isinstance(read, bytes) else None
    return None if given is None else len(given) // _ID_BYTES


def _prompt(inbound: Inbound) -> msgspec.Raw:
    assert isinstance(inbound, CompletionInbound), "a request is of one of two endpoints"
    return inbound.prompt


def _targets(route: RouteRequest) -> Targets:
    ttft_s, itl_s = route.ttft_target_s, route.itl_target_s
    return Targets(
        None if ttft_s is None else ttft_s * _MS_PER_S,
        None if itl_s is None else itl_s * _MS_PER_S,
    )
