"""`POST /v1/embeddings` of a simulated worker (`engine.embeddings`): unit vectors that depend only on the token ids.

    input              texts     each is
    ----------------   -------   -------------------------------
    "a"                1         tokenized
    ["a", "b"]         2         tokenized
    [1, 2]             1         these token ids
    [[1, 2], [3]]      2         these token ids

    invalid body, texts or lengths    400, the field, found, allowed; 413 beyond a bound
    another model                     404

Equal ids have equal vectors, different ids different ones; vectors have no semantic meaning. There are at most
`INPUTS_MAX` texts, and `NUMBERS_MAX` numbers in all vectors together. Texts are tokenized and vectors computed on a
thread, because the work grows with the body.
Source of the shapes: the OpenAI API reference, "Create embeddings".
"""

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Literal, cast

import msgspec
from aiohttp import web
from blake3 import blake3

from kv_protocol.body_limits import Bytes
from kv_protocol.errors import UNDECODABLE
from kv_protocol.hashing import pack_tokens, unpack_tokens
from kv_protocol.ids import TokenId
from kv_protocol.openai.errors import RequestInvalid, explained
from kv_protocol.openai.option_table import NvExt, Priority
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Text
from worker_agent.api.bodies import RequestBodies, no_such_model, refusal
from worker_agent.api.in_flight import HandledRequest

DIMENSIONS = 256
"""Dimensions of a vector, unless the request names another number."""
DIMENSIONS_MAX = 4096
INPUTS_MAX = 2048
NUMBERS_MAX = 1 << 20


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`."""

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
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


class Embeddings:
    """The endpoint of one worker. `names` are values of `model`; a text has `tokens_max` tokens at most."""

    def __init__(self, text: Text, bodies: RequestBodies, *, names: Sequence[str], tokens_max: int) -> None:
        self._text, self._bodies, self._names, self._tokens_max = text, bodies, tuple(names), tokens_max

    async def embed(self, http: web.Request) -> HandledRequest:
        """Return the answer, and the request's outcome."""
        try:
            request = (await self._bodies.read(http, _decoded)).request
            if request.model not in self._names:
                return no_such_model(request.model, self._names), "refused"
            body = await asyncio.to_thread(self._answer, request)
        except (RequestInvalid, TextError) as error:
            return refusal(error), "refused"
        return web.Response(body=body, content_type="application/json"), "ok"

    def _answer(self, request: EmbeddingsRequest) -> bytes:
        texts: Sequence[str | list[int]] = request.texts()
        every = [self._ids(request, at, each) for at, each in enumerate(texts)]
        for at, ids in enumerate(every):
            if len(ids) > self._tokens_max:
                raise RequestInvalid(f"input[{at}]", f"{len(ids)} tokens", f"at most {self._tokens_max} tokens")
        data = [
            {"object": "embedding", "index": at, "embedding": _embedding(ids, request)} for at, ids in enumerate(every)
        ]
        tokens = sum(map(len, every))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": request.model, "usage": usage})

    def _ids(self, request: EmbeddingsRequest, at: int, text: str | list[int]) -> Sequence[int]:
        if not isinstance(text, str):
            return text
        try:
            return unpack_tokens(self._text.pack(text, add_special_tokens=request.add_special_tokens is not False))
        except TextError as error:
            raise TextError(f"input[{at}]", error.found, error.allowed) from error


def _decoded(body: Bytes) -> EmbeddingsRequest:
    try:
        return _decoder.decode(body)
    except UNDECODABLE as error:
        raise explained(error, body, EmbeddingsRequest) from error


def _embedding(token_ids: Sequence[int], request: EmbeddingsRequest) -> str | tuple[float, ...]:
    """Return the vector of length 1 of these ids, of f32s: as numbers, or as base64 of their little-endian bytes."""
    count = request.dimensions or DIMENSIONS
    drawn = struct.unpack(f"<{count}i", blake3(pack_tokens(token_ids)).digest(length=4 * count))
    length = math.hypot(*(number + 0.5 for number in drawn))  # none is 0
    vector = struct.pack(f"<{count}f", *((number + 0.5) / length for number in drawn))
    if request.encoding_format == "base64":
        return base64.b64encode(vector).decode()
    return struct.unpack(f"<{count}f", vector)
