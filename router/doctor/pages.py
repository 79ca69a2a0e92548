"""Asks routers and agents, and reads their answers.

| asked | of | read |
|---|---|---|
| `/ready` | a router's planes | whether it is ready, and why not |
| `/v1/workers` | a control plane | registrations, ranks (trust, unfit), `differs` |
| `/v1/policy` | a control plane | `mode`, and the modes of the phases |
| `/health` | an agent | `reason` |

Source: `router/control_plane.py`, `worker_agent/api/app.py`. Unknown keys are ignored: another version may have more.
Redirects are not followed, so that a token goes nowhere else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kv_protocol.errors import UNDECODABLE
from kv_runtime.http.answers import bounded_body

LANES = 16
"""How many queries run at once: a fleet of 4096 is queried within a minute, without noticeable load."""
BODY_BYTES_MAX = 64 << 20
"""Large enough for `/v1/workers` and `/metrics` of a router with 4096 workers."""
OK = 200
_T = TypeVar("_T")


class PageUnreadable(Exception):
    """A page could not be read; `status` and `body` are those of an answer with an unexpected status."""

    def __init__(self, words: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(words)
        self.status, self.body = status, body


class HttpAsker:
    """Queries over one session."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float, bytes_max: int = BODY_BYTES_MAX) -> None:
        self._session, self._timeout_s, self._bytes_max = session, timeout_s, bytes_max
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def get(self, url: str, token: str = "", *, also: int = OK) -> bytes:
        """Return the body of an answer of status 200, or `also`; raise `PageUnreadable`. The token is sent if given."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with self._session.get(
                url, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                body = await bounded_body(response, self._bytes_max)
        except TimeoutError as error:
            raise PageUnreadable(f"no answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PageUnreadable(str(error) or type(error).__name__) from error
        if body is None:
            raise PageUnreadable(f"more than {self._bytes_max} bytes")
        if response.status not in (OK, also):
            raise PageUnreadable(f"status {response.status}", response.status, body)
        return body


async def in_lanes(works: Iterable[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Run all works, `LANES` at a time; return what they return, in their order."""
    room = asyncio.Semaphore(LANES)

    async def one(work: Callable[[], Awaitable[_T]]) -> _T:
        async with room:
            return await work()

    return await asyncio.gather(*map(one, works))


class CannotLook(Exception):
    """Nothing of a fleet can be observed; the message says why."""


class ControlPages:
    """The pages of the control plane at `url`."""

    def __init__(self, asker: HttpAsker, url: str, token: str) -> None:
        self._asker, self.url, self._token = asker, url, token

    async def page(self, path: str, kind: type[_T]) -> _T:
        """Return a page; raise `PageUnreadable`."""
        return decoded(await self._asker.get(f"{self.url}{path}", self._token), kind, path)


class _Readiness(msgspec.Struct):
    ready: bool
    reasons: list[str] = []


class _Health(msgspec.Struct, frozen=True):
    reason: str = ""


class PolicyPage(msgspec.Struct, frozen=True):
    """`/v1/policy`; a phase without a mode has the policy's."""

    mode: str
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}

    def modes(self) -> list[str]:
        """Return all modes that choose for some phase."""
        return [mode for mode in (self.mode, self.prefill.get("mode"), self.decode.get("mode")) if mode]


def decoded(body: bytes, kind: type[_T], what: str) -> _T:
    """Return the page; raise `PageUnreadable`, with `what` and the reason."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNDECODABLE as error:
        raise PageUnreadable(f"{what}: {error}") from error


def not_ready(body: bytes) -> str:
    """Return why a router is not ready, empty if it is; raise `PageUnreadable`."""
    readiness = decoded(body, _Readiness, "/ready")
    return "" if readiness.ready else f"not ready: {'; '.join(readiness.reasons) or 'it does not say why'}"


def unhealthy(body: bytes) -> str:
    """Return the reason that an agent's `/health` states; empty for another engine's answer."""
    try:
        return msgspec.json.decode(body, type=_Health).reason
    except UNDECODABLE:
        return ""


def samples(page: bytes, wanted: Iterable[str]) -> Iterator[Sample]:
    """Yield the samples of these names; only their lines are parsed, among a page's thousands.

    Raises:
        ValueError, LookupError: one of these lines is no sample of a metric.
    """
    openings = tuple(f"{name}{after}" for name in wanted for after in "{ ")
    lines = [line for line in page.decode("utf-8", "replace").splitlines() if line.startswith(openings)]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        yield from family.samples
