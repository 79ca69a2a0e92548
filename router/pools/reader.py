"""Reads a request to pools: from the client's bytes to the input of the grids.

| read | from |
|---|---|
| TTFT and ITL targets, ms | `ttft_target` and `itl_target` of `nvext.router`, else of `extra_args` |
| priority | `x-request-priority`, `nvext.agent_hints.priority`, `priority`; none: no override applies |
| ISL, where a grid reads it | token ids, counted; else the model's tokenizer; without one the bytes of `prompt` or |
| | `messages` as they stand in the body, by `pools.characters_per_token` |

Headers and body are read as the router reads them (`router/request/route_request.py`), and refused as it refuses them.
"""

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import msgspec

from kv_protocol.body_limits import Body
from kv_protocol.decided import RouteRequest
from kv_protocol.hashing import Hashing
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS
from kv_protocol.openai.requests import ChatInbound, CompletionInbound, Inbound, RequestInvalid
from router.http import refusals
from router.http.heads import Headers
from router.http.refusals import RequestRejected
from router.pools.selection import SelectionInput, Targets
from router.pools.service import PoolService
from router.prompt.chains import EncodedPrompt

if TYPE_CHECKING:
    import asyncio

_HASHING = Hashing(64)
"""For prompts without use of their hashes."""
_MS_PER_S = 1000
_ID_BYTES = 4

IslOrigin = Literal["tokens", "estimate", "unread"]


class PoolQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a request's selection."""

    request_id: str
    model: str
    asked: SelectionInput
    isl_origin: IslOrigin


def prompt_of(
    service: PoolService, inbound: Inbound, body: Body
) -> "EncodedPrompt | asyncio.Future[EncodedPrompt] | None":
    """Return the prompt, now or later; None if its length is not read, is known, or has to be estimated.

    Raises:
        RequestInvalid, TextError, EncodersBusy, RequestRejected: pools do not serve the request.
    """
    if inbound.endpoint not in DEFAULT_ENDPOINTS:
        raise RequestInvalid("input", inbound.endpoint, "messages or prompt: pools serve chats and completions")
    models = service.identity.models
    if inbound.model not in models:
        raise RequestRejected(refusals.unknown_model(inbound.model, models))
    if not service.reads_isl or service.prompts is None or _count_of_ids(inbound) is not None:
        return None
    return service.prompts.prompt(body, inbound, _HASHING)


def pool_question(
    service: PoolService, inbound: Inbound, headers: Headers, prompt: EncodedPrompt | None
) -> tuple[RouteRequest, PoolQuestion]:
    """Return the request's fields, and the input of the grids; raise `RequestInvalid`."""
    isl_tokens, isl_origin = _isl(service, inbound, prompt)
    route = service.route_request(inbound, headers, _HASHING)
    is_prioritised = b"x-request-priority" in headers or inbound.priority is not None
    has_priority = is_prioritised or inbound.extension.hints.priority is not None
    asked = SelectionInput(isl_tokens, _targets(route), route.priority if has_priority else None)
    return route, PoolQuestion(request_id=route.request_id, model=inbound.model, asked=asked, isl_origin=isl_origin)


def _isl(service: PoolService, inbound: Inbound, prompt: EncodedPrompt | None) -> tuple[int | None, IslOrigin]:
    if not service.reads_isl:
        return None, "unread"
    if prompt is not None:
        return prompt.token_count, "estimate" if prompt.unrendered else "tokens"
    count = _count_of_ids(inbound)
    if count is not None:
        return count, "tokens"
    text_bytes = len(inbound.messages if isinstance(inbound, ChatInbound) else _prompt(inbound))
    return math.ceil(text_bytes / service.config.characters_per_token), "estimate"


def _count_of_ids(inbound: Inbound) -> int | None:
    """Return how many token ids a request has; None if it has text."""
    given = inbound.token_data()
    if given is None and isinstance(inbound, CompletionInbound) and bytes(memoryview(inbound.prompt)[:1]) == b"[":
        with suppress(RequestInvalid):  # the worker refuses it
            read = inbound.read_prompts()
            given = b"".join([each for each in read if isinstance(each, bytes)])
    return len(given) // _ID_BYTES if given else None


def _prompt(inbound: Inbound) -> msgspec.Raw:
    assert isinstance(inbound, CompletionInbound), "a request is of one of two endpoints"
    return inbound.prompt


def _targets(route: RouteRequest) -> Targets:
    ttft_s, itl_s = route.ttft_target_s, route.itl_target_s
    return Targets(
        None if ttft_s is None else ttft_s * _MS_PER_S,
        None if itl_s is None else itl_s * _MS_PER_S,
    )
