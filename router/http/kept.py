"""What a client has of an event stream, for whoever goes on with it: kept as it was passed on, read when needed."""

from router.http.framing import ChunkReader


class Kept:
    """The bytes of a stream's whole events, at most `bytes_max`: of a longer one nothing is kept."""

    __slots__ = ("_bytes_max", "_parts", "_size", "is_overfull")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts: list[tuple[bytes, bool]] = []
        self._size = 0
        self.is_overfull = False

    def add(self, data: bytes, *, framed: bool) -> None:
        """`data` was passed on; `framed`: as whole HTTP chunks."""
        self._size += len(data)
        if self._size <= self._bytes_max:
            self._parts.append((data, framed))
        elif not self.is_overfull:
            self.is_overfull = True
            self._parts.clear()

    def events(self) -> bytes:
        """Return the events."""
        payload, reader = bytearray(), ChunkReader()
        for data, framed in self._parts:
            if framed:
                reader.feed(data, payload)
            else:
                payload += data
        return bytes(payload)
