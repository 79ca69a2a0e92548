"""What the agent asks of an engine, whichever it is. TensorRT-LLM sets the shapes; the simulated engine obeys them.

`kv_events` and `iteration_stats` block their calling thread until there is something or the time is up, and then drain
everything; each belongs to one thread of the agent's own. All else runs on the event loop.
"""

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["length", "stop", "error"]


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is; sizes in tokens, blocks of `block_size` tokens per rank, or requests."""

    model: str
    version: str
    event_source: Literal["trtllm", "simulated"]
    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_seq_len: int
    dp_ranks: tuple[int, ...] = (0,)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `prompt` is not empty; prompt and `max_tokens` together fit in `max_seq_len`."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    dp_rank: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a generation. `cached_tokens` says how many of the prompt were not computed again."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    finish_reason: FinishReason | None = None


class EngineError(Exception):
    """The engine did not do as asked."""


class RequestRefused(EngineError):
    """The request's own fault: the message names the field, what was found and what is allowed."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        super().__init__(f"{field}: found {found!r}, allowed {allowed}")
        self.field = field


class EngineStopped(EngineError):
    """The engine stopped before the generation ended."""


class Engine(Protocol):
    """An engine, between `start` and `stop`."""

    def describe(self) -> EngineDescription:
        """Return what the engine is; the same at any time."""

    async def start(self) -> None:
        """Return when the engine accepts requests."""

    async def stop(self, grace_s: float) -> None:
        """Return when the engine is gone; running generations get `grace_s` to end, then `EngineStopped`."""

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Yield outputs as they come; closing the iterator aborts the generation and frees its blocks.

        Raises:
            RequestRefused: the request itself cannot be served.
            EngineStopped: the engine ended first.
        """

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all KV events since the last call, in TensorRT-LLM's JSON shape; wait at most `timeout_s` for one."""

    def iteration_stats(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all iterations' statistics since the last call, likewise."""
