"""Simulated embeddings for `/v1/embeddings`: unit vectors that depend only on the token ids.

    input              texts     each is
    ----------------   -------   -------------------------------
    "a"                1         tokenized
    ["a", "b"]         2         tokenized
    [1, 2]             1         these token ids
    [[1, 2], [3]]      2         these token ids

Equal ids have equal vectors, different ids different ones; vectors have no semantic meaning. There are at most
`INPUTS_MAX` texts, and `NUMBERS_MAX` numbers in all vectors together.
Source of the shapes: the OpenAI API reference, "Create embeddings".
"""

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias, cast

import msgspec
from blake3 import blake3

from kv_protocol.body_limits import Bytes
from kv_protocol.errors import UNDECODABLE
from kv_protocol.hashing import pack_tokens
from kv_protocol.ids import TokenId
from kv_protocol.openai.errors import RequestInvalid, explained
from kv_protocol.openai.option_table import NvExt, Priority

DIMENSIONS = 256
"""Dimensions of a vector, unless the request names another number."""
DIMENSIONS_MAX = 4096
INPUTS_MAX = 2048
NUMBERS_MAX = 1 << 20

Vector: TypeAlias = "array[float]"
"""Of f32s."""
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)]


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    add_special_tokens: bool | None = None
    user: str | None = None
    priority: Priority | None = None
    nvext: NvExt | None = None

    def texts(self) -> list[str] | list[list[int]]:
        """Return the texts, or the token ids of each; raise `RequestInvalid`, which names the field."""
        given = self.input if isinstance(self.input, list) else [self.input]
        kinds = list(map(type, given))
        if other := next((at for at, kind in enumerate(kinds) if kind is not kinds[0]), 0):
            raise RequestInvalid(f"input[{other}]", given[other], "the same as the first: text, token id, or token ids")
        inputs = cast("list[str] | list[list[int]]", [given] if kinds[:1] in ([], [int]) else given)
        count, numbers = len(inputs), len(inputs) * (self.dimensions or DIMENSIONS)
        if not 1 <= count <= INPUTS_MAX:
            raise RequestInvalid("input", f"{count} texts", f"1..{INPUTS_MAX}")
        if numbers > NUMBERS_MAX:
            raise RequestInvalid("input", f"{numbers} numbers in the answer", f"at most {NUMBERS_MAX}")
        for at, each in enumerate(inputs):
            if not each:
                raise RequestInvalid(f"input[{at}]", each, "at least one token")
        return inputs


_decoder = msgspec.json.Decoder(EmbeddingsRequest)


def decode_embeddings(body: Bytes) -> EmbeddingsRequest:
    """Return the request in `body`; raise `RequestInvalid`, which names the field."""
    try:
        return _decoder.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, EmbeddingsRequest) from error


def unit_vector(token_ids: Sequence[int], dimensions: int) -> Vector:
    """Return the vector of length 1 of these ids."""
    drawn = array("i", blake3(pack_tokens(token_ids)).digest(length=4 * dimensions))
    if sys.byteorder == "big":
        drawn.byteswap()
    numbers = [number + 0.5 for number in drawn]  # never 0
    length = math.hypot(*numbers)
    return array("f", [number / length for number in numbers])


def embeddings_answer(request: EmbeddingsRequest, vectors: Sequence[Vector], tokens: int) -> bytes:
    """Return the body of the answer; `tokens` is the number of tokens of all texts."""
    encode = _base64 if request.encoding_format == "base64" else _numbers
    data = [{"object": "embedding", "index": at, "embedding": encode(vector)} for at, vector in enumerate(vectors)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": request.model, "usage": usage})


def _numbers(vector: Vector) -> list[float]:
    return list(vector)


def _base64(vector: Vector) -> str:
    """Return the numbers as base64 of little-endian f32s."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
