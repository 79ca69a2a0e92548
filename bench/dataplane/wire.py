"""The wire format of the data plane bench: chat requests, the answers of the back end, and a reader of answers.

A request controls its answer by OpenAI keys, so that every router forwards them:

    stream       false: one JSON answer with a content length; true: SSE in HTTP chunks
    max_tokens   how many chunks
    seed         milliseconds between two of them; 0: each as soon as the socket takes it, in a separate write

Every prompt begins with a unique number, so that no cache has it.
"""

from typing import NamedTuple

MODEL = "bench"
PATH = "/v1/chat/completions"
EVENT = b"data: "
_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_WORDS = "a router sends each request to the worker that holds most of its prefix and has least to do "
_NUMBER = "00000000"
_USAGE = b'"usage":{"prompt_tokens":64,"completion_tokens":8,"total_tokens":72}'


class Requests(NamedTuple):
    """Requests that differ only in their number; the bytes before and after it."""

    before: bytes
    behind: bytes

    def numbered(self, number: int) -> bytes:
        """Return the request with this number."""
        return b"%b%08d%b" % (self.before, number % 100_000_000, self.behind)


def requests(host: str, body_bytes: int, *, chunks: int = 0, pause_ms: int = 0) -> Requests:
    """Return requests with bodies of about so many bytes; `chunks` 0: one JSON answer, not a stream."""
    text = _NUMBER + " " + _WORDS
    options = f'"max_tokens":{max(1, chunks)},"seed":{pause_ms},"stream":{"true" if chunks else "false"}'
    begin = f'{{"model":"{MODEL}",{options},"messages":[{{"role":"user","content":"'
    prompt_bytes = max(len(text), body_bytes - len(begin) - len('"}]}'))
    body = begin + (text * (prompt_bytes // len(text) + 1))[:prompt_bytes] + '"}]}'
    at = body.index(_NUMBER)
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: bench\r\nAccept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return Requests((head + body[:at]).encode(), body[at + len(_NUMBER) :].encode())


def content_length(head: bytes) -> int | None:
    """Return the length that a head in lower case names."""
    _, found, behind = head.partition(b"content-length:")
    return int(behind.split(b"\r\n", 1)[0]) if found else None


def json_answer(body: bytes) -> bytes:
    """Return a complete JSON answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


JSON_ANSWER = json_answer(
    b'{"id":"chatcmpl-0","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"the worker that holds most of it"},"finish_reason":"stop"}],' + _USAGE + b"}"
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNK = _chunk(
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"bench","choices":[{"index":0,'
    b'"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
STREAM_END = (
    _chunk(
        b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"bench","choices":[],'
        + _USAGE
        + b"}\n\n"
    )
    + _chunk(b"data: [DONE]\n\n")
    + _LAST_CHUNK
)
END_EVENTS = 2
"""Events after the chunks of a stream: its usage and `[DONE]`."""


class AnswerInvalid(Exception):
    """Bytes that are not a readable answer."""


class AnswerReader:
    """One answer, read from bytes as they arrive: its status, its events, and whether it is complete."""

    __slots__ = ("_buffer", "_left", "_tail", "events", "status")

    def __init__(self) -> None:
        self._buffer = b""
        self._left: int | None = None
        self._tail = b""
        self.status = 0
        self.events = 0

    def feed(self, data: bytes) -> bool:
        """Return whether the answer is complete; raise `AnswerInvalid` where its end cannot be known."""
        if not self.status:
            self._buffer += data
            head, found, data = self._buffer.partition(_END)
            if not found:
                return False
            self._begin(head.lower())
        if self._left is not None:
            self._left -= len(data)
            return self._left <= 0
        seen = self._tail + data
        self.events += seen.count(EVENT)
        self._tail = seen[-(len(EVENT) - 1) :]
        return seen.endswith(_LAST_CHUNK)

    def _begin(self, head: bytes) -> None:
        self.status = int(head[9:12])
        self._buffer = b""
        if b"transfer-encoding: chunked" in head:
            return
        self._left = content_length(head)
        if self._left is None:
            raise AnswerInvalid("an answer without a length")
