"""GET of any address: an answer within its time and size, or a sentence that says why there is none.

Redirects are not followed, so that a token goes nowhere else; it is in no message.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple

import aiohttp

from kv_runtime.supervise import TaskSet

LANES = 16
"""Simultaneous queries: a fleet of 4096 is queried within a minute, without noticeable load."""
BODY_BYTES_MAX = 64 << 20
"""Large enough for `/v1/workers` and `/metrics` of a router with 4096 workers."""
OK = 200


class Reply(NamedTuple):
    """An answer: `problem` says why there is none; else the status and the complete body."""

    problem: str = ""
    status: int = 0
    body: bytes = b""

    @property
    def is_ok(self) -> bool:
        """Whether there is an answer with status 200."""
        return not self.problem and self.status == OK


class HttpAsker:
    """Queries over one session."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float, bytes_max: int = BODY_BYTES_MAX) -> None:
        self._session, self._bytes_max = session, bytes_max
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s

    async def get(self, url: str, token: str = "") -> Reply:
        """Return the answer to a GET; with the token, if one is given."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with self._session.get(
                url, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                return await _reply(response, self._bytes_max)
        except TimeoutError:
            return Reply(f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Reply(str(error) or type(error).__name__)


async def _reply(response: aiohttp.ClientResponse, bytes_max: int) -> Reply:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > bytes_max:
            return Reply(f"more than {bytes_max} bytes")
        parts.append(part)
    return Reply(status=response.status, body=b"".join(parts))


async def in_lanes(works: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run all works, `LANES` at a time."""
    waiting = iter(works)

    async def lane() -> None:
        for work in waiting:
            await work()

    async with TaskSet(LANES) as lanes:
        for _ in range(LANES):
            lanes.spawn(lane())
