"""Calls from the index's process to the control planes of the serving processes, each on a Unix socket."""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, Self

import aiohttp
import structlog

from kv_runtime.clock import Clock
from kv_runtime.telemetry import RateLimitedLog

CALL_S = 5.0
"""For a process that answers at once: beyond it, it counts as silent."""
_BODY_BYTES_MAX = 64 << 20

_log = structlog.get_logger("router")


class Answer(NamedTuple):
    """What one process answered."""

    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Whether the process did what it was asked."""
        return self.status < HTTPStatus.MULTIPLE_CHOICES


class Links:
    """The serving processes, by name."""

    def __init__(self, paths: Mapping[str, Path], clock: Clock) -> None:
        self.names = tuple(paths)
        self._paths = paths
        self._failures = RateLimitedLog(_log, clock)
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self.silent_total = dict.fromkeys(paths, 0)
        """Calls that a process did not answer."""

    async def __aenter__(self) -> Self:
        for name, path in self._paths.items():
            connector = aiohttp.UnixConnector(str(path))
            self._sessions[name] = aiohttp.ClientSession("http://localhost", connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.close()

    async def one(
        self, name: str, method: str, path: str, body: bytes = b"", query: str = "", more_s: float = 0.0
    ) -> Answer | None:
        """Return the process's answer; None: it gave none within `CALL_S` and `more_s`, which is counted and logged."""
        target = f"{path}?{query}" if query else path
        try:
            async with asyncio.timeout(CALL_S + more_s):
                async with self._sessions[name].request(method, target, data=body or None) as response:
                    return Answer(response.status, await response.content.read(_BODY_BYTES_MAX))
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            self.silent_total[name] += 1
            reason = str(error) or type(error).__name__
            self._failures.warning("process_silent", key=name, of=name, call=f"{method} {path}", reason=reason)
            return None

    async def all(
        self, method: str, path: str, body: bytes = b"", query: str = "", more_s: float = 0.0
    ) -> dict[str, Answer]:
        """Return the answers of the processes that gave one, in the order of `names`."""
        calls = [self.one(name, method, path, body, query, more_s) for name in self.names]
        found: Sequence[Answer | None] = await asyncio.gather(*calls)
        return {name: answer for name, answer in zip(self.names, found, strict=True) if answer is not None}
