"""Embeddings on their way from the worker that encoded them to the one that needs them, and a cache of them.

    http    `http_transfer.py`: everywhere
    nixl    `nixl_transfer.py`: if the package `nixl` is installed at both ends

The cache is by the digest of the media, and bounded in bytes: 0 keeps nothing. Embeddings depend only on the media, the
model and its options: a cache serves one model with one set of options.

    get        makes a found value the most recently used one
    put        evicts the least recently used values until the new one fits; a value above the bound is not kept

An offer is fetched once, in a bounded time, within a bound of memory:

    offer      kept if it fits; otherwise refused: evicting another offer would fail that one's request
    take       by its token: returned and removed; a second time, or too late, there is nothing
    release    by its token: removed, once the encoding worker learns that no fetch will come
    expire     removes the offers that were not fetched in time, which count until then

`take`, `release` and `expire` return the removed data: the caller may have to free more than memory. Tokens are looked
up by their BLAKE3, so that the time of a look-up reveals nothing about them.
"""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence, Sized
from typing import Generic, NamedTuple, TypeVar

from blake3 import blake3

from kv_runtime.clock import Clock
from worker_agent.media.encode_wire import EmbeddingDescriptor, HttpDescriptor, NixlDescriptor
from worker_agent.media.parts import content_digest
from worker_agent.media.refusals import MediaReason, MediaRefused

STORE_BYTES_MAX = 1 << 30
"""Embeddings that wait to be fetched, and of one that is: those of a hundred large images."""
FETCH_S = 10.0
"""How long a fetch may take: a GiB takes 1.1 s at 1 GB/s; the rest is for slower networks."""
_FIELD = "embeddings"


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


OFFERS_MAX = 4096
"""Most offers, however small they are."""


class NoRoom(Exception):
    """The offer does not fit beside the waiting ones; the message has what they take, and the bounds."""

    def __init__(self, size_bytes: int, held_bytes: int, bytes_max: int, offers: int) -> None:
        super().__init__(
            f"embeddings: found {size_bytes} bytes beside {held_bytes} in {offers} offers, allowed {bytes_max} in"
            f" {OFFERS_MAX}"
        )


Data = TypeVar("Data", bound=Sized)

TTL_S = 60.0
"""How long embeddings wait to be fetched: the prompt that needs them is routed by then, or given up."""


class _Offer(NamedTuple, Generic[Data]):
    data: Data
    until_s: float


class Offers(Generic[Data]):
    """At most `bytes_max` bytes of waiting offers, each for `ttl_s` seconds; `..._total` count since the start."""

    def __init__(self, bytes_max: int, ttl_s: float = TTL_S) -> None:
        self._bytes_max, self._ttl_s = bytes_max, ttl_s
        self._waiting: dict[bytes, _Offer[Data]] = {}  # oldest first: all have the same time to live
        self.size_bytes = 0
        self.taken_total = self.released_total = self.expired_total = self.refused_total = 0

    def __len__(self) -> int:
        """How many offers wait."""
        return len(self._waiting)

    def offer(self, token: str, data: Data, now_s: float) -> None:
        """Keep `data` under `token`, which must be new. Raise `NoRoom`; call `expire` before."""
        key = _key(token)
        assert key not in self._waiting
        if self.size_bytes + len(data) > self._bytes_max or len(self._waiting) >= OFFERS_MAX:
            self.refused_total += 1
            raise NoRoom(len(data), self.size_bytes, self._bytes_max, len(self._waiting))
        self._waiting[key] = _Offer(data, now_s + self._ttl_s)
        self.size_bytes += len(data)

    def take(self, token: str, now_s: float) -> Data | None:
        """Remove and return the data of `token`; None if there is none, or its time is over."""
        key = _key(token)
        offer = self._waiting.get(key)
        if offer is None or offer.until_s <= now_s:
            return None
        self.taken_total += 1
        return self._remove(key)

    def release(self, token: str) -> Data | None:
        """Remove and return the data waiting under `token`, if any."""
        data = self._remove(_key(token))
        self.released_total += data is not None
        return data

    def expire(self, now_s: float) -> list[Data]:
        """Remove and return the expired data."""
        expired: list[Data] = []
        while self._waiting:
            key, offer = next(iter(self._waiting.items()))
            if offer.until_s > now_s:
                break
            self._remove(key)
            expired.append(offer.data)
        self.expired_total += len(expired)
        return expired

    def _remove(self, key: bytes) -> Data | None:
        offer = self._waiting.pop(key, None)
        if offer is None:
            return None
        self.size_bytes -= len(offer.data)
        return offer.data


def _key(token: str) -> bytes:
    return blake3(token.encode("utf-8", "surrogateescape")).digest()


Descriptor = TypeVar("Descriptor", HttpDescriptor, NixlDescriptor)


class EmbeddingTransfer(ABC, Generic[Data, Descriptor]):
    """Transfers embeddings from worker to worker. It reads descriptors of one `kind`; `wrong_kind` says which."""

    kind: type[Descriptor]
    wrong_kind: str

    def __init__(self, clock: Clock, *, fetch_s: float = FETCH_S, store_bytes_max: int = STORE_BYTES_MAX) -> None:
        self._clock, self._fetch_s, self._store_bytes_max = clock, fetch_s, store_bytes_max
        self.offers: Offers[Data] = Offers(store_bytes_max)

    @abstractmethod
    async def offer(self, embeddings: bytes) -> Descriptor:
        """Offer `embeddings`, 1 byte or more, which must not change, for `TTL_S` seconds; raise `NoRoom`."""

    @abstractmethod
    async def _read(self, descriptor: Descriptor) -> bytes:
        """Return the bytes that are found, which may be others; raise `MediaRefused`."""

    async def _let_go(self, removed: Sequence[Data]) -> None:
        """Free offers that were removed, if they have more than memory."""

    async def release(self, descriptor: EmbeddingDescriptor) -> None:
        """End this worker's offer of `descriptor`."""
        await self._end_offer(descriptor.token)

    async def _end_offer(self, token: str) -> None:
        data = self.offers.release(token)
        await self._let_go([] if data is None else [data])

    async def fetch(self, descriptor: EmbeddingDescriptor) -> bytes:
        """Return the offered bytes; raise `MediaRefused` if they are gone or differ, or may not be fetched."""
        if not isinstance(descriptor, self.kind):
            raise MediaRefused("unreachable", _FIELD, repr(descriptor), self.wrong_kind)
        if descriptor.size_bytes > self._store_bytes_max:
            raise refused("too_large", descriptor, f"at most {self._store_bytes_max} bytes")
        try:
            async with asyncio.timeout(self._fetch_s):
                data = await self._read(descriptor)
        except TimeoutError as error:
            raise refused("timeout", descriptor, f"a whole answer within {self._fetch_s} s") from error
        if not secrets.compare_digest(await asyncio.to_thread(content_digest, data), descriptor.digest):
            raise refused("digest", descriptor, "the bytes that were offered")
        return data


def refused(reason: MediaReason, descriptor: EmbeddingDescriptor, allowed: str) -> MediaRefused:
    """Return the refusal of the embeddings of `descriptor`, of which it shows no secret."""
    return MediaRefused(reason, _FIELD, descriptor.shown, allowed)


def new_token() -> str:
    """Return a token of 256 random bits for an offer."""
    return secrets.token_urlsafe(32)
