"""The interface of transfers of embeddings from the worker that encoded them to the one that needs them.

    http    `http_transfer.py`: everywhere
    nixl    `nixl_transfer.py`: if the package `nixl` is installed at both ends

    offer     the encoding worker keeps them, and returns a descriptor, which travels with the request
    fetch     the other worker gets them by the descriptor, once, and checks their digest
    release   the encoding worker frees them once it learns that no fetch will come; otherwise they expire

A descriptor comes over the network and may have any content: the fetching worker bounds and checks all of it first. A
process with a descriptor can read the embeddings: its token, agent and memory address are not shown or logged.
"""

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

AGENT_BYTES_MAX = 64 << 10
STORE_BYTES_MAX = 1 << 30
"""Embeddings that wait to be fetched, and of one that is: those of a hundred large images."""
FETCH_S = 10.0
"""How long a fetch may take: a GiB takes 1.1 s at 1 GB/s; the rest is for slower networks."""
_DIGEST = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_TOKEN = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{43}\Z")]


class _Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="over"):
    """The token that fetches the embeddings once, their BLAKE3 and their number of bytes."""

    token: _TOKEN
    digest: _DIGEST
    size_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]


class HttpDescriptor(_Descriptor, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="http"):
    """Embeddings that wait at an address and a port."""

    host: Annotated[str, Meta(min_length=2, max_length=45)]
    port: Annotated[int, Meta(ge=1, le=65535)]

    def __repr__(self) -> str:
        return f"HttpDescriptor({self.host}:{self.port}, {self.size_bytes} bytes, {self.digest})"


class NixlDescriptor(_Descriptor, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="nixl"):
    """Embeddings at an address of a process's memory; `agent` is the NIXL metadata of that process."""

    agent: Annotated[bytes, Meta(min_length=1, max_length=AGENT_BYTES_MAX)]
    address: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]

    def __repr__(self) -> str:
        return f"NixlDescriptor({self.size_bytes} bytes, {self.digest})"


EmbeddingDescriptor = HttpDescriptor | NixlDescriptor


class EmbeddingTransfer(Protocol):
    """Transfers embeddings from worker to worker."""

    async def offer(self, embeddings: bytes) -> EmbeddingDescriptor:
        """Offer `embeddings`, 1 byte or more, under the returned descriptor; raise `NoRoom` if they do not fit."""

    async def fetch(self, descriptor: EmbeddingDescriptor) -> bytes:
        """Return the offered bytes; raise `MediaRefused` if they are gone or differ, or the address is not allowed."""

    async def release(self, descriptor: EmbeddingDescriptor) -> None:
        """End this worker's offer of `descriptor`."""
