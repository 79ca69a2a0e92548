"""Queries an attached engine's facts over HTTP, and combines the answers."""

from typing import Literal

import msgspec
import structlog

from kv_protocol.errors import MalformedMessage
from worker_agent.engines.attached.client import WAITED_ANSWER_S, EngineClient, EngineUnanswered, What
from worker_agent.engines.attached.facts import (
    EngineFacts,
    facts_of_cache_config,
    facts_of_iteration_stats,
    facts_of_models,
    facts_of_openapi,
    facts_of_server_info,
    facts_of_version,
    iteration_rows,
)
from worker_agent.load.engine_metrics import NAMES, EngineKind, read_cache_config
from worker_agent.load.metrics_text import samples_in


class _Tokens(msgspec.Struct):
    tokens: list[int]


_tokens = msgspec.json.Decoder(_Tokens)
_log = structlog.get_logger("engine_survey")


def metrics_answer_s(kind: EngineKind | Literal[""]) -> float:
    """Return the timeout of this kind of engine's metrics; 0: the client's default."""
    return WAITED_ANSWER_S if kind == "trtllm-serve" else 0.0


class EngineSurvey:
    """Queries one engine. `kind` is empty until it is known."""

    def __init__(self, kind: EngineKind | Literal[""], client: EngineClient, *, metrics_path: str) -> None:
        self.kind: EngineKind | Literal[""] = kind
        self._client, self._metrics_path = client, metrics_path

    async def query(self, known: EngineFacts | None = None) -> EngineFacts | None:
        """Return the engine's current facts; None while it is not healthy.

        Of what is `known` only its names and adapters are read again.
        """
        try:
            await self._client.get("health", "/health")
        except EngineUnanswered:
            return None
        facts = await self._request("models", "/v1/models")
        if known is not None:
            read = facts.served_names or facts.loras
            return msgspec.structs.replace(known, served_names=facts.served_names, loras=facts.loras) if read else known
        self.kind = self.kind or facts.kind
        facts = facts.with_more(await self._request("info", "/openapi.json"))
        return facts.with_more(await self._own())

    async def token_ids(self, prompt: str, model: str) -> list[int] | None:
        """Return the engine's ids of a prompt; None if it does not tokenize.

        Source: vllm-project/vllm, `vllm/entrypoints/serve/tokenize/protocol.py` (`TokenizeCompletionRequest`).
        """
        asked = msgspec.json.encode({"model": model, "prompt": prompt, "add_special_tokens": False})
        try:
            return _tokens.decode(await self._client.get("info", "/tokenize", posted=asked)).tokens
        except (EngineUnanswered, msgspec.MsgspecError, ValueError):
            return None

    async def _own(self) -> EngineFacts:
        """Return the facts that only this kind of engine has."""
        if not self.kind:
            return EngineFacts()
        if self.kind == "sglang":
            facts = await self._request("info", "/server_info")
            return facts if facts != EngineFacts() else await self._request("info", "/get_server_info")
        cache = await self._request("metrics", self._metrics_path)
        return cache.with_more(await self._request("info", "/version"))

    async def _request(self, what: What, path: str) -> EngineFacts:
        try:
            answer_s = metrics_answer_s(self.kind) if what == "metrics" else 0.0
            return self._read(what, path, await self._client.get(what, path, answer_s=answer_s))
        except EngineUnanswered as error:
            _log.info("engine_does_not_say", path=path, reason=str(error))
        except MalformedMessage as error:
            self._client.unreadable(what)
            _log.warning("engine_answer_unreadable", path=path, reason=str(error))
        return EngineFacts()

    def _read(self, what: What, path: str, body: bytes) -> EngineFacts:
        if what == "models":
            return facts_of_models(body)
        if path == "/openapi.json":
            return facts_of_openapi(body)
        if path == "/version":
            return facts_of_version(body)
        if what == "info":
            return facts_of_server_info(body)
        if self.kind == "vllm":
            return facts_of_cache_config(read_cache_config(samples_in(body, [NAMES["vllm"].cache_config])))
        rows = iteration_rows(body) if body.lstrip()[:1] == b"[" else []
        return facts_of_iteration_stats(rows[-1]) if rows else EngineFacts()
