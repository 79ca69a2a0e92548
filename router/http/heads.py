"""Parses heads of HTTP/1.1 messages strictly, so that every server finds the same messages in the same bytes.

    head         = start line, then header lines, each ended by CRLF; an empty line ends it
    name         = token; no space before the colon, no continuation lines (obs-fold)
    value        = visible characters, spaces, tabs, bytes above 0x7f; no bare CR or LF, no control characters
    body         = `content-length: digits`, once, or `transfer-encoding: chunked`, once; never both
    host         = once in HTTP/1.1
    target       = /path?query, or http(s)://authority/path?query, or * (OPTIONS)

| found | answer |
|---|---|
| more than 32 KiB, or than 100 header lines | 431 |
| HTTP/2's preface, any version but 1.0 and 1.1 | 505 |
| a transfer coding that is not `chunked`, CONNECT | 501 |
| a content coding that is not `identity` | 415 |
| an expectation that is not `100-continue` | 417 |
| whatever else differs | 400 |

Source: RFC 9112, RFC 9110. Where they leave a choice, the message is refused.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

HEAD_BYTES_MAX = 32 << 10
HEADERS_MAX = 100
CHUNKED, UNTIL_CLOSE = -1, -2
"""In place of a body's length in bytes: the body ends with its last chunk, or with the connection."""

Headers = dict[bytes, bytes]
"""Names in lower case; values of a repeated name joined by commas."""

