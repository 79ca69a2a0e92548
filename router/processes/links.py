"""Calls to the control planes of the processes that are one router."""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple, Self

import aiohttp
import structlog
from yarl import URL

from kv_runtime.clock import Clock
from kv_runtime.telemetry import RateLimitedLog

CALL_S = 5.0
"""For a process that answers at once: beyond it, it counts as silent."""

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
    """The processes, by name; those that serve have an address. `async with`."""

    def __init__(self, names: Sequence[str], clock: Clock, *, token: str = "") -> None:
        """`token`: that of their control planes."""
        self.names = tuple(names)
        self._token = token
        self._urls: dict[str, str] = {}
        self._failures = RateLimitedLog(_log, clock)
        self.silent_total = dict.fromkeys(names, 0)
        """Calls that a process did not answer."""
        self.session: aiohttp.ClientSession
        """For calls to `url`."""

    def add(self, name: str, url: str) -> None:
        """The process serves, its control plane at `url`."""
        self._urls[name] = url

    def remove(self, name: str) -> None:
        """The process has ended."""
        self._urls.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._urls

    def serving(self) -> list[tuple[str, str]]:
        """Return name and address of each process that serves, in the order of `names`."""
        return [(name, self._urls[name]) for name in self.names if name in self._urls]

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"},
            skip_auto_headers=("Accept-Encoding",),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(sock_connect=CALL_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def one(self, name: str, method: str, path: str, body: bytes = b"", more_s: float = 0.0) -> Answer | None:
        """Return the process's answer. None: it does not serve, or did not answer within `CALL_S` and `more_s`.

        The second is counted and logged.
        """
        if name not in self._urls:
            return None
        target = URL(self._urls[name] + path, encoded=True)
        try:
            async with asyncio.timeout(CALL_S + more_s):
                async with self.session.request(method, target, data=body or None) as response:
                    return Answer(response.status, await response.read())
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            self.silent_total[name] += 1
            reason = str(error) or type(error).__name__
            self._failures.warning("process_silent", key=name, of=name, call=f"{method} {path}", reason=reason)
            return None

    async def all(self, method: str, path: str, body: bytes = b"", more_s: float = 0.0) -> dict[str, Answer]:
        """Return the answers of the processes that gave one, in the order of `names`."""
        calls = [self.one(name, method, path, body, more_s) for name in self.names]
        found: Sequence[Answer | None] = await asyncio.gather(*calls)
        return {name: answer for name, answer in zip(self.names, found, strict=True) if answer is not None}
