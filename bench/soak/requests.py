"""The requests of a soak: a seeded mix, each request with its expected answer.

A simulated engine's text is a pure function of the prompt's tokens, so the answer is known before the request is sent,
whichever worker computes it, and however many workers computed parts of it. Prompts are encoded by the byte tokenizer.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kv_protocol.hashing import unpack_tokens
from kv_runtime.text.byte_model import ByteText
from worker_agent.engines.simulated.tokens import TokenSource

if TYPE_CHECKING:
    from kv_runtime.text.chat_messages import Message

MODEL = "sim-8b"
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_SYSTEMS = 16
_SYSTEM_BYTES, _QUESTION_BYTES, _LONG_PROMPT_BYTES = (128, 384), (16, 64), (2048, 8192)
_TURNS_MAX = 8
_USAGE_SHARE = 0.5
"""The share of streams that request their usage."""
_LEAVES_AFTER_EVENTS = (1, 8)
_LETTERS = "abcdefghijklmnopqrstuvwxyz    "
_ENGINE = TokenSource()
_TEXT = ByteText()


class Kind(NamedTuple):
    """One kind of request: its share of all in percent, and the least and most tokens of its answer."""

    name: str
    percent: int
    tokens: tuple[int, int]
    is_chat: bool = False
    is_stream: bool = False
    choices: int = 1
    leaves: bool = False
    is_long: bool = False

    @property
    def can_migrate(self) -> bool:
        """Whether another worker can continue its answer: only a stream of one choice."""
        return self.is_stream and self.choices == 1


KINDS = (
    Kind("chat", 30, (1, 6), is_chat=True),
    Kind("chat, streamed", 18, (2, 10), is_chat=True, is_stream=True),
    Kind("completion", 24, (1, 6)),
    Kind("completion, streamed", 13, (2, 10), is_stream=True),
    Kind("long prompt", 2, (1, 3), is_long=True),
    Kind("long stream", 1, (48, 128), is_stream=True),
    Kind("stream of two choices", 1, (8, 24), is_stream=True, choices=2),
    Kind("stream that its client leaves", 1, (32, 96), is_stream=True, leaves=True),
)
REFUSED = Kind("request to refuse", 10, (0, 0))
_LONG, _LARGE = "x" * 16_000, "x" * 100_000
_UNACCEPTABLE: tuple[tuple[int, bytes, dict[str, str]], ...] = (
    (400, b"{", {}),
    (400, msgspec.json.encode({"model": MODEL, "prompt": _LARGE, "max_tokens": -1}), {}),
    (400, msgspec.json.encode({"model": MODEL, "prompt": "x", "max_tokens": 1 << 20}), {}),
    (400, msgspec.json.encode({"model": MODEL, "prompt": _LONG}), {"x-worker-instance-id": "no-such-worker"}),
    (404, msgspec.json.encode({"model": "no-such-model", "prompt": _LONG}), {}),
    (413, msgspec.json.encode({"model": MODEL, "prompt": "x", "user": "x" * (1 << 20)}), {}),
)
"""Bodies with their expected status, and headers: no JSON, a wrong field of a large body, more tokens than any worker
allows, pinned to an unknown worker, an unknown model, too large."""


class SoakRequest(NamedTuple):
    """One request; `texts` are the expected text of each choice."""

    kind: Kind
    path: str = _COMPLETION
    body: bytes = b""
    headers: Mapping[str, str] = {}
    texts: tuple[str, ...] = ()
    tokens: int = 0
    """The tokens of each choice."""
    has_usage: bool = True
    status: int = 200
    leaves_after: int = 0
    """Events after which the client closes its connection; 0: it stays."""


class User:
    """One user: equal seeds and numbers give equal requests. Chats continue the user's conversation."""

    def __init__(self, seed: int, number: int) -> None:
        self._draw = Random(f"{seed} {number}")  # noqa: S311 - a workload, not a secret
        systems = Random(seed)  # noqa: S311 - as above
        self._systems = [_words(systems, _SYSTEM_BYTES) for _ in range(_SYSTEMS)]
        self._messages: list[Message] = []
        self._known_tokens, self._state = 0, _ENGINE.fold(())

    def next(self) -> SoakRequest:
        """Return the user's next request."""
        draw = self._draw
        weights = [kind.percent for kind in (*KINDS, REFUSED)]
        kind = draw.choices((*KINDS, REFUSED), weights)[0]
        if kind is REFUSED:
            status, body, headers = draw.choice(_UNACCEPTABLE)
            return SoakRequest(kind, _COMPLETION, body, headers, status=status)
        return self._chat(kind) if kind.is_chat else self._completion(kind)

    def _chat(self, kind: Kind) -> SoakRequest:
        draw, messages = self._draw, self._messages
        if not messages or len(messages) > 2 * _TURNS_MAX:
            messages[:] = [{"role": "system", "content": draw.choice(self._systems)}]
            self._known_tokens, self._state = 0, _ENGINE.fold(())
        messages.append({"role": "user", "content": _words(draw, _QUESTION_BYTES)})
        tokens = unpack_tokens(_TEXT.pack_chat(messages))
        self._state = _ENGINE.fold(tokens[self._known_tokens :], self._state)
        self._known_tokens = len(tokens)
        request = self._request(kind, _CHAT, {"messages": messages}, [self._state])
        messages.append({"role": "assistant", "content": request.texts[0]})
        return request

    def _completion(self, kind: Kind) -> SoakRequest:
        draw = self._draw
        begins = _words(draw, _LONG_PROMPT_BYTES) if kind.is_long else draw.choice(self._systems)
        prompt = begins + _words(draw, _QUESTION_BYTES)
        states = [_ENGINE.of_choice(choice).fold(prompt.encode()) for choice in range(kind.choices)]
        return self._request(kind, _COMPLETION, {"prompt": prompt}, states)

    def _request(self, kind: Kind, path: str, prompt: dict[str, object], states: Sequence[int]) -> SoakRequest:
        draw = self._draw
        tokens, has_usage = draw.randint(*kind.tokens), not kind.is_stream or draw.random() < _USAGE_SHARE
        options = {"model": MODEL, "max_tokens": tokens, "stream": kind.is_stream, "n": kind.choices}
        if kind.is_stream and has_usage:
            options["stream_options"] = {"include_usage": True}
        return SoakRequest(
            kind,
            path,
            msgspec.json.encode(options | prompt),
            texts=tuple(_answer(_ENGINE.of_choice(choice), state, tokens) for choice, state in enumerate(states)),
            tokens=tokens,
            has_usage=has_usage,
            leaves_after=draw.randint(*_LEAVES_AFTER_EVENTS) if kind.leaves else 0,
        )


def _answer(engine: TokenSource, state: int, tokens: int) -> str:
    text = bytearray()
    for _ in range(tokens):
        token = engine.next_token(state)
        state = engine.fold((token,), state)
        text.append(token)
    return text.decode()


def _words(draw: Random, size: tuple[int, int]) -> str:
    return "".join(draw.choices(_LETTERS, k=draw.randint(*size)))
