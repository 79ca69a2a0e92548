"""One streamed request to an OpenAI endpoint, with the latencies that its user sees; and the wait for the endpoint.

The client reads completions and chat completions. Headers of a router (`x-worker-instance-id`, `x-decision-id`,
`x-overlap-blocks`) and `prompt_tokens_details` are optional: other endpoints do not have them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.child import BenchFailed
from kv_runtime.clock import Clock

_DATA = b"data: "
_OK = 200
_POLL_S, _ANSWER_S = 0.5, 10.0
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
        """Return the text of the answer and its measurement; a failure is in `Measured.error`, never raised.

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
        ended_s, overlap = self._clock.now(), answer.headers.get("x-overlap-blocks", "")
        return answer.text, Measured(
            sent_s=sent_s - self._began_s,
            worker=answer.headers.get("x-worker-instance-id", ""),
            decision_id=answer.headers.get("x-decision-id", ""),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            predicted_blocks=int(overlap) if overlap.isdecimal() else 0,
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


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: dict[str, Any] | None = None

    @property
    def has_token(self) -> bool:
        """Whether it has more than a role; text, reasoning and tool calls are made of tokens."""
        return bool(self.text) or any(value for key, value in (self.delta or {}).items() if key != "role")

    @property
    def content(self) -> str:
        """The text of the answer in it."""
        return self.text or (self.delta or {}).get("content") or ""


class _Event(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Event)


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
        event = _decoder.decode(data)
        if bytes(event.error) not in (b"", b"null"):
            self.error = bytes(event.error)[:_REFUSAL_BYTES].decode(errors="replace")
        for choice in event.choices[:1]:
            if self.first_s is None and choice.has_token:
                self.first_s = now_s
            self.text += choice.content
        if event.usage:
            self.prompt_tokens, self.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            self.cached_tokens = (event.usage.prompt_tokens_details or {}).get("cached_tokens") or 0


async def until_served(
    url: str, asked: Mapping[str, Any], *, wait_s: float, is_running: Callable[[], bool] = lambda: True
) -> None:
    """Return once a request is answered: `asked` is a chat or a completion.

    Raises:
        BenchFailed: none was answered within `wait_s` and while `is_running`; the message quotes the last answer.
    """
    clock, problem = Clock(), ""
    ends_s = clock.now() + wait_s
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        while True:
            try:
                async with session.post(url + path, json=asked) as response:
                    if response.status == _OK:
                        return
                    problem = f"status {response.status}: {(await response.text())[:_REFUSAL_BYTES]}"
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            if clock.now() >= ends_s or not is_running():
                raise BenchFailed(f"{url} is not ready: {problem}")
            await clock.sleep(_POLL_S)
