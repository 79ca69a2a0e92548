"""LRU cache of computed embeddings, by the digest of their media, bounded in bytes.

    get     makes a found value the most recently used one
    put     evicts the least recently used values until the new one fits; a value above the bound is not kept
    bound   the bytes of all values; 0 keeps nothing

Embeddings depend only on the media, the model and its options: a cache serves one model with one set of options.
"""

from collections import OrderedDict


class EmbeddingCache:
    """At most `bytes_max` bytes of embeddings; lookups are counted since the start."""

    def __init__(self, bytes_max: int) -> None:
        assert bytes_max >= 0
        self._bytes_max = bytes_max
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self.size_bytes = self.hits_total = self.misses_total = 0

    def get(self, digest: str) -> bytes | None:
        """Return the embeddings of the media with `digest`, if they are cached."""
        value = self._values.get(digest)
        if value is None:
            self.misses_total += 1
            return None
        self.hits_total += 1
        self._values.move_to_end(digest)
        return value

    def put(self, digest: str, value: bytes) -> None:
        """Cache `value`, in place of an older one of the same media."""
        self.size_bytes -= len(self._values.pop(digest, b""))
        if len(value) > self._bytes_max:
            return
        while self.size_bytes + len(value) > self._bytes_max:
            _, oldest = self._values.popitem(last=False)
            self.size_bytes -= len(oldest)
        self._values[digest] = value
        self.size_bytes += len(value)
