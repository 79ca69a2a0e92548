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

import asyncio
import time
from collections import Counter
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec

from kv_protocol.errors import UNDECODABLE
from kv_runtime.http.answer_body import bounded_body
from worker_agent.engines.trtllm_serve import WAITED_ANSWER_S
from worker_agent.port.types import EngineError

ANSWER_S = 2.0
ANSWER_BYTES_MAX = 4 << 20
_CONNECTIONS = 8
EVENTS_PATH = "/kv_cache_events"
EVENTS_BYTES_MAX = 64 << 20
_OK = 200
_decoder = msgspec.json.Decoder(list[Any])

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


class PolledEvents:
    """Polls the KV events of `trtllm-serve`: `POST /kv_cache_events`.

    The answer is a JSON list of the events since the last request, in the shape of TensorRT-LLM's polled events. The
    engine forgets events that it has answered with, so it must have one client only. If an answer is lost, a jump in
    the next events' ids shows it (`dialects/trtllm.py`), and the rank is cleared. Older versions answer an empty list
    after 2 s, newer ones at once; so there is a pause after an empty list.

    Source: TensorRT-LLM `tensorrt_llm/serve/openai_server.py`, `get_kv_cache_events`; revisions in `docs/ATTACH.md`.
    """

    def __init__(
        self, client: EngineClient, *, answer_s: float = WAITED_ANSWER_S, bytes_max: int = EVENTS_BYTES_MAX
    ) -> None:
        """The requests run in the event loop of the caller, which is that of `client`."""
        self._client, self._answer_s, self._bytes_max = client, answer_s, bytes_max
        self._loop = asyncio.get_running_loop()

    def take(self, timeout_s: float) -> list[Any]:
        """Return the events since the last call; if there are none, pause for `timeout_s` first.

        Only the polling thread (`source_poller.py`) calls it; it is blocked for at most `answer_s` and the pause.

        Raises:
            EngineError: the engine gave no valid answer.
        """
        request = self._client.get(
            "events", EVENTS_PATH, bytes_max=self._bytes_max, answer_s=self._answer_s, posted=b""
        )
        try:
            events = _decoder.decode(asyncio.run_coroutine_threadsafe(request, self._loop).result())
        except EngineUnanswered as error:
            raise EngineError(f"POST {EVENTS_PATH}: {error}") from error
        except UNDECODABLE as error:
            self._loop.call_soon_threadsafe(self._client.unreadable, "events")
            raise EngineError(f"POST {EVENTS_PATH}: {error}") from error
        if not events and timeout_s:
            time.sleep(timeout_s)
        return events
