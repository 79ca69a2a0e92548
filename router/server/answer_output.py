"""What the client gets of a worker's answer: a head once, then the body or its events, framed as the client reads them.

| the answer | the client gets |
|---|---|
| came whole, or was gathered | its length |
| an event stream | chunks |
| longer than what is gathered | its length where the worker stated it, else chunks |

A client of HTTP/1.0 gets bytes until its connection ends instead of chunks. The last `TAIL_BYTES` of the body are kept:
they have the usage, the stream's end mark, and the number of the last event.
"""

from kv_runtime.http.answers import error_body
from router.server.exchange import ResponseSink, error_events, event_probe, head_probe, response_error_event
from router.server.framing import LAST_CHUNK, ChunkReader, chunk
from router.server.heads import AnswerHead

TAIL_BYTES = 4096
DONE = b"[DONE]"
_RECENT_MAX = 8


class AnswerOutput:
    """The client's side of one answer. `client` may be replaced once the client has left."""

    __slots__ = (
        "_framing",
        "_is_chunked",
        "_lines",
        "_recent",
        "_tail",
        "client",
        "has_begun",
        "is_mid_event",
        "is_stream",
    )

    def __init__(self, client: ResponseSink, *, goes_on: bool) -> None:
        """`goes_on`: the client has the beginning of an event stream that this answer continues."""
        self.client = client
        self.has_begun = self.is_stream = goes_on
        self.is_mid_event = False
        """Whether the client has only the beginning of an event."""
        self._is_chunked = client.http_1_1
        self._lines = self._framing = self._tail = b""
        self._recent: list[bytes] = []
        """Chunks that were passed on, and are not in the tail yet."""

    # ------------------------------------------------------------ the head

    def send_whole(self, lines: bytes, head: AnswerHead, body: bytes) -> None:
        """Send a complete answer: one write."""
        start = lines + self.client.connection_line
        if body:
            self.client.write(b"%bcontent-length: %d\r\n\r\n%b" % (start, len(body), body))
        else:
            self.client.write(start + (b"\r\n" if head.status in (204, 304) else b"content-length: 0\r\n\r\n"))

    def begin_events(self, lines: bytes, *, names_cache: bool) -> None:
        """An event stream follows. `names_cache`: `lines` say already how it may be cached."""
        self.is_stream = True
        self._lines = lines if names_cache else lines + b"cache-control: no-cache\r\n"
        self.end_head_unmeasured()

    def begin_length(self, lines: bytes, body_bytes: int) -> None:
        """A body of this length follows, as it comes."""
        self._lines, self._is_chunked = lines, False
        self._framing = b"content-length: %d\r\n\r\n" % body_bytes

    def begin_gathering(self, lines: bytes) -> None:
        """A body is gathered: `send_gathered` follows or, if it becomes too long, `end_head_unmeasured`."""
        self._lines = lines

    def end_head_unmeasured(self) -> None:
        """The body has no stated length."""
        self._framing = b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n"

    # ------------------------------------------------------------ the body

    @property
    def takes_chunks(self) -> bool:
        """Whether chunks of the worker can be passed on unchanged."""
        return self._is_chunked

    def pass_chunks(self, chunks: bytes, tail_at: int, shown: bytes) -> None:
        """Pass on complete chunks, of which the client gets `shown`; those from `tail_at` on belong to the tail."""
        recent = self._recent
        recent.append(chunks[tail_at:] if tail_at else chunks)
        if len(recent) > _RECENT_MAX:
            del recent[0]
        self._write(shown)

    def pass_payload(self, payload: bytes, shown: bytes) -> None:
        """Pass on a part of the body, of which the client gets `shown`."""
        self._write(self._framed(shown))
        self._remember(payload)

    def send_last(self, payload: bytes, shown: bytes) -> None:
        """Pass on the last part, of which the client gets `shown`; both may be empty."""
        self._write(self._framed(shown) + (LAST_CHUNK if self._is_chunked else b""))
        self._remember(payload)

    def send_gathered(self, body: bytes) -> None:
        """Send all of the body."""
        self._write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self._remember(body)

    def _framed(self, payload: bytes) -> bytes:
        return chunk(payload) if self._is_chunked and payload else payload

    def _write(self, data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            data = b"%b%b%b%b" % (self._lines, self.client.connection_line, self._framing, data)
        self.client.write(data)

    # ------------------------------------------------------------ what it has

    @property
    def tail(self) -> bytes:
        """The end of the body that was passed on."""
        if self._recent:
            self._remember(b"")
        return self._tail

    @property
    def has_end_mark(self) -> bool:
        """Whether the last event that was passed on is the end mark of a stream."""
        return self.tail.rstrip().endswith(DONE)

    def _remember(self, payload: bytes) -> None:
        known = bytearray(self._tail)
        reader = ChunkReader()
        for each in self._recent:
            reader.feed(each, known)
        self._recent.clear()
        known += payload[-TAIL_BYTES:]
        self._tail = bytes(known[-TAIL_BYTES:])

    @property
    def probe(self) -> bytes:
        """Bytes that may be sent now without changing the answer's meaning; empty: none."""
        if not self.has_begun:
            return head_probe(self.client)
        return event_probe(self.client) if self.is_stream and not self.is_mid_event else b""

    # ------------------------------------------------------------ another end

    def end_with(self, events: bytes) -> None:
        """End the event stream with these events."""
        self.client.write(chunk(events) + LAST_CHUNK if self.client.http_1_1 else events)
        self.client.finish()

    def end_with_error(self, message: str, code: str, *, is_response: bool) -> None:
        """End what has begun: a stream by an error event, `is_response` that of a response; else cut the client off."""
        if not self.is_stream:
            self.client.cut()
        elif is_response:
            self.end_with(response_error_event(message, code, self.tail, mid_event=self.is_mid_event))
        else:
            self.end_with(error_events(error_body(message, "server_error", code=code), mid_event=self.is_mid_event))
