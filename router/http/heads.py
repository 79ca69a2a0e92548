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

Extensions and trailers are checked and forgotten; a line of them is bounded, and so are all trailers together. A
trailer that frames a message is refused: another reader may frame the next one by it.

Source: RFC 9112, RFC 9110. Where they leave a choice, the message is refused. In C++: `router/native/fields.hpp`,
`heads.cpp` (requests of clients), `relay.cpp` (requests to workers, and answers), `body.cpp` (bodies).
"""

from typing import NamedTuple

from kv_protocol.body_limits import Bytes
from router.native import built

CHUNKED, UNTIL_CLOSE = -1, -2
"""In place of a body's length in bytes: the body ends with its last chunk, or with the connection."""

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
    """A request's head. `body_bytes` is its length, or `CHUNKED`.

    `body` is all of it; None: it has not come whole. `rest` is what followed the parsed bytes.
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
"""Reads requests. It gets the type `Exchange`, the `Host`s that are served, which may change, the header lines of
answers, and the most bytes of a body.

    read(data, client, began_s, posts)   reads the request with which `data` begins, behind empty lines; returns
        an exchange with this client, and the value of its path in `posts`
                                         for a complete POST to one of these paths, if no byte follows it and nothing
                                         is left to check
        its `RequestHead`, and None      any other request with a complete head
        None, and None                   the head is not complete
                                         It raises `Malformed`
    checks_all                           whether something is left to check of each request
"""
RequestWriter = built.RequestWriter
"""Writes requests to one worker. It gets what paths there begin with, and the first header lines, which end with
`content-length: `.

    request(method, path, headers, body)   returns the request's parts; a short body is one part with the head
"""
CallLines = built.CallLines
"""Writes header lines. It gets those with which every call to a worker begins.

    lines(verdict, client)   returns the lines of the call that carries out the verdict, with the client's
                             `traceparent`, `tracestate`, `x-session-id`; and the lines that its answer gets
"""
AnswerReader = built.AnswerReader
"""Reads answers to a GET or a POST. It gets the names of headers that stay here.

    head(data)   returns the `AnswerHead` with which an answer begins, behind interim answers; the last interim one
                 where that is all; None: no head is complete. It raises `Malformed`
"""
LAST_CHUNK = b"0\r\n\r\n"
BodyReader = built.BodyReader
"""Reads one body, of a length in bytes, `CHUNKED` or `UNTIL_CLOSE`, piece by piece; however it is cut, it is the same.

    feed(data, payload)   appends the payload in `data` to `payload`; returns where in `data` the body ends, -1 if it
                          does not. Raises `Malformed`
    left                  missing bytes of the body, or of the present chunk
"""
AnswerBody = built.AnswerBody
"""An answer's body, read likewise; its payload waits to be taken. `AnswerBody(body_bytes, mark, is_later)`.

    feed(data)        reads the payload in `data`, raises as `BodyReader.feed`. While a stream `flows` it takes the
                      complete events, and returns them as the client gets them, empty where there are none. None: the
                      stream does not flow, nothing was taken before, the body ends, or what waits is to be judged
    end               where in the last `data` the body ends, -1 if it does not
    until_close       whether it ends with the connection
    pass_on(...)      says how a stream flows: `chunks` or not; what waits is judged if it has more bytes than
                      `pending_max` without an event's end, or one of the texts `alarms`; `kept` gets the events
    flows             whether a stream flows
    has_begun         whether a byte of the payload came
    size, pending     what waits
    has(text)         whether the text is in what waits
    take_events()     takes all complete events: up to the last empty line
    take(size)        takes this many bytes, or all that wait
    drop()            drops what waits
    marks             how many marks are in what was taken last; if `mark` is empty, how many events
    later             of a stream, the marks that were taken after the first piece with one; if it `is_later`, all
    has_end_mark      whether the end of all that was read has a stream's event `data: [DONE]`
    tail              the end of all that was taken, `TAIL_BYTES` at most
"""
TAIL_BYTES = built.TAIL_BYTES
chunk = built.chunk
"""Returns the chunk that carries a payload, which is not empty."""
