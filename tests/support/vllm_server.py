"""vLLM's OpenAI server as far as streams, token ids and their continuation go, over a model that is a pure function.

`stream_events` yields the bytes that vLLM 0.24.0 writes, event by event. As a program it serves them:
`python -m tests.support.vllm_server MODEL` prints its address. Each stream then stops somewhere in its middle until
`POST /release`; `GET /held` says how many have stopped. `POST /die` is the death of the engine core: these streams end
with an error event, other requests get 500, and the server is not healthy any more.

The model's next token depends on all tokens before it, so that only a request that continues behind the right ids
continues the text. A token is a byte (`kv_runtime/text/byte_model.py`), and half of the words have longer characters.

Source: vllm-project/vllm 0.24.0. Keys, their order, and null for what was set to None (`exclude_unset`):
`vllm/entrypoints/openai/chat_completion/protocol.py` and `serving.py` (`chat_completion_stream_generator`),
`completion/protocol.py` (`max_tokens` 16) and `serving.py` (`completion_stream_generator`). Several tokens an event:
`vllm/v1/engine/output_processor.py` (`RequestOutputCollector`). Text held back for stop strings, and a decoder that is
primed with the prompt: `vllm/v1/engine/detokenizer.py`.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web
from xxhash import xxh3_64_intdigest

from kv_runtime.text.byte_model import ByteText
from tests.support.chat_ids import chat_ids
from tests.system.integration.engine_doubles import VllmDouble

WORDS = ("plain ", "Grüße ", "日本語 ", "😀👍 ", "stop ", "a ", "naïve ", "END ")
MODEL_LEN = 4096
_SPACE = 0x20
_TEXT = ByteText()


def next_token(ids: list[int]) -> int:
    """Return the model's next token behind these."""
    begins = len(ids) - next((at for at, token in enumerate(reversed(ids)) if token == _SPACE), len(ids))
    word = WORDS[xxh3_64_intdigest(msgspec.json.encode(ids[max(0, begins - 40) : begins])) % len(WORDS)].encode()
    begun = bytes(token for token in ids[begins:] if token < 256)
    return word[len(begun)] if len(begun) < len(word) and word.startswith(begun) else _SPACE


