"""The interface of an engine. TensorRT-LLM sets the shapes; the simulated engine follows them.

`kv_events` and `iteration_stats` block their calling thread until there is something or the time is up, and then drain
everything; each belongs to one thread of the agent. All other methods run on the event loop.
"""

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from worker_agent.port.types import EngineDescription, EngineOutput, EngineRequest

POLL_S = 0.05
"""Longest wait of one poll: as long as a stop may have to wait for the thread that polls. Events end it at once."""


class Engine(Protocol):
    """An engine, between `start` and `stop`."""

    def describe(self) -> EngineDescription:
        """Return the engine's description; constant after `start`, before which not every engine has one."""

    async def start(self) -> None:
        """Return when the engine accepts requests."""

    async def run(self) -> None:
        """Drive the engine until `stop`; its owner runs it after `start`, in a task of its own.

        Returning before `stop` is a failure of the engine. Cancelling it ends generations like a `stop` without grace.
        """

    async def stop(self, grace_s: float) -> None:
        """Return when the engine has ended; running generations get `grace_s` to end, then `EngineStopped`."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yield outputs as they come; closing the generator aborts the generation and frees its blocks.

        Raises:
            RequestRefused: the request itself cannot be served.
            EngineStopped: the engine ended first.
        """

    def kv_events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all KV events since the last call, in TensorRT-LLM's JSON shape; wait at most `timeout_s` for one.

        Raises:
            EngineError: the engine cannot be polled now.
        """

    def iteration_stats(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return all iterations' statistics since the last call, likewise."""
