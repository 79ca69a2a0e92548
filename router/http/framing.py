"""Reads message bodies: by length, in chunks, or to the end of the connection.

    chunked = chunk* last-chunk trailer* CRLF
    chunk   = size [extension] CRLF, `size` bytes, CRLF
    size    = 1 to 15 hexadecimal digits, nothing before or between them; 0 is the last chunk

Extensions and trailers are checked and forgotten; a line of them is bounded, and so are all trailers together. A
trailer that frames a message is refused: another reader may frame the next one by it.
Sources: RFC 9112, section 7.1; RFC 9110, section 6.5.1.
"""

import re
from typing import Literal, Protocol

from router.http.heads import CHUNKED, UNTIL_CLOSE, Malformed

_LINE_BYTES_MAX = 4096
_TRAILER_BYTES_MAX = 16 << 10
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")
_FRAMES = re.compile(rb"(?i:transfer-encoding|content-length):")
_SIZES = {b"%x" % size: size for size in range(1, 4097)} | {b"%X" % size: size for size in range(1, 4097)}
"""Common sizes: a look-up is strict and fast."""

LAST_CHUNK = b"0\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    """Return the chunk that carries `payload`, which is not empty."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def complete_chunks_tail(data: bytes, tail_bytes: int) -> int:
    """Return where the first chunk of the last `tail_bytes` begins; -1 unless `data` is complete small chunks only.

    Where the last chunk is longer than that, it is that one's beginning. The last chunk of a body is not among them.
    """
    at, end = 0, len(data)
    tail_from, begins = max(end - tail_bytes, 0), -1
    while at < end:
        line_end = data.find(b"\r\n", at, at + 8)
        size = _SIZES.get(data[at:line_end]) if line_end > 0 else None
        if size is None:
            return -1
        if begins < tail_from:
            begins = at
        at = line_end + size + 4
        if data[at - 2 : at] != b"\r\n":
            return -1
    return begins


def payload_of(data: bytes) -> bytes:
    """Return the payload of chunks that `complete_chunks_tail` found to be complete."""
    line_end = data.find(b"\r\n")
    if line_end + 4 + _SIZES[data[:line_end]] == len(data):  # most are one chunk
        return data[line_end + 2 : -2]
    at, end, parts = 0, len(data), []
    while at < end:
        line_end = data.index(b"\r\n", at)
        begins = line_end + 2
        at = begins + _SIZES[data[at:line_end]] + 2
        parts.append(data[begins : at - 2])
    return b"".join(parts)


class BodyReader(Protocol):
    """Reads a body piece by piece. The result does not depend on how it is cut into pieces."""

    def feed(self, data: bytes, payload: bytearray) -> int:
        """Append the payload in `data` to `payload`; return where in `data` the body ends, -1 if it does not end."""


class LengthReader:
    """A body of a stated length."""

    __slots__ = ("left",)

    def __init__(self, body_bytes: int) -> None:
        self.left = body_bytes

    def feed(self, data: bytes, payload: bytearray) -> int:
        """See `BodyReader`."""
        left = self.left
        if len(data) < left:
            payload += data
            self.left = left - len(data)
            return -1
        payload += data[:left]
        self.left = 0
        return left


class CloseReader:
    """A body that ends with its connection."""

    __slots__ = ()

    def feed(self, data: bytes, payload: bytearray) -> int:
        """See `BodyReader`."""
        payload += data
        return -1


def body_reader(body_bytes: int) -> BodyReader:
    """Return the reader for a body of this length (`CHUNKED`, `UNTIL_CLOSE`)."""
    if body_bytes == CHUNKED:
        return ChunkReader()
    return CloseReader() if body_bytes == UNTIL_CLOSE else LengthReader(body_bytes)


class ChunkReader:
    """A chunked body."""

    __slots__ = ("_line", "_state", "_trailer_bytes", "left")

    def __init__(self) -> None:
        self._state: Literal["size", "data", "end", "trailers"] = "size"
        self._line = b""
        self._trailer_bytes = 0
        self.left = 0
        """Missing bytes of the current chunk."""

    @property
    def between_chunks(self) -> bool:
        """Whether the next byte begins a chunk."""
        return self._state == "size" and not self._line

    def feed(self, data: bytes, payload: bytearray) -> int:
        """See `BodyReader`.

        Raises:
            Malformed: it is no chunked body.
        """
        at = 0
        while at < len(data):
            if self._state == "data":
                piece = data[at : at + self.left]
                payload += piece
                at += len(piece)
                self.left -= len(piece)
                if not self.left:
                    self._state = "end"
                continue
            line_end = data.find(b"\n", at)
            line = self._line + (data[at : line_end + 1] if line_end >= 0 else data[at:])
            if len(line) > _LINE_BYTES_MAX:
                raise Malformed(400, f"chunk: found a line of {len(line)} bytes and more, allowed {_LINE_BYTES_MAX}")
            if line_end < 0:
                self._line = line
                return -1
            self._line, at = b"", line_end + 1
            if self._read(line):
                return at
        return -1

    def _read(self, line: bytes) -> bool:
        """Return whether the body ends with this line."""
        if self._state == "end":
            if line != b"\r\n":
                raise Malformed(400, "chunk: found bytes beyond its size, allowed CRLF")
            self._state = "size"
        elif self._state == "size":
            found = _SIZE_LINE.fullmatch(line)
            if found is None:
                raise Malformed(400, f"chunk: found size {line[:100].decode('latin-1')!r}, allowed hexadecimal digits")
            self.left = int(found[1], 16)
            self._state = "data" if self.left else "trailers"
        elif line == b"\r\n":
            return True
        else:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > _TRAILER_BYTES_MAX or not _TRAILER.fullmatch(line):
                raise Malformed(400, f"trailer: found no header line, or more than {_TRAILER_BYTES_MAX} bytes of them")
            if _FRAMES.match(line):
                found_name = line.partition(b":")[0].decode("latin-1")
                raise Malformed(400, f"trailer: found {found_name}, allowed none that frames a message")
        return False
