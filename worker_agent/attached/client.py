"""Sends HTTP requests to an engine, bounds each answer in time and size, and counts the outcomes.

outcome       the answer
-----------   ----------------------------------------------------------------------------
ok            is complete, with status 200
unreachable   did not come: there was no connection, or it broke
slow          was not complete in time
status        has another status; redirects are not followed
oversize      is longer than `bytes_max`; the rest is not read
unreadable    is complete, but invalid: the caller tells `EngineClient.unreadable`
"""

from collections import Counter
from types import TracebackType
from typing import Literal, Self

import aiohttp

from kv_runtime.http.answer_body import bounded_body

ANSWER_S = 2.0
ANSWER_BYTES_MAX = 4 << 20
_CONNECTIONS = 8
_OK = 200

Question = Literal["health", "metrics", "models", "info", "events"]
FetchOutcome = Literal["ok", "unreachable", "slow", "status", "oversize", "unreadable"]


class EngineUnanswered(Exception):
    """The engine gave no usable answer; `outcome` is the reason."""

    def __init__(self, outcome: FetchOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome: FetchOutcome = outcome


class EngineClient:
    """A client of one engine, between entering and leaving the block. `api_key` goes with every request."""

    def __init__(self, base_url: str, *, api_key: str = "", answer_s: float = ANSWER_S) -> None:
        self.base_url = base_url.rstrip("/")
        """The engine's address, without a slash at its end."""
        self._answer_s = answer_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self.requests_total: Counter[tuple[Question, FetchOutcome]] = Counter()

    async def __aenter__(self) -> Self:
        """Open the session."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS),
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close all connections."""
        assert self._session is not None
        await self._session.close()

    async def get(
        self,
        what: Question,
        path: str,
        *,
        bytes_max: int = ANSWER_BYTES_MAX,
        answer_s: float = 0.0,
        posted: bytes | None = None,
    ) -> bytes:
        """Return the answer to a GET of `path`, or to a POST if `posted` is its body; count the outcome as of `what`.

        `answer_s` 0: the client's own limit.

        Raises:
            EngineUnanswered: no usable answer came.
        """
        try:
            answer = await self._answer(path, bytes_max, answer_s or self._answer_s, posted)
        except EngineUnanswered as error:
            self.requests_total[what, error.outcome] += 1
            raise
        self.requests_total[what, "ok"] += 1
        return answer

    def unreadable(self, what: Question) -> None:
        """Count the last answer to `what` as unreadable; `get` counted it as ok."""
        self.requests_total[what, "ok"] -= 1
        self.requests_total[what, "unreadable"] += 1

    async def _answer(self, path: str, bytes_max: int, answer_s: float, posted: bytes | None) -> bytes:
        assert self._session is not None
        url, timeout = f"{self.base_url}{path}", aiohttp.ClientTimeout(total=answer_s)
        try:
            method, headers = ("GET", {}) if posted is None else ("POST", {"Content-Type": "application/json"})
            sent = self._session.request(
                method, url, data=posted, headers=headers, allow_redirects=False, timeout=timeout
            )
            async with sent as response:
                if response.status != _OK:
                    raise EngineUnanswered("status", f"status {response.status}")
                if (body := await bounded_body(response, bytes_max)) is None:
                    raise EngineUnanswered("oversize", f"more than {bytes_max} bytes")
                return body
        except TimeoutError as error:
            raise EngineUnanswered("slow", f"no whole answer within {answer_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnanswered("unreachable", str(error) or type(error).__name__) from error
