"""One streamed request to an OpenAI endpoint, with the latencies that its user sees.

The client reads completions and chat completions. Headers of a router (`x-worker-instance-id`, `x-decision-id`,
`x-overlap-blocks`) and `prompt_tokens_details` are optional: other endpoints do not have them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from kv_runtime.clock import Clock

_DATA = b"data: "
_OK = 200
_REFUSAL_BYTES = 300


class Measured(NamedTuple):
    """One request. `sent_s` counts from the workload's start; times are in wall seconds."""

    sent_s: float
    worker: str
    decision_id: str
    prompt_tokens: int
    cached_tokens: int
    predicted_blocks: int
    ttft_s: float
    duration_s: float
    error: str = ""
    output_tokens: int = 0


class StreamingClient:
    """Sends requests to one endpoint. Times count from `began_s`, a moment of `clock`."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, clock: Clock, *, began_s: float) -> None:
        self._session, self._base_url = session, base_url
        self._clock, self._began_s = clock, began_s

    async def send(self, path: str, body: Mapping[str, Any]) -> tuple[str, Measured]:
        """Return the text of the answer and how it came; a failure is in `Measured.error`, never raised.

        `stream` and `stream_options` are set here.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        sent_s, answer = self._clock.now(), _Answer()
        try:
            data = msgspec.json.encode({**body, **options})
            headers = {"content-type": "application/json"}
            async with self._session.post(f"{self._base_url}{path}", data=data, headers=headers) as response:
                await self._read(response, answer)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        ended_s = self._clock.now()
        return answer.text, Measured(
            sent_s=sent_s - self._began_s,
            worker=answer.headers.get("x-worker-instance-id", ""),
            decision_id=answer.headers.get("x-decision-id", ""),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            predicted_blocks=int(answer.headers.get("x-overlap-blocks", "0")),
            ttft_s=(answer.first_s or ended_s) - sent_s,
            duration_s=ended_s - sent_s,
            error=answer.error,
            output_tokens=answer.output_tokens,
        )

    async def _read(self, response: aiohttp.ClientResponse, answer: "_Answer") -> None:
        answer.headers = response.headers
        if response.status != _OK:
            text = (await response.content.read(_REFUSAL_BYTES)).decode(errors="replace")
            answer.error = f"status {response.status}: {text}"
            return
        async for line in response.content:
            if line.startswith(_DATA):
                answer.on_event(line[len(_DATA) :].strip(), self._clock.now())
        if not answer.is_complete and not answer.error:
            answer.error = "the stream ended without [DONE]"


class _Answer:
    """One streamed answer as it comes."""

    def __init__(self) -> None:
        self.text = self.error = ""
        self.headers: Mapping[str, str] = {}
        self.first_s: float | None = None
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.is_complete = False

    def on_event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.is_complete = True
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            self.error = event["error"]["message"]
            return
        if event.get("choices"):
            self._on_choice(event["choices"][0], now_s)
        if event.get("usage"):
            self._on_usage(event["usage"])

    def _on_choice(self, choice: Mapping[str, Any], now_s: float) -> None:
        delta = choice.get("delta")
        said = [choice.get("text")] if delta is None else [value for key, value in delta.items() if key != "role"]
        if self.first_s is None and any(said):  # a chunk with a role alone is not a token
            self.first_s = now_s
        self.text += (choice.get("text") if delta is None else delta.get("content")) or ""

    def _on_usage(self, usage: Mapping[str, Any]) -> None:
        self.prompt_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
