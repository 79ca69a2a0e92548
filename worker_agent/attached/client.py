"""Sends HTTP requests to an attached engine: bounds and counts the answers, reads facts and events from them.

outcome       the answer
-----------   ----------------------------------------------------------------------------
ok            is complete, with status 200
unreachable   did not come: there was no connection, or it broke
slow          was not complete in time
status        has another status; redirects are not followed
oversize      is longer than `bytes_max`; the rest is not read
unreadable    is complete, but invalid

path             facts
--------------   -------------------------------------------------------------------------------------------------------
/v1/models       kind: `owned_by`; names: cards without a `parent`; adapters: cards with a `parent`; `max_model_len`;
                 if the engine states it in `root`, the model's directory
/openapi.json    endpoints, by their paths; a server may be configured to hide it
others           what each `Info` in `EngineServer.info` of this kind of engine reads
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

import aiohttp
import msgspec
import structlog

from kv_protocol.errors import MalformedMessage
from kv_protocol.openai.endpoints import PATHS, stated_paths
from kv_runtime.http.answers import bounded_body
from worker_agent.engines.servers import SERVERS
from worker_agent.engines.servers.base import PATH_CHARACTERS_MAX, TOKENS_MAX, EngineFacts, Info, decoded, within
from worker_agent.port.types import EngineError

ANSWER_S = 2.0
ANSWER_BYTES_MAX = 4 << 20
_CONNECTIONS = 8
EVENTS_PATH = "/kv_cache_events"
EVENTS_BYTES_MAX = 64 << 20
_OK = 200
_BY_OWNER = {server.owned_by: server for server in SERVERS.values()}
_log = structlog.get_logger("engine_survey")

T = TypeVar("T")
Question = Literal["health", "metrics", "models", "info", "events"]
FetchOutcome = Literal["ok", "unreachable", "slow", "status", "oversize", "unreadable"]


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Card(msgspec.Struct):
    id: _Name
    owned_by: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    root: Annotated[str, msgspec.Meta(max_length=PATH_CHARACTERS_MAX)] | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: Annotated[list[_Card], msgspec.Meta(max_length=1024)]


class _OpenApi(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class EngineUnanswered(Exception):
    """The engine gave no usable answer; `outcome` is the reason."""

    def __init__(self, outcome: FetchOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome: FetchOutcome = outcome


class EngineClient:
    """A client of one engine. Make it in an event loop, as an `async with` block: its connections end with the block.

    Every request has `api_key`. `kind` is a name in `SERVERS`, empty until the engine has named itself.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        kind: str = "",
        metrics_path: str = "/metrics",
    ) -> None:
        self.base_url, self.kind = base_url.rstrip("/"), kind
        """The engine's address, without a slash at its end; and which engine it is."""
        self.metrics_path = metrics_path
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS), headers=headers)
        self.requests_total: Counter[tuple[Question, FetchOutcome]] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._session.close()

    async def get(
        self,
        what: Question,
        path: str,
        read: Callable[[bytes], T],
        *,
        bytes_max: int = ANSWER_BYTES_MAX,
        answer_s: float = 0.0,
        posted: bytes | None = None,
    ) -> T:
        """Return what `read` finds in the answer to a GET of `path`, or to a POST of `posted` if it is given.

        The outcome is counted under `what`. `read` may raise `MalformedMessage`. `answer_s` 0: `ANSWER_S`.

        Raises:
            EngineUnanswered: no usable answer came.
        """
        try:
            found = read(await self._answer(path, bytes_max, answer_s or ANSWER_S, posted))
        except (EngineUnanswered, MalformedMessage) as error:
            outcome: FetchOutcome = error.outcome if isinstance(error, EngineUnanswered) else "unreadable"
            self.requests_total[what, outcome] += 1
            raise EngineUnanswered(outcome, str(error)) from error
        self.requests_total[what, "ok"] += 1
        return found

    async def _answer(self, path: str, bytes_max: int, answer_s: float, posted: bytes | None) -> bytes:
        url, timeout = f"{self.base_url}{path}", aiohttp.ClientTimeout(total=answer_s)
        method, headers = ("GET", {}) if posted is None else ("POST", {"Content-Type": "application/json"})
        sent = self._session.request(method, url, data=posted, headers=headers, allow_redirects=False, timeout=timeout)
        try:
            async with sent as response:
                if response.status != _OK:
                    raise EngineUnanswered("status", f"status {response.status}")
                if (body := await bounded_body(response, bytes_max)) is None:
                    raise EngineUnanswered("oversize", f"more than {bytes_max} bytes")
                return body
        except TimeoutError as error:
            raise EngineUnanswered("slow", f"no whole answer within {answer_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnanswered("unreachable", str(error) or type(error).__name__) from error

    # ------------------------------------------------------------------------------------------------ facts
    async def query(self, known: EngineFacts | None = None) -> EngineFacts | None:
        """Return the engine's current facts; None while it is not healthy.

        With `known`, facts that were returned before, only names and adapters are read again.
        """
        try:
            await self.get("health", "/health", bytes)
        except EngineUnanswered:
            return None
        facts = await self._stated("/v1/models", self.get("models", "/v1/models", facts_of_models))
        if known is not None:
            read = facts.served_names or facts.loras
            return msgspec.structs.replace(known, served_names=facts.served_names, loras=facts.loras) if read else known
        self.kind = self.kind or facts.kind
        for info in (_OPENAPI, *(SERVERS[self.kind].info if self.kind else ())):
            facts = facts.with_more(await self._info(info))
        return facts

    async def metrics(self, read: Callable[[bytes], T]) -> T:
        """Return what `read` finds in the engine's metrics; raise `EngineUnanswered`."""
        return await self.get("metrics", self.metrics_path, read, answer_s=SERVERS[self.kind].metrics_answer_s)

    async def _info(self, info: Info) -> EngineFacts:
        if not info.paths:
            return await self._stated(self.metrics_path, self.metrics(info.read))
        for path in info.paths:
            if (facts := await self._stated(path, self.get("info", path, info.read))) != EngineFacts():
                return facts
        return EngineFacts()

    async def _stated(self, path: str, facts: Awaitable[EngineFacts]) -> EngineFacts:
        try:
            return await facts
        except EngineUnanswered as error:
            if error.outcome == "unreadable":
                _log.warning("engine_answer_unreadable", path=path, reason=str(error))
            else:
                _log.info("engine_does_not_say", path=path, reason=str(error))
        return EngineFacts()

    async def token_ids(self, prompt: str, model: str) -> list[int] | None:
        """Return the engine's ids of a prompt; None if it does not tokenize.

        Source: vllm-project/vllm, `vllm/entrypoints/serve/tokenize/protocol.py` (`TokenizeCompletionRequest`).
        """
        asked = msgspec.json.encode({"model": model, "prompt": prompt, "add_special_tokens": False})
        try:
            read = partial(decoded, _Tokens, path="/tokenize")
            return (await self.get("info", "/tokenize", read, posted=asked)).tokens
        except EngineUnanswered:
            return None

    async def kv_events(self, timeout_s: float) -> list[Any]:
        """Return the KV events of `trtllm-serve` since the last call; if there are none, pause for `timeout_s` first.

        `POST /kv_cache_events` answers a JSON list of the events since the last request, in the shape of TensorRT-LLM's
        polled events. The engine forgets events that it has answered with, so it must have one client only. If an
        answer is lost, a jump in the next events' ids shows it (`dialects/trtllm.py`), and the rank is cleared. Older
        versions answer an empty list after 2 s, newer ones at once; so there is a pause after an empty list.

        Source: TensorRT-LLM `tensorrt_llm/serve/openai_server.py` at 00057725d9a6, `get_kv_cache_events`.

        Raises:
            EngineError: the engine gave no valid answer.
        """
        read, answer_s = partial(decoded, list[Any], path=EVENTS_PATH), SERVERS[self.kind].metrics_answer_s
        try:
            events = await self.get(
                "events", EVENTS_PATH, read, bytes_max=EVENTS_BYTES_MAX, answer_s=answer_s, posted=b""
            )
        except EngineUnanswered as error:
            raise EngineError(f"POST {EVENTS_PATH}: {error}") from error
        if not events:
            await asyncio.sleep(timeout_s)
        return events


def facts_of_models(body: bytes) -> EngineFacts:
    """Return the facts of `GET /v1/models`; raise `MalformedMessage`, which names the field, for an invalid body."""
    cards = decoded(_Models, body, "/v1/models").data
    models = [card for card in cards if card.parent is None]
    known = [(card, server) for card in models if (server := _BY_OWNER.get(card.owned_by or "")) is not None]
    return EngineFacts(
        kind=next((server.name for _, server in known), ""),
        directory=next((card.root for card, server in known if card.root and server.states_directory), ""),
        served_names=tuple(card.id for card in models),
        loras=tuple(card.id for card in cards if card.parent is not None),
        max_seq_len=max((within(card.max_model_len, TOKENS_MAX) for card in models), default=0),
    )


def facts_of_openapi(body: bytes) -> EngineFacts:
    """Return the facts of `GET /openapi.json`; the engine may still refuse an endpoint that its model lacks."""
    paths = decoded(_OpenApi, body, "/openapi.json").paths
    return EngineFacts(api_endpoints=(*(name for name, path in PATHS.items() if path in paths), *stated_paths(paths)))


_OPENAPI = Info(facts_of_openapi, ("/openapi.json",))
