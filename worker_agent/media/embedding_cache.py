"""LRU cache of computed embeddings, by the digest of their media, bounded in bytes.

    get     makes a found value the most recently used one
    put     evicts the least recently used values until the new one fits; a value above the bound is not kept
    bound   the bytes of all values; 0 keeps nothing

Embeddings depend only on the media, the model and its options: a cache serves one model with one set of options.
"""

from collections import OrderedDict

import msgspec


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a cache, and its counts since start."""

    entries: int
    size_bytes: int
    hits_total: int
    misses_total: int
    evictions_total: int
    oversize_total: int


class EmbeddingCache:
    """At most `bytes_max` bytes of embeddings."""

    def __init__(self, bytes_max: int) -> None:
        assert bytes_max >= 0
        self._bytes_max = bytes_max
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._size_bytes = self._hits = self._misses = self._evictions = self._oversize = 0

    def get(self, digest: str) -> bytes | None:
        """Return the embeddings of the media with `digest`, if they are cached."""
        value = self._values.get(digest)
        if value is None:
            self._misses += 1
            return None
        self._hits += 1
        self._values.move_to_end(digest)
        return value

    def put(self, digest: str, value: bytes) -> None:
        """Cache `value`, in place of an older one of the same media."""
        self._size_bytes -= len(self._values.pop(digest, b""))
        if len(value) > self._bytes_max:
            self._oversize += 1
            return
        while self._size_bytes + len(value) > self._bytes_max:
            _, oldest = self._values.popitem(last=False)
            self._size_bytes -= len(oldest)
            self._evictions += 1
        self._values[digest] = value
        self._size_bytes += len(value)

    def statistics(self) -> CacheStatistics:
        """Return the counters."""
        return CacheStatistics(
            entries=len(self._values),
            size_bytes=self._size_bytes,
            hits_total=self._hits,
            misses_total=self._misses,
            evictions_total=self._evictions,
            oversize_total=self._oversize,
        )
