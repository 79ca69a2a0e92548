"""Queries an attached engine's facts over HTTP, and combines the answers.

path             facts
/v1/models       kind: `owned_by`; names: cards without a `parent`; adapters: those with one; `max_model_len`; where the
                 engine states it in `root`, the model's directory
/openapi.json    endpoints, by their paths; a server may be configured to hide it
others           `EngineServer.facts` of this kind of engine
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
import structlog

from kv_protocol.errors import MalformedMessage
from kv_protocol.openai.endpoints import PATHS, stated_paths
from worker_agent.attached.client import EngineClient, EngineUnanswered, Question
from worker_agent.attached.config import SERVERS
from worker_agent.engines.server import TOKENS_MAX, EngineFacts, decoded, within

_PATH_CHARACTERS_MAX = 4096
_BY_OWNER = {server.owned_by: server for server in SERVERS.values()}

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Card(msgspec.Struct):
    id: _Name
    owned_by: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    root: Annotated[str, msgspec.Meta(max_length=_PATH_CHARACTERS_MAX)] | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: Annotated[list[_Card], msgspec.Meta(max_length=1024)]


class _OpenApi(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


class _Tokens(msgspec.Struct):
    tokens: list[int]


_models = msgspec.json.Decoder(_Models)
_openapi = msgspec.json.Decoder(_OpenApi)
_tokens = msgspec.json.Decoder(_Tokens)
_log = structlog.get_logger("engine_survey")


class EngineSurvey:
    """Queries one engine. `kind` is a name in `SERVERS`, empty until it is known."""

    def __init__(self, kind: str, client: EngineClient, *, metrics_path: str) -> None:
        self.kind = kind
        self._client, self._metrics_path = client, metrics_path

    async def query(self, known: EngineFacts | None = None) -> EngineFacts | None:
        """Return the engine's current facts; None while it is not healthy.

        Of what is `known` only its names and adapters are read again.
        """
        try:
            await self._client.get("health", "/health")
        except EngineUnanswered:
            return None
        facts = await self._request("models", "/v1/models", facts_of_models)
        if known is not None:
            read = facts.served_names or facts.loras
            return msgspec.structs.replace(known, served_names=facts.served_names, loras=facts.loras) if read else known
        self.kind = self.kind or facts.kind
        facts = facts.with_more(await self.info("/openapi.json", facts_of_openapi))
        return facts.with_more(await SERVERS[self.kind].facts(self)) if self.kind else facts

    async def info(self, path: str, read: Callable[[bytes], EngineFacts]) -> EngineFacts:
        """Return the facts in the answer of `path`; none, and log why, without one."""
        return await self._request("info", path, read)

    async def metrics(self, read: Callable[[bytes], EngineFacts]) -> EngineFacts:
        """Return likewise those in the engine's metrics."""
        answer_s = SERVERS[self.kind].metrics_answer_s
        return await self._request("metrics", self._metrics_path, read, answer_s=answer_s)

    async def token_ids(self, prompt: str, model: str) -> list[int] | None:
        """Return the engine's ids of a prompt; None if it does not tokenize.

        Source: vllm-project/vllm, `vllm/entrypoints/serve/tokenize/protocol.py` (`TokenizeCompletionRequest`).
        """
        asked = msgspec.json.encode({"model": model, "prompt": prompt, "add_special_tokens": False})
        try:
            return _tokens.decode(await self._client.get("info", "/tokenize", posted=asked)).tokens
        except (EngineUnanswered, msgspec.MsgspecError, ValueError):
            return None

    async def _request(
        self, what: Question, path: str, read: Callable[[bytes], EngineFacts], *, answer_s: float = 0.0
    ) -> EngineFacts:
        try:
            return read(await self._client.get(what, path, answer_s=answer_s))
        except EngineUnanswered as error:
            _log.info("engine_does_not_say", path=path, reason=str(error))
        except MalformedMessage as error:
            self._client.unreadable(what)
            _log.warning("engine_answer_unreadable", path=path, reason=str(error))
        return EngineFacts()


def facts_of_models(body: bytes) -> EngineFacts:
    """Return the facts of `GET /v1/models`; raise `MalformedMessage`, which names the field, for an invalid body."""
    cards = decoded(_models, body, "/v1/models").data
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
    paths = decoded(_openapi, body, "/openapi.json").paths
    return EngineFacts(api_endpoints=(*(name for name, path in PATHS.items() if path in paths), *stated_paths(paths)))
