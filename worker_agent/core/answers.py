"""The answers of the OpenAI HTTP interface: whole ones, chunks of a stream, usage, and stop strings."""

from typing import Any

import msgspec

from kv_protocol.openai import ChatRequest, Request

SSE_DONE = b"data: [DONE]\n\n"


class Answer:
    """Renders one request's answer. `created` is in seconds since 1970."""

    def __init__(self, request: Request, request_id: str, created: int) -> None:
        self._is_chat = isinstance(request, ChatRequest)
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}",
            "created": created,
            "model": request.model,
        }

    def opening(self) -> bytes:
        """Return the stream's first event: a chat's role; nothing for a completion."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self._is_chat else b""

    def delta(self, text: str) -> bytes:
        """Return a stream event with new text."""
        return self._chunk({"content": text} if self._is_chat else text, None)

    def closing(self, finish_reason: str) -> bytes:
        """Return the stream event that says why the text ended."""
        return self._chunk({} if self._is_chat else "", finish_reason)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the stream event that carries the usage and no choice."""
        return _sse({**self._head, "object": self._object(chunk=True), "choices": [], "usage": usage})

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> bytes:
        """Return the body of an unstreamed answer."""
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return msgspec.json.encode(
            {**self._head, "object": self._object(chunk=False), "choices": [choice], "usage": usage}
        )

    def _chunk(self, content: dict[str, str] | str, finish_reason: str | None) -> bytes:
        part = {"delta": content} if self._is_chat else {"text": content}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}
        return _sse({**self._head, "object": self._object(chunk=True), "choices": [choice]})

    def _object(self, *, chunk: bool) -> str:
        if not self._is_chat:
            return "text_completion"
        return "chat.completion.chunk" if chunk else "chat.completion"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the usage of a request, with how many of its prompt's tokens were reused."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def sse_error(body: bytes) -> bytes:
    """Return a stream event that carries an OpenAI error body."""
    return b"data: " + body + b"\n\n"


def _sse(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class StopFilter:
    """Lets text through up to the stop string that ends first (of several the longest), as if it came letter by letter.

    What may be the beginning of one is held back, so that the cut does not depend on where chunks end.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Return what of `text`, and of what was held back, may be shown."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return what is still held back, when no more text comes."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
