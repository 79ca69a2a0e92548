"""Encodes an answer of the router itself."""

from http import HTTPStatus

from router.server.exchange import HeaderLines

_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode("ascii") for each in HTTPStatus}


def own_answer(status: int, body: bytes, content_type: bytes, headers: HeaderLines, connection_line: bytes) -> bytes:
    """Return the answer; `connection_line` ends with CRLF, or is empty."""
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
    more = b"".join([b"%b: %b\r\n" % each for each in headers]) + connection_line
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (line, content_type, len(body), more, body)
