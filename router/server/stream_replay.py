"""Keeps what a client has received of an event stream, so that another worker can resume it.

An agent writes the ids of tokens into comments of such a stream (`kv_protocol/continuation.py`). The client does
not get them, unless it asked for them.
"""

from kv_protocol.continuation import COMMENT, without_tokens
from router.server.framing import ChunkReader, chunk, payload_of


class StreamReplayBuffer:
    """The complete events of a stream, at most `bytes_max`; of a longer stream nothing is kept."""

    __slots__ = ("_bytes_max", "_hides_tokens", "_parts", "_size", "is_overfull", "later_tokens")

    def __init__(self, bytes_max: int, *, hides_tokens: bool = True) -> None:
        """Without `hides_tokens` the client gets the token comments."""
        self._bytes_max, self._hides_tokens = bytes_max, hides_tokens
        self._parts: list[tuple[bytes, bool]] = []
        self._size = 0
        self.is_overfull = False
        self.later_tokens = 0
        """Tokens in comments, without those of the first call of `add`."""

    def add(self, data: bytes, *, framed: bool) -> bytes:
        """Keep the next bytes; return what the client gets of them. `framed`: both are complete HTTP chunks."""
        is_first = not self._size
        self._size += len(data)
        if self._size <= self._bytes_max:
            self._parts.append((data, framed))
        elif not self.is_overfull:
            self.is_overfull = True
            self._parts.clear()
        if COMMENT not in data:
            return data
        events, tokens = without_tokens(payload_of(data) if framed else data)
        if not is_first:
            self.later_tokens += tokens
        if not self._hides_tokens:
            return data
        return chunk(events) if framed and events else events

    def events(self) -> bytes:
        """Return the kept events."""
        payload, reader = bytearray(), ChunkReader()
        for data, framed in self._parts:
            if framed:
                reader.feed(data, payload)
            else:
                payload += data
        return bytes(payload)
