"""The request and the answer of an encode worker: `POST /v1/encode`.

    form          the answer has                                            encoded as     usable by
    handles       `disaggregated_params`: the engine's handles, and a       JSON           a worker of the same machine,
                  hash of eight ints for each item, which is our digest                    or wherever the engine can
                                                                                           open them; once
    embeddings    `embeddings`: a `.safetensors` file of one tensor for     MessagePack    any worker
                  each item

The request is JSON. Media have the client's URLs: the encode worker loads them, by its own rules. `prompt` is the
complete prompt, because some models' handles depend on it; it has one placeholder for each item. `digests` are the
media's, in their order.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kv_protocol.openai.parts import ABSENT

PATH = "/v1/encode"
MEDIA_MAX = 256
Form = Literal["handles", "embeddings"]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


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
    embeddings: Annotated[tuple[bytes, ...], Meta(max_length=MEDIA_MAX)] = ()
