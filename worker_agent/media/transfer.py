"""How embeddings come from the worker that encoded them to the one that needs them: a port, whoever carries them.

    http    `http_transfer.py`: everywhere
    nixl    `nixl_transfer.py`: where the package `nixl` is installed, at both ends

    offer     who encoded keeps them, and gives a descriptor, which travels with the request
    fetch     who needs them gets them by it, once, and checks that they are the very bytes
    release   who offered and learns that nobody will come forgets them; else time does

A descriptor came over the network and may say anything: whoever fetches bounds and checks all of it first. It is as
good as a key to the embeddings: it is not shown and not logged.
"""

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

AGENT_BYTES_MAX = 64 << 10
_DIGEST = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_TOKEN = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{43}\Z")]


class _Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="over"):
    """What embeddings are: the token that gets them once, their BLAKE3 and their bytes."""

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
    """Embeddings that wait at an address of a process's memory; `agent` says in NIXL's words who that is."""

    agent: Annotated[bytes, Meta(min_length=1, max_length=AGENT_BYTES_MAX)]
    address: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]

    def __repr__(self) -> str:
        return f"NixlDescriptor({self.size_bytes} bytes, {self.digest})"


EmbeddingDescriptor = HttpDescriptor | NixlDescriptor


class EmbeddingTransfer(Protocol):
    """What carries embeddings from worker to worker."""

    async def offer(self, embeddings: bytes) -> EmbeddingDescriptor:
        """Keep `embeddings`, 1 byte or more, for whoever has the descriptor; raise `NoRoom` without room."""

    async def fetch(self, descriptor: EmbeddingDescriptor) -> bytes:
        """Return what was offered; raise `MediaRefused` when it is gone, other bytes, or may not be asked for."""

    async def release(self, descriptor: EmbeddingDescriptor) -> None:
        """What this one offered under `descriptor` waits no more."""
