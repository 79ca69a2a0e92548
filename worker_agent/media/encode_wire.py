"""The request and the answer of an encode worker: `POST /v1/encode`, JSON.

    form          the answer has                                              usable by
    handles       `disaggregated_params`: the engine's handles, and a hash    a worker of the same machine, or wherever
                  of eight ints for each item, which is our digest            the engine can open them; once
    embeddings    `embeddings`: a descriptor for each item, of a              any worker that can fetch them
                  `.safetensors` file of one tensor                           (`embedding_transfer.py`); once

Media have the client's URLs: the encode worker loads them, by its own rules. `prompt` is the complete prompt, because
some models' handles depend on it; it has one placeholder for each item. `digests` are the media's, in their order.

A descriptor comes over the network and may have any content: the fetching worker bounds and checks all of it first. A
process with a descriptor can read the embeddings: its token, agent and memory address are not shown or logged.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai.parts import ABSENT

PATH = "/v1/encode"
MEDIA_MAX = 256
Form = Literal["handles", "embeddings"]
AGENT_BYTES_MAX = 64 << 10
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Token = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{43}\Z")]


class _Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="over"):
    """The token that fetches the embeddings once, their BLAKE3 and their number of bytes."""

    token: _Token
    digest: _Digest
    size_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]

    @property
    def shown(self) -> str:
        """What an error says of it."""
        return f"{self.size_bytes} bytes"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown}, {self.digest})"


class HttpDescriptor(_Descriptor, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="http"):
    """Embeddings that wait at an address and a port."""

    host: Annotated[str, Meta(min_length=2, max_length=45)]
    port: Annotated[int, Meta(ge=1, le=65535)]

    @property
    def shown(self) -> str:
        """What an error says of it."""
        return f"{self.host}:{self.port}, {self.size_bytes} bytes"


class NixlDescriptor(_Descriptor, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="nixl"):
    """Embeddings at an address of a process's memory; `agent` is the NIXL metadata of that process."""

    agent: Annotated[bytes, Meta(min_length=1, max_length=AGENT_BYTES_MAX)]
    address: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


EmbeddingDescriptor = HttpDescriptor | NixlDescriptor


class EncodeMedia(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item: its field in the client's request, and its URL."""

    field: Annotated[str, Meta(min_length=1, max_length=256)]
    url: Annotated[str, Meta(min_length=1)]


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt's media."""

    model: str
    form: Form
    prompt: Annotated[str, Meta(min_length=1)]
    media: Annotated[tuple[EncodeMedia, ...], Meta(min_length=1, max_length=MEDIA_MAX)]


class EncodeAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The encoded media, in one of the forms."""

    digests: Annotated[tuple[_Digest, ...], Meta(min_length=1, max_length=MEDIA_MAX)]
    disaggregated_params: msgspec.Raw = ABSENT
    embeddings: Annotated[tuple[EmbeddingDescriptor, ...], Meta(max_length=MEDIA_MAX)] | None = None


class EncodeUnreadable(Exception):
    """Bytes that are not a valid request or answer; the message is the reason."""


Message = TypeVar("Message", EncodeRequest, EncodeAnswer)


def decoded(data: bytes, kind: type[Message]) -> Message:
    """Return the request or the answer; raise `EncodeUnreadable`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except UNDECODABLE as error:
        raise EncodeUnreadable(str(error)) from error