def prompt_of(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        return chat_ids(_TEXT, body["messages"])
    prompt = body["prompt"]
    return _TEXT.encode(prompt) if isinstance(prompt, str) else list(prompt)


class _Detokenizer:
    """Text of an answer as it may be shown; `stopped` is the stop string that was found."""

    def __init__(self, prompt: list[int], stops: list[str]) -> None:
        self._decoder = _TEXT.detokenizer()
        self._repeated = _ends_within_a_character(prompt)
        if self._repeated:  # DecodeStream has no prefix then: its first text is all that there is
            self._decoder.push(prompt)
        self._prompt, self._stops = prompt, stops
        self._held = max(map(len, stops), default=1) - 1
        self.text, self._shown, self.stopped = "", 0, ""

    def push(self, token: int) -> None:
        piece = self._decoder.push((token,))
        if piece and self._repeated:
            piece, self._repeated = _TEXT.decode(self._prompt) + piece, False
        before, self.text = len(self.text), self.text + piece
        for stop in self._stops:
            if piece and (at := self.text.find(stop, max(0, before + 1 - len(stop)))) >= 0:
                self.stopped, self.text = stop, self.text[:at]
                return

    def shown(self, *, is_over: bool) -> str:
        end = len(self.text) if is_over else len(self.text) - self._held
        if self._shown >= end:
            return ""
        begin, self._shown = self._shown, end
        return self.text[begin:end]


def _ends_within_a_character(ids: list[int]) -> bool:
    return _TEXT.decode(ids[-4:]).endswith("\ufffd")


class _Answer:
    """The events of one request. `asked`: the request asks for token ids."""

    def __init__(self, path: str, body: dict[str, Any], name: str, created: int) -> None:
        self.is_chat, self.prompt = path.endswith("/chat/completions"), prompt_of(body)
        self.asked, self._options = bool(body.get("return_token_ids")), body.get("stream_options") or {}
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created, "model": body["model"]}
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        self.limit = limit or (MODEL_LEN - len(self.prompt) if self.is_chat else 16)

    def usage(self, tokens: int) -> dict[str, Any]:
        count = len(self.prompt)
        return {"prompt_tokens": count, "total_tokens": count + tokens, "completion_tokens": tokens}

    def event(self, choice: dict[str, Any], tokens: int, **more: Any) -> bytes:
        counted = {"usage": self.usage(tokens)} if self._options.get("continuous_usage_stats") else {}
        return _sse(self._head | {"choices": [choice]} | counted | more)

    def role(self) -> Iterator[bytes]:
        if self.is_chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield self.event(role, 0, prompt_token_ids=self.prompt if self.asked else None, prompt_text=None)

    def delta(self, text: str, reason: str | None, stop: str, *, parses: bool, number: int) -> dict[str, Any] | None:
        """Return a choice without its ids; None: there is no event of it, unless ids are asked for."""
        stop_reason = stop or None
        if not self.is_chat:
            ids = self.prompt if self.asked and number == 1 else None
            end = {"logprobs": None, "finish_reason": reason, "stop_reason": stop_reason, "prompt_token_ids": ids}
            return {"index": 0, "text": text, **end}
        delta = {"content": text}
        if parses:
            delta = {"reasoning": text} if number % 2 else {}
        if not (delta or reason or self.asked):
            return None
        why = {"stop_reason": stop_reason} if reason else {}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **why}

    def ending(self, tokens: int) -> Iterator[bytes]:
        if self._options.get("include_usage"):
            yield _sse(self._head | {"choices": [], "usage": self.usage(tokens)})
        yield b"data: [DONE]\n\n"


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def stream_events(
    path: str, body: dict[str, Any], *, name: str = "chatcmpl-1", created: int = 7, parses: bool = False
) -> Iterator[bytes]:
    """Yield the events of the answer. `parses`: a reasoning parser is configured, and finds reasoning at first."""
    answer, stops = _Answer(path, body, name, created), body.get("stop") or []
    detokenizer = _Detokenizer(answer.prompt, [stops] if isinstance(stops, str) else stops)
    yield from answer.role()
    ids: list[int] = []
    reason, number = None, 0
    while reason is None:
        told, number = len(ids), number + 1
        while reason is None and len(ids) < told + 1 + number % 3:
            ids.append(next_token(answer.prompt + ids))
            detokenizer.push(ids[-1])
            reason = "stop" if detokenizer.stopped else "length" if len(ids) == answer.limit else None
        text = detokenizer.shown(is_over=reason is not None)
        choice = answer.delta(text, reason, detokenizer.stopped, parses=parses and number < 9, number=number)
        if choice is not None:
            yield answer.event(choice | {"token_ids": ids[told:] if answer.asked else None}, len(ids))
    yield from answer.ending(len(ids))


def _death() -> dict[str, Any]:
    """Source: seen when the engine core of vLLM 0.24.0 was killed."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


class _Server(VllmDouble):
    """Streams that stop in their middle until they are released, or the engine core dies."""

    held = 0

    def routes(self) -> list[web.RouteDef]:
        more = web.get("/held", self._count), web.post("/release", self._release), web.post("/die", self._die)
        return [*super().routes(), *more]

    async def _count(self, _: web.Request) -> web.Response:
        return web.Response(text=str(self.held))

    async def _release(self, _: web.Request) -> web.Response:
        self.released.set()
        return web.Response()

    async def _die(self, _: web.Request) -> web.Response:
        self.is_healthy = False
        self.released.set()
        return web.Response()

    def _is_dead(self) -> bool:
        return not self.is_healthy

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self._is_dead():
            return web.json_response(_death(), status=500)
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events = list(stream_events(request.path, body))
        holds_at = 1 + xxh3_64_intdigest(msgspec.json.encode(prompt_of(body))) % (len(events) - 1)
        for at, event in enumerate(events):
            if at == holds_at and not self.released.is_set():
                self.held += 1
                await self.released.wait()
            if self._is_dead():
                await response.write(b"data: " + json.dumps(_death()).encode() + b"\n\ndata: [DONE]\n\n")
                break
            await response.write(event)
        return response


async def _serve(model: str) -> None:
    async with _Server(model, max_model_len=MODEL_LEN).serving() as server:
        print(f"vllm on {server.url}", flush=True)  # noqa: T201 - its address
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
