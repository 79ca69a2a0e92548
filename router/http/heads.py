"""Parses HTTP/1.1 messages strictly, so that every server finds the same messages in the same bytes.

    head         = start line, then header lines, each ended by CRLF; an empty line ends it
    name         = token; no space before the colon, no continuation lines (obs-fold)
    value        = visible characters, spaces, tabs, bytes above 0x7f; no bare CR or LF, no control characters
    body         = `content-length: digits`, once, or `transfer-encoding: chunked`, once; never both
    host         = once in HTTP/1.1
    target       = /path?query, or http(s)://authority/path?query, or * (OPTIONS)
    chunked      = chunk* last-chunk trailer* CRLF
    chunk        = size [extension] CRLF, `size` bytes, CRLF
    size         = 1 to 15 hexadecimal digits, nothing before or between them; 0 is the last chunk

| found | answer |
|---|---|
| more than 32 KiB, or than 100 header lines | 431 |
| HTTP/2's preface, any version but 1.0 and 1.1 | 505 |
| a transfer coding that is not `chunked`, CONNECT | 501 |
| a content coding that is not `identity` | 415 |
| an expectation that is not `100-continue` | 417 |
| whatever else differs | 400 |

Extensions and trailers are checked, then dropped; each line is bounded, and so are all trailers together. A trailer
with a framing header is refused: another server might find the next message by it.

Source: RFC 9112, RFC 9110. Where they leave a choice, the message is refused. In C++: `router/native/fields.hpp`,
`heads.cpp` (requests of clients), `relay.cpp` (requests to workers, and answers), `body.cpp` (bodies).
"""

from typing import NamedTuple

from kv_protocol.body_limits import Bytes
from router.native import built

CHUNKED, UNTIL_CLOSE = -1, -2
"""Values in place of a body's length in bytes: the body ends with its last chunk, or with the connection."""

Headers = dict[bytes, bytes]
"""Names in lower case; values of a repeated name joined by commas."""

HOP_BY_HOP = frozenset(
    {
        b"connection", b"content-length", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
"""Headers of a connection, not of its payload; and the length, which is written anew."""


class Malformed(Exception):
    """A message that cannot be parsed or is not served. `status` is the answer to its sender."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestHead(NamedTuple):
    """A request's head. `body_bytes` is the body's length, or `CHUNKED`.

    `body` is the whole body; None: a part of it is missing. `rest` is what followed the parsed bytes.
    """

    method: str
    path: str
    query: str
    headers: Headers
    body_bytes: int
    keep_alive: bool
    http_1_1: bool
    body: Bytes | None
    rest: bytes


class AnswerHead(NamedTuple):
    """An answer's head. `is_stream`: its body has events.

    `lines` are its status line and those of its header lines that may be passed on.

    `rest` is what followed the head.
    """

    status: int
    headers: Headers
    body_bytes: int
    reusable: bool
    is_stream: bool
    lines: bytes
    rest: bytes


built.name_heads(RequestHead, AnswerHead, Malformed)
RequestReader = built.RequestReader
"""Reads requests. Arguments: the type `Exchange`, the set of served `Host`s, which may change, the header lines of
answers, and the most bytes of a body.

    read(data, client, began_s, posts)   reads the request at the start of `data`, after any empty lines; returns
        an exchange with this client, and the value of its path in `posts`
                                         for a complete POST to one of these paths, if no byte follows it and its
                                         `Host`, `Origin` and length need no other check
        its `RequestHead`, and None      for any other request with a complete head
        None, and None                   if the head is not complete
                                         Raises `Malformed`
    checks_all                           if set, `read` returns no exchange: its caller checks each request
"""
RequestWriter = built.RequestWriter
"""Writes requests to one worker. Arguments: the prefix of its paths, and the first header lines, which end with
`content-length: `.

    request(method, path, headers, body)   returns the request's parts; a short body is one part with the head
"""
CallLines = built.CallLines
"""Writes header lines. Argument: the first header lines of every call to a worker.

    lines(verdict, client)   returns the lines of the call that carries out the verdict, with the client's
                             `traceparent`, `tracestate`, `x-session-id`; and the lines that its answer gets
"""
AnswerReader = built.AnswerReader
"""Reads answers to a GET or a POST. Argument: the names of headers that are not passed on.

    head(data)   returns the `AnswerHead` after the interim answers in `data`; the last interim head if there is no
                 other; None: no head is complete. Raises `Malformed`
"""
LAST_CHUNK = b"0\r\n\r\n"
BodyReader = built.BodyReader
"""Reads one body, of a length in bytes, `CHUNKED` or `UNTIL_CLOSE`, from pieces that may be cut anywhere.

    feed(data, payload)   appends the payload in `data` to `payload`; returns where in `data` the body ends, -1 if it
                          does not. Raises `Malformed`
    left                  missing bytes of the body, or of the present chunk
"""
AnswerBody = built.AnswerBody
"""Reads an answer's body the same way, and stores its payload until taken. `AnswerBody(body_bytes, mark, is_later)`.

    feed(data)        reads the payload in `data`; raises as `BodyReader.feed` does. While a stream `flows`, takes the
                      complete events and returns them as the client gets them, maybe empty. None: the caller has to
                      take them, as the stream does not flow, nothing was taken yet, the body ends, or an alarm waits
    end               where in the last `data` the body ends, -1 if it does not
    until_close       whether it ends with the connection
    pass_on(...)      makes it a stream that may flow, as `chunks` or not. An alarm is one of the texts `alarms`, or
                      more than `pending_max` bytes without an event's end; `kept` gets the events
    flows             whether a stream flows
    has_begun         whether a byte of the payload came
    size, pending     how many bytes wait; these bytes
    has(text)         whether the text is in what waits
    take_events()     takes all complete events: up to the last empty line
    take(size)        takes this many bytes, or all that wait
    drop()            drops what waits
    marks             how many marks the last take had; if `mark` is empty, how many events
    later             in a stream, how many marks were taken after the first take with one; all marks if `is_later`
    has_end_mark      whether the last bytes that were read have the event `data: [DONE]`
    tail              the last bytes that were taken, at most `TAIL_BYTES`
"""
TAIL_BYTES = built.TAIL_BYTES
chunk = built.chunk
"""Returns the chunk that carries a payload, which is not empty."""