_TOKEN_BYTES = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT_BYTES = rb"[\t\x20-\x7e\x80-\xff]*"
_TOKEN = re.compile(_TOKEN_BYTES)
_FIELD = re.compile(rb"(%b):(%b)" % (_TOKEN_BYTES, _TEXT_BYTES))
_VERSION = re.compile(rb"HTTP/[0-9]\.[0-9]")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] [1-5][0-9][0-9](?: %b)?" % _TEXT_BYTES)
_TARGET = re.compile(rb"[\x21-\x7e]+")
_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://[^/?#@]+(?=[/?]|$)")
_LENGTH_DIGITS_MAX = 18
_KNOWN_LINES_MAX = 4096
_KNOWN_LINE_BYTES_MAX = 256
_BODYLESS = frozenset({204, 304})
_ONCE = frozenset({b"host", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"})
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
    """A request's head. `body_bytes` is its length, or `CHUNKED`."""

    method: str
    path: str
    query: str
    headers: Headers
    body_bytes: int
    keep_alive: bool
    http_1_1: bool


class AnswerHead(NamedTuple):
    """An answer's head. `lines` are its status line and those of its header lines that may be passed on."""

    status: int
    headers: Headers
    body_bytes: int
    reusable: bool
    lines: bytes


class HeadReader:
    """Parses heads, and caches valid lines: most of them come again."""

    __slots__ = ("_answer_fields", "_fields", "_request_lines", "_status_lines")

    def __init__(self, dropped: frozenset[bytes] = HOP_BY_HOP) -> None:
        self._request_lines = _ParsedLines(_request_line)
        self._fields = _ParsedLines(_field)
        self._status_lines = _ParsedLines(_status_line)

        def answer_field(line: bytes) -> tuple[bytes, bytes, bytes]:
            name, value = _field(line)
            return name, value, b"" if name in dropped else line + b"\r\n"

        self._answer_fields = _ParsedLines(answer_field)

    def request(self, head: bytes) -> RequestHead:
        """Parse the head of a request, including its empty line.

        Raises:
            Malformed: it is refused.
        """
        lines = head[:-4].split(b"\r\n")
        method, path, query, http_1_1 = self._request_lines[lines[0]]
        count = len(lines) - 1
        if count > HEADERS_MAX:
            raise Malformed(431, f"headers: found {count} lines, allowed {HEADERS_MAX}")
        fields = [self._fields[line] for line in lines[1:]]
        headers = dict(fields)
        if len(headers) != count:
            headers = _joined(fields)
        if http_1_1 and b"host" not in headers:
            raise Malformed(400, "host: found none, one is needed")
        body_bytes = _body_bytes(headers, http_1_1)
        if body_bytes == UNTIL_CLOSE:
            body_bytes = 0
        if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
            raise Malformed(415, f"content-encoding: found {_shown(headers[b'content-encoding'])}, allowed identity")
        if b"expect" in headers and headers[b"expect"].lower() != b"100-continue":
            raise Malformed(417, f"expect: found {_shown(headers[b'expect'])}, allowed 100-continue")
        keep_alive = http_1_1 and (b"connection" not in headers or b"close" not in _tokens(headers[b"connection"]))
        return RequestHead(method, path, query, headers, body_bytes, keep_alive, http_1_1)

    def answer(self, head: bytes) -> AnswerHead:
        """Parse the head of an answer to a POST, including its empty line.

        Raises:
            Malformed: it cannot be parsed, or the end of its body is unclear.
        """
        found = head[:-4].split(b"\r\n")
        status, http_1_1, status_line = self._status_lines[found[0]]
        count = len(found) - 1
        if count > HEADERS_MAX:
            raise Malformed(502, f"headers: found {count} lines, allowed {HEADERS_MAX}")
        fields = [self._answer_fields[line] for line in found[1:]]
        headers = {name: value for name, value, _ in fields}
        if len(headers) != count:
            headers = _joined([field[:2] for field in fields])
        body_bytes = _body_bytes(headers, http_1_1)
        if status < 200 or status in _BODYLESS:  # noqa: PLR2004 - the first that is no interim answer
            body_bytes = 0
        reusable = http_1_1 and body_bytes != UNTIL_CLOSE
        if b"connection" in headers:
            named = _tokens(headers[b"connection"])
            reusable = reusable and b"close" not in named
            fields = [field for field in fields if field[0] not in named]
        return AnswerHead(
            status, headers, body_bytes, reusable, b"".join([status_line, *[out for _, _, out in fields]])
        )


class _ParsedLines(dict[bytes, Any]):
    """Parsed lines, up to a bounded number; `read` parses those that are missing."""

    def __init__(self, read: Callable[[bytes], Any]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, line: bytes) -> Any:  # noqa: ANN401 - whatever `read` returns
        found = self._read(line)
        if len(line) <= _KNOWN_LINE_BYTES_MAX:
            if len(self) >= _KNOWN_LINES_MAX:
                self.clear()
            self[line] = found
        return found


def _request_line(line: bytes) -> tuple[str, str, str, bool]:
    parts = line.split(b" ")
    if len(parts) != 3:  # noqa: PLR2004 - method, target, version
        raise Malformed(400, f"request line: found {_shown(line)}, allowed method, target, version, one space between")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        status = 505 if _VERSION.fullmatch(version) else 400
        raise Malformed(status, f"version: found {_shown(version)}, allowed HTTP/1.1 and HTTP/1.0")
    if not _TOKEN.fullmatch(method):
        raise Malformed(400, f"method: found {_shown(method)}, allowed a token")
    if method == b"CONNECT":
        raise Malformed(501, "method: CONNECT is not served")
    path, _, query = _path(method, target).decode("ascii").partition("?")
    return method.decode("ascii"), path, query, version == b"HTTP/1.1"


def _status_line(line: bytes) -> tuple[int, bool, bytes]:
    if not _STATUS_LINE.fullmatch(line):
        raise Malformed(502, f"status line: found {_shown(line)}, allowed HTTP/1.1 and a status of 100 to 599")
    return int(line[9:12]), line[:8] == b"HTTP/1.1", b"HTTP/1.1 %b\r\n" % line[9:]


def _field(line: bytes) -> tuple[bytes, bytes]:
    found = _FIELD.fullmatch(line)
    if found is None:
        raise Malformed(400, f"headers: found {_shown(line)}, allowed name: value, without control characters")
    return found[1].lower(), found[2].strip()


def _path(method: bytes, target: bytes) -> bytes:
    """Return the target's path and query."""
    if not _TARGET.fullmatch(target):
        raise Malformed(400, f"target: found {_shown(target)}, allowed visible ASCII")
    if target[:1] == b"/" or (target == b"*" and method == b"OPTIONS"):
        return target
    if absolute := _ABSOLUTE.match(target):
        path = target[absolute.end() :]
        return path if path[:1] == b"/" else b"/" + path
    raise Malformed(400, f"target: found {_shown(target)}, allowed /path or http://authority/path")


def _joined(fields: list[tuple[bytes, bytes]]) -> Headers:
    headers: Headers = {}
    for name, value in fields:
        if name not in headers:
            headers[name] = value
        elif name in _ONCE:
            raise Malformed(400, f"{name.decode()}: found it twice, allowed once")
        else:
            headers[name] += b", " + value
    return headers


def _body_bytes(headers: Headers, http_1_1: bool) -> int:  # noqa: FBT001 - called with a position
    length = headers.get(b"content-length")
    if b"transfer-encoding" in headers:
        coding = headers[b"transfer-encoding"]
        if length is not None:
            raise Malformed(400, "transfer-encoding: found beside content-length, allowed alone")
        if not http_1_1:
            raise Malformed(400, "transfer-encoding: found in HTTP/1.0, allowed in HTTP/1.1")
        if coding.lower() != b"chunked":
            raise Malformed(501, f"transfer-encoding: found {_shown(coding)}, allowed chunked")
        return CHUNKED
    if length is None:
        return UNTIL_CLOSE
    if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX:
        raise Malformed(400, f"content-length: found {_shown(length)}, allowed 1 to {_LENGTH_DIGITS_MAX} digits")
    return int(length)


def _tokens(value: bytes) -> list[bytes]:
    return [each.strip() for each in value.lower().split(b",")]


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


def without_empty_lines(buffer: bytes) -> bytes:
    """Return `buffer` without the empty lines before a request (RFC 9112, 2.2)."""
    rest = buffer.lstrip(b"\r\n")
    empty = buffer[: len(buffer) - len(rest)]
    lines = b"\r\n" * (len(empty) // 2)
    if empty == lines:
        return rest
    if empty == lines + b"\r" and not rest:
        return b"\r"
    raise Malformed(400, "request line: found a bare CR or LF before it, allowed CRLF")
