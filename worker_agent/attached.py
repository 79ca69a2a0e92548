"""A foreign engine's place in the fleet: registered while its HTTP `/health` answers.

The table is in `core/attachment.py`. Source of the path: vLLM, SGLang and `trtllm-serve` all answer GET /health.
"""

import asyncio

import aiohttp
import structlog

from kv_runtime.clock import Clock
from kv_runtime.supervise import until
from worker_agent.core.attachment import PROBE_PERIOD_S, Attachment
from worker_agent.membership import Membership

_ANSWER_S = 2.0

_log = structlog.get_logger("attached")


class HealthWatch:
    """Probes `base_url` and tells the fleet. `log_found` is set whenever the log was found again."""

    def __init__(self, base_url: str, membership: Membership, clock: Clock, log_found: asyncio.Event) -> None:
        self._url = f"{base_url.rstrip('/')}/health"
        self._membership, self._clock, self._log_found = membership, clock, log_found
        self._attachment = Attachment()
        self._is_told_of = False

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the fleet informed until `stop` is set; then say that the engine takes no new work."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
            while not stop.is_set():
                await self._probe(session)
                await until(stop, self._clock.sleep(PROBE_PERIOD_S))
        if self._attachment.is_in:
            await self._membership.drain()

    async def leave(self, reason: str) -> None:
        """The fleet was told that the engine is gone, if it was in and can be told."""
        if self._attachment.is_in:
            await self._membership.leave(reason)

    async def _probe(self, session: aiohttp.ClientSession) -> None:
        is_log_new = self._log_found.is_set()
        self._log_found.clear()
        problem = await self._problem(session)
        step = self._attachment.on_probe(is_healthy=not problem, is_log_new=is_log_new)
        self._tell(problem)
        if step == "register" and await self._membership.register():
            self._attachment.entered()
        elif step == "leave" and await self._membership.leave("its /health does not answer"):
            self._attachment.left()

    def _tell(self, problem: str) -> None:
        """Log once why the engine is not in, or is about to leave, until it answers again."""
        is_out = bool(problem) and self._attachment.is_out
        if is_out and not self._is_told_of:
            _log.warning("engine_unreachable", url=self._url, reason=problem)
        self._is_told_of = is_out

    async def _problem(self, session: aiohttp.ClientSession) -> str:
        """Return why the engine is not healthy; empty when it is."""
        try:
            async with session.get(self._url) as response:
                return "" if response.ok else f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return str(error) or type(error).__name__
