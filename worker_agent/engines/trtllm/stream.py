"""One request in TensorRT-LLM: waiting for its responses, and aborting it."""

import asyncio
from typing import Any

import structlog

from worker_agent.engines.trtllm.outputs import Outputs
from worker_agent.port.types import EngineOutput

_log = structlog.get_logger("trtllm")


class Stream:
    """A result and its outputs; at most one task waits for its next response."""

    def __init__(self, request_id: str, result: Any, outputs: Outputs, *, takes_transfer: bool) -> None:  # noqa: ANN401
        self.request_id, self.result, self.outputs = request_id, result, outputs
        self.takes_transfer = takes_transfer
        self._patience: asyncio.Timeout | None = None

    async def step(self) -> list[EngineOutput]:
        """Return the new outputs of the engine's next response; raise TimeoutError once cut, or the engine's error."""
        try:
            async with asyncio.timeout(None) as self._patience:
                await anext(self.result)
        finally:
            self._patience = None
        return self.outputs.new(self.result)

    def cut(self) -> None:
        """End the wait for the next response."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def abort(self) -> None:
        """Cancel the request in the engine, if that still computes it."""
        try:
            self.result.abort()
        except (AssertionError, RuntimeError) as error:  # the engine has ended already
            _log.debug("abort_not_heard", request_id=self.request_id, reason=str(error))
