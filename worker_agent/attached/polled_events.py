"""Polls the KV events of `trtllm-serve`: `POST /kv_cache_events`.

The answer is a JSON list of the events since the last request, in the shape of TensorRT-LLM's polled events. An answer
removes its events from the engine: there must be one client, and the ids of later events show which ones a lost answer
had (`dialects/trtllm.py`), after which the rank is learnt again. Older versions answer an empty list after 2 s, newer
ones at once; so there is a pause after an empty list.

`take` belongs to the one thread that polls (`source_poller.py`), and blocks it for at most twice `answer_s` and the
pause.

Source: TensorRT-LLM `tensorrt_llm/serve/openai_server.py`, `get_kv_cache_events`; revisions in `docs/ATTACH.md`.
"""

import http.client
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kv_protocol.errors import UNDECODABLE
from worker_agent.attached.client import FetchOutcome
from worker_agent.engines.trtllm_serve import WAITED_ANSWER_S
from worker_agent.port.types import EngineError

PATH = "/kv_cache_events"
ANSWER_BYTES_MAX = 64 << 20
_CHUNK_BYTES = 64 << 10
_OK = 200

_decoder = msgspec.json.Decoder(list[Any])


class PolledEvents:
    """Polls one engine. Requests are counted by outcome, as in `EngineClient`."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        answer_s: float = WAITED_ANSWER_S,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        url = urlsplit(base_url)
        assert url.hostname is not None
        self._is_tls, self._host, self._port = url.scheme == "https", url.hostname, url.port
        self._path = url.path.rstrip("/") + PATH
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._answer_s, self._bytes_max = answer_s, bytes_max
        self.requests_total: Counter[FetchOutcome] = Counter()

    def take(self, timeout_s: float) -> list[Any]:
        """Return the events since the last call; after a pause of `timeout_s` if there are none.

        Raises:
            EngineError: the engine gave no valid answer.
        """
        try:
            events = self._events(time.monotonic() + self._answer_s)
        except _PollFailed as error:
            self.requests_total[error.outcome] += 1
            raise EngineError(f"POST {self._path}: {error}") from error
        self.requests_total["ok"] += 1
        if not events and timeout_s:
            time.sleep(timeout_s)
        return events

    def _events(self, end_s: float) -> list[Any]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._answer_s)
        try:
            connection.request("POST", self._path, body=b"", headers=self._headers)
            return _decoded(self._body(connection.getresponse(), end_s))
        except TimeoutError as error:
            raise _PollFailed("slow", f"no answer within {self._answer_s} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _PollFailed("unreachable", str(error) or type(error).__name__) from error
        finally:
            connection.close()

    def _body(self, response: http.client.HTTPResponse, end_s: float) -> bytes:
        if response.status != _OK:
            raise _PollFailed("status", f"status {response.status}")
        parts, size = [], 0
        while part := response.read1(_CHUNK_BYTES):
            parts.append(part)
            size += len(part)
            if size > self._bytes_max:
                raise _PollFailed("oversize", f"more than {self._bytes_max} bytes")
            if time.monotonic() > end_s:
                raise _PollFailed("slow", f"no whole answer within {self._answer_s} s")
        if response.length:
            raise _PollFailed("unreachable", f"the answer was cut {response.length} bytes before its end")
        return b"".join(parts)


class _PollFailed(Exception):
    def __init__(self, outcome: FetchOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome: FetchOutcome = outcome


def _decoded(body: bytes) -> list[Any]:
    try:
        return _decoder.decode(body)
    except UNDECODABLE as error:
        raise _PollFailed("unreadable", str(error)) from error
