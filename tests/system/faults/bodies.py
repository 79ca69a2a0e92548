"""Request bodies by shape, what CPU time one costs a process, and a search for the worst.

The search only gets a score: it draws shapes, and changes the worst ones that it has found. Equal seeds draw equal
shapes as long as scores are equal.
"""

import http.client
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

_TIMEOUT_S = 120.0

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MODEL = b"sim-8b"
_HELLO = b'"messages":[{"role":"user","content":"hi"}],'
_KEEP = 4
"""Worst shapes that are changed."""
_CHANGED_RATIO = 0.6

PLACES: dict[str, tuple[str, bytes, bytes]] = {
    "messages": (CHAT, b'"messages":', b""),
    "content": (CHAT, b'"messages":[{"role":"user","content":', b"}]"),
    "content.text": (CHAT, b'"messages":[{"role":"user","content":[{"type":"text","text":', b"}]}]"),
    "image_url": (CHAT, b'"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":', b"}}]}]"),
    "tool_calls": (CHAT, b'"messages":[{"role":"assistant","content":null,"tool_calls":', b"}]"),
    "role": (CHAT, b'"messages":[{"content":"hi","role":', b"}]"),
    "tools": (CHAT, _HELLO + b'"tools":', b""),
    "documents": (CHAT, _HELLO + b'"documents":', b""),
    "chat_template_kwargs": (CHAT, _HELLO + b'"chat_template_kwargs":', b""),
    "response_format": (CHAT, _HELLO + b'"response_format":', b""),
    "schema": (CHAT, _HELLO + b'"response_format":{"type":"json_schema","json_schema":{"schema":', b"}}"),
    "guided_json": (CHAT, _HELLO + b'"guided_json":', b""),
    "structured_outputs": (CHAT, _HELLO + b'"structured_outputs":{"json":', b"}"),
    "annotations": (CHAT, _HELLO + b'"nvext":{"annotations":', b"}"),
    "token_data": (CHAT, _HELLO + b'"nvext":{"token_data":', b"}"),
    "logit_bias": (CHAT, _HELLO + b'"logit_bias":', b""),
    "metadata": (CHAT, _HELLO + b'"metadata":', b""),
    "stop": (CHAT, _HELLO + b'"stop":', b""),
    "unknown": (CHAT, _HELLO + b'"whatever":', b""),
    "max_tokens": (CHAT, _HELLO + b'"max_tokens":', b""),
    "model": (CHAT, _HELLO + b'"model":', b""),
    "prompt": (COMPLETIONS, b'"prompt":', b""),
    "prompt[0]": (COMPLETIONS, b'"prompt":[', b"]"),
    "kv_prompt_ids": (COMPLETIONS, b'"prompt":"a","kv_prompt_ids":', b""),
}


def _listed(unit: bytes) -> Callable[[int], bytes]:
    return lambda size: b"[" + (unit + b",") * (size // (len(unit) + 1)) + unit + b"]"


def _text(unit: bytes, before: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: b'"' + before + unit * (size // len(unit)) + b'"'


def _keys(size: int) -> bytes:
    return b"{" + b",".join(b'"k%07d":0' % number for number in range(size // 13)) + b"}"


def _deep(size: int) -> bytes:
    return b"[" * (size // 2) + b"]" * (size // 2)


_MESSAGE = b'{"role":"user","content":"a"}'
FILLERS: dict[str, Callable[[int], bytes]] = {
    "[]": _listed(b"[]"),
    "{}": _listed(b"{}"),
    '{"a":0}': _listed(b'{"a":0}'),
    "[[0]]": _listed(b"[[0]]"),
    '""': _listed(b'""'),
    "1": _listed(b"1"),
    "100000": _listed(b"100000"),
    "1.5": _listed(b"1.5"),
    "true": _listed(b"true"),
    "long strings": _listed(b'"' + b"a" * 2000 + b'"'),
    "messages": _listed(_MESSAGE),
    "calls": _listed(b'{"function":{"name":"f","arguments":"{}"}}'),
    "parts": _listed(b'{"type":"text","text":"a"}'),
    "keys": _keys,
    "deep": _deep,
    "ascii": _text(b"a"),
    "words": _text(b"hello world, "),
    "escapes": _text(b"\\u0041"),
    "newlines": _text(b"\\n"),
    "quotes": _text(b'\\"'),
    "cyrillic": _text("я".encode()),
    "one emoji": _text(b"a", "\U0001f600".encode()),
    "image": _text(b"QUJD", b"data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf"),
    "bad image": _text(b"QUJD", b"data:image/png;base64,====\\n"),
    "base64": _text(b"AQAAAAIAAAADAAAA"),
    "digits": lambda size: b"1" * size,
    "space": lambda size: b" " * size + b"0",
}


class BodyShape(NamedTuple):
    """`filler` at `place`, some `size_bytes` of it."""

    place: str
    filler: str
    size_bytes: int

    @property
    def path(self) -> str:
        """The endpoint that it is for."""
        return PLACES[self.place][0]

    def body(self) -> bytes:
        """Return the body."""
        _, before, after = PLACES[self.place]
        return b'{"model":"%b","max_tokens":1,%b%b%b}' % (_MODEL, before, FILLERS[self.filler](self.size_bytes), after)

    def __str__(self) -> str:
        return f"{self.place}: {self.filler}, {self.size_bytes >> 10} KiB"


class Search:
    """Draws shapes of given sizes, and changes the worst that were found."""

    def __init__(self, seed: int, sizes: tuple[int, ...]) -> None:
        self._random = random.Random(seed)
        self._sizes = sizes
        self._known: set[BodyShape] = set()
        self.scores: dict[BodyShape, float] = {}

    def shapes(self, count: int) -> Iterator[BodyShape]:
        """Yield so many shapes, none twice; the score of each is known before the next is drawn."""
        for _ in range(count):
            shape = self._drawn()
            self._known.add(shape)
            yield shape

    def worst(self, count: int) -> list[BodyShape]:
        """Return the shapes with the highest scores, the worst first."""
        return sorted(self.scores, key=lambda shape: -self.scores[shape])[:count]

    def _drawn(self) -> BodyShape:
        draw = self._random
        while True:
            shape = BodyShape(draw.choice(list(PLACES)), draw.choice(list(FILLERS)), draw.choice(self._sizes))
            if self.scores and draw.random() < _CHANGED_RATIO:
                field = draw.choice(BodyShape._fields)
                shape = draw.choice(self.worst(_KEEP))._replace(**{field: getattr(shape, field)})
            if shape not in self._known:
                return shape


def cost_s(url: str, pid: int, shape: BodyShape) -> float:
    """Return the CPU seconds that the process at `url` takes until it has answered the body."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", shape.path, shape.body(), {"content-type": "application/json"})
        connection.getresponse().read()
    except OSError:
        pass  # it was refused before all of it was sent
    finally:
        connection.close()
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system)


def searched(url: str, pid: int, seed: int, draws: int, sizes: tuple[int, ...]) -> Search:
    """Return a search that has sent `draws` bodies to a process."""
    search = Search(seed, sizes)
    for shape in search.shapes(draws):
        search.scores[shape] = cost_s(url, pid, shape)
    return search
