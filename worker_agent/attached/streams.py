"""The KV events of an attached engine that is polled (trtllm-serve), as one in the agent's process is."""

import asyncio
import time
from typing import Any

import msgspec

from kv_protocol.errors import UNDECODABLE
from worker_agent.attached.client import EngineClient, EngineUnanswered
from worker_agent.engines.trtllm_serve import WAITED_ANSWER_S
from worker_agent.port.types import EngineError

PATH = "/kv_cache_events"
ANSWER_BYTES_MAX = 64 << 20
_decoder = msgspec.json.Decoder(list[Any])


class PolledEvents:
    """Polls the KV events of `trtllm-serve`: `POST /kv_cache_events`.

    The answer is a JSON list of the events since the last request, in the shape of TensorRT-LLM's polled events. The
    engine forgets events that it has answered with, so it must have one client only. If an answer is lost, a jump in
    the next events' ids shows it (`dialects/trtllm.py`), and the rank is cleared. Older versions answer an empty list
    after 2 s, newer ones at once; so there is a pause after an empty list.

    Source: TensorRT-LLM `tensorrt_llm/serve/openai_server.py`, `get_kv_cache_events`; revisions in `docs/ATTACH.md`.
    """

    def __init__(
        self, client: EngineClient, *, answer_s: float = WAITED_ANSWER_S, bytes_max: int = ANSWER_BYTES_MAX
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
        request = self._client.get("events", PATH, bytes_max=self._bytes_max, answer_s=self._answer_s, posted=b"")
        try:
            events = _decoder.decode(asyncio.run_coroutine_threadsafe(request, self._loop).result())
        except EngineUnanswered as error:
            raise EngineError(f"POST {PATH}: {error}") from error
        except UNDECODABLE as error:
            self._loop.call_soon_threadsafe(self._client.unreadable, "events")
            raise EngineError(f"POST {PATH}: {error}") from error
        if not events and timeout_s:
            time.sleep(timeout_s)
        return events
