"""`POST /v1/embeddings` of a simulated worker that is configured to serve it (`engine.embeddings`).

    invalid body, texts or lengths    400, the field, found, allowed; 413 beyond a bound
    another model                     404

Texts are tokenized and vectors computed on a thread, because the work grows with the body.
"""

import asyncio
from collections.abc import Sequence

from aiohttp import web

from kv_protocol.body_limits import BodyLimits
from kv_protocol.hashing import unpack_tokens
from kv_protocol.openai.errors import RequestInvalid
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Text
from worker_agent.api.bodies import DEFAULT_LIMITS, RequestBodies, no_such_model, refusal
from worker_agent.api.embeddings import (
    DIMENSIONS,
    EmbeddingsRequest,
    decode_embeddings,
    embeddings_answer,
    unit_vector,
)
from worker_agent.api.in_flight import HandledRequest


class Embeddings:
    """The endpoint of one worker. `names` are the valid values of a request's `model`."""

    def __init__(
        self, text: Text, *, names: Sequence[str], tokens_max: int, body_limits: BodyLimits = DEFAULT_LIMITS
    ) -> None:
        """A text may have `tokens_max` tokens."""
        self._text, self._names, self._tokens_max = text, tuple(names), tokens_max
        self._bodies = RequestBodies(body_limits)

    async def embed(self, http: web.Request) -> HandledRequest:
        """Return the answer, and the request's outcome."""
        try:
            request = (await self._bodies.read(http, decode_embeddings)).request
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
        vectors = [unit_vector(ids, request.dimensions or DIMENSIONS) for ids in every]
        return embeddings_answer(request, vectors, sum(map(len, every)))

    def _ids(self, request: EmbeddingsRequest, at: int, text: str | list[int]) -> Sequence[int]:
        if not isinstance(text, str):
            return text
        try:
            return unpack_tokens(self._text.pack(text, add_special_tokens=request.add_special_tokens is not False))
        except TextError as error:
            raise TextError(f"input[{at}]", error.found, error.allowed) from error
