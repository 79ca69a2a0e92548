"""Embeddings that wait to be fetched by another worker: each once, for a while, within a bound.

    offer      kept, while there is room; without room it is refused: one that went instead would fail its request
    take       by its token: it is given, and gone; a second time, or too late, there is nothing
    release    by its token: gone
    expire     those that nobody fetched in time are gone

Tokens are looked up by their BLAKE3, so that how long a look-up takes tells nothing of them.
"""

import msgspec
from blake3 import blake3

OFFERS_MAX = 4096
"""However small they are."""


class NoRoom(Exception):
    """The offers that wait leave no room for this one; the message says how much there is."""

    def __init__(self, size_bytes: int, held_bytes: int, bytes_max: int) -> None:
        super().__init__(
            f"embeddings: found {size_bytes} bytes beside {held_bytes}, allowed {bytes_max} in {OFFERS_MAX}"
        )


class OfferStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What waits, and what became of offers since the start."""

    entries: int
    size_bytes: int
    offered_total: int
    taken_total: int
    released_total: int
    expired_total: int
    refused_total: int


class _Offer(msgspec.Struct, frozen=True):
    data: bytes
    until_s: float


class Offers:
    """At most `bytes_max` bytes that wait, each for `ttl_s` seconds."""

    def __init__(self, bytes_max: int, ttl_s: float) -> None:
        self._bytes_max, self._ttl_s = bytes_max, ttl_s
        self._waiting: dict[bytes, _Offer] = {}  # the oldest first: all wait equally long
        self._size_bytes = self._offered = self._taken = self._released = self._expired = self._refused = 0

    def offer(self, token: str, data: bytes, now_s: float) -> None:
        """Keep `data` for whoever has `token`, which must be new; raise `NoRoom`."""
        self.expire(now_s)
        key = _key(token)
        assert key not in self._waiting
        if self._size_bytes + len(data) > self._bytes_max or len(self._waiting) >= OFFERS_MAX:
            self._refused += 1
            raise NoRoom(len(data), self._size_bytes, self._bytes_max)
        self._waiting[key] = _Offer(data, now_s + self._ttl_s)
        self._size_bytes += len(data)
        self._offered += 1

    def take(self, token: str, now_s: float) -> bytes | None:
        """Return what was offered under `token` and is in time, for the first who asks."""
        self.expire(now_s)
        offer = self._remove(_key(token))
        if offer is None:
            return None
        self._taken += 1
        return offer.data

    def release(self, token: str) -> None:
        """Nothing waits under `token` any more."""
        self._released += self._remove(_key(token)) is not None

    def expire(self, now_s: float) -> None:
        """Nothing waits any more whose time is over."""
        while self._waiting:
            key = next(iter(self._waiting))
            if self._waiting[key].until_s > now_s:
                break
            self._remove(key)
            self._expired += 1

    def statistics(self) -> OfferStatistics:
        """Return the counters."""
        return OfferStatistics(
            entries=len(self._waiting),
            size_bytes=self._size_bytes,
            offered_total=self._offered,
            taken_total=self._taken,
            released_total=self._released,
            expired_total=self._expired,
            refused_total=self._refused,
        )

    def _remove(self, key: bytes) -> _Offer | None:
        offer = self._waiting.pop(key, None)
        if offer is not None:
            self._size_bytes -= len(offer.data)
        return offer


def _key(token: str) -> bytes:
    return blake3(token.encode("utf-8", "surrogateescape")).digest()
