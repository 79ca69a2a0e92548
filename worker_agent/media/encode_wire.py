"""The request and the answer of an encode worker: `POST /v1/encode`, JSON.

    form          the answer has                                              good for
    handles       `disaggregated_params`: the engine's handles, and a hash    a worker of the same machine, or wherever
                  of eight ints for each item, which is our digest            the engine can open them; once
    embeddings    `embeddings`: a descriptor for each item, of a              any worker that can fetch them
                  `.safetensors` file of one tensor                           (`media/transfer.py`); once

Media are named as clients name them: the encode worker loads them, by its own rules. `prompt` is the whole prompt, for
some models' handles depend on it; its placeholders are as many as the media. `digests` are the media's, in their order.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kv_protocol.errors import UNDECODABLE
from kv_protocol.openai_parts import ABSENT
from worker_agent.media.transfer import EmbeddingDescriptor

PATH = "/v1/encode"
MEDIA_MAX = 256
Form = Literal["handles", "embeddings"]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class EncodeMedia(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item: where its client's request names it, and how."""

    field: Annotated[str, Meta(min_length=1, max_length=256)]
    url: Annotated[str, Meta(min_length=1)]


class EncodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt's media."""

    model: str
    form: Form
    prompt: Annotated[str, Meta(min_length=1)]
    media: Annotated[tuple[EncodeMedia, ...], Meta(min_length=1, max_length=MEDIA_MAX)]


class EncodeAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What became of them, in one of the forms."""

    digests: Annotated[tuple[_Digest, ...], Meta(min_length=1, max_length=MEDIA_MAX)]
    disaggregated_params: msgspec.Raw = ABSENT
    embeddings: Annotated[tuple[EmbeddingDescriptor, ...], Meta(max_length=MEDIA_MAX)] | None = None


class EncodeUnreadable(Exception):
    """Bytes that are no question, or no answer; the message says why."""


_request_decoder = msgspec.json.Decoder(EncodeRequest)
_answer_decoder = msgspec.json.Decoder(EncodeAnswer)


def read_request(data: bytes) -> EncodeRequest:
    """Return the question; raise `EncodeUnreadable`."""
    try:
        return _request_decoder.decode(data)
    except UNDECODABLE as error:
        raise EncodeUnreadable(str(error)) from error


def read_answer(data: bytes) -> EncodeAnswer:
    """Return the answer; raise `EncodeUnreadable`."""
    try:
        return _answer_decoder.decode(data)
    except UNDECODABLE as error:
        raise EncodeUnreadable(str(error)) from error
