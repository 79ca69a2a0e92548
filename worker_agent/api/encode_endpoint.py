"""The encode worker's one endpoint, `POST /v1/encode` (`encode_wire.py`).

    200    encoded
    400    unreadable, or refused; for media `code` is the reason, `param` the field in the client's request
    404    another model
    503    too many requests, or the offers' memory is full (`Retry-After`); or the engine has stopped

Embeddings are cached by digest: repeated media are not encoded again. Handles are not cached: each is valid for one
worker. An item that comes as embeddings, a `.safetensors` file, is checked and passed on.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from kv_runtime.http.answers import error_response
from worker_agent.api.bodies import engine_refusal, no_such_model
from worker_agent.api.in_flight import HandledRequest, InFlight
from worker_agent.media.embedding_transfer import EmbeddingCache, EmbeddingTransfer, NoRoom
from worker_agent.media.encode_wire import (
    PATH,
    EmbeddingDescriptor,
    EncodeAnswer,
    EncodeRequest,
    EncodeUnreadable,
    decoded,
)
from worker_agent.media.image_models import ImageFacts
from worker_agent.media.inputs import of_kind
from worker_agent.media.loader import MediaLoader
from worker_agent.media.parts import media_part
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.handoff import Handoff, handoff_json
from worker_agent.port.types import EngineError, Media


class ImageEncoder(Protocol):
    """An engine that encodes images; `text` has one placeholder for each."""

    async def encode(self, text: str, media: Sequence[Media]) -> Handoff:
        """Return handles, and the media's digests as hashes; raise `RequestRefused`, `EngineStopped`."""

    async def embeddings(self, text: str, media: Sequence[Media]) -> tuple[bytes, ...]:
        """Return a `.safetensors` file for each, likewise."""


class EncodeApi:
    """The endpoint of one encode worker."""

    def __init__(
        self,
        encoder: ImageEncoder,
        loader: MediaLoader,
        facts: ImageFacts,
        transfer: EmbeddingTransfer[Any, Any],
        cache: EmbeddingCache,
        *,
        served_names: tuple[str, ...],
        inflight_requests_max: int,
    ) -> None:
        self._encoder, self._loader, self._facts = encoder, loader, facts
        self._transfer, self._cache = transfer, cache
        self._served_names = served_names
        self.in_flight = InFlight(inflight_requests_max)

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoint, for the worker's application, whose token and body limit apply."""
        return [web.post(PATH, self.in_flight.serving(self._answered))]

    async def _answered(self, http: web.Request) -> HandledRequest:
        try:
            request = decoded(await http.read(), EncodeRequest)
            if request.model not in self._served_names:
                return no_such_model(request.model, self._served_names), "refused"
            answer = await self._encoded(request)
        except MediaRefused as error:
            self._loader.refused_total[error.reason] += 1
            message, kind = str(error), "invalid_request_error"
            return error_response(400, message, kind, param=error.field, code=error.reason), "refused"
        except EncodeUnreadable as error:
            return error_response(400, str(error), "invalid_request_error"), "refused"
        except NoRoom as error:
            response = error_response(503, str(error), "server_error", code="overloaded")
            response.headers["Retry-After"] = "1"
            return response, "refused"
        except EngineError as error:
            return engine_refusal(error)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json"), "ok"

    async def _encoded(self, request: EncodeRequest) -> EncodeAnswer:
        parts = [media_part(each.field, each.url, self._loader.rules) for each in request.media]
        places = request.prompt.count(self._facts.placeholder)
        if places != len(parts):
            raise MediaRefused("placeholder", "prompt", f"{places} placeholders", f"{len(parts)}, one an item")
        media = await self._loader.load(parts)
        digests = tuple(each.digest for each in media)
        if request.form == "embeddings":
            return EncodeAnswer(digests=digests, embeddings=await self._offered(await self._embeddings(media)))
        files = of_kind(media, "embeddings")
        if files:
            raise MediaRefused("part_kind", files[0].field, "embeddings", "images, where handles are asked for")
        handoff = await self._encoder.encode(request.prompt, media)
        return EncodeAnswer(digests=digests, disaggregated_params=msgspec.Raw(handoff_json(handoff)))

    async def _embeddings(self, media: Sequence[Media]) -> list[bytes]:
        """Return a file for each item, in their order; a repeated image is encoded once."""
        known = {each.digest: each.data for each in of_kind(media, "embeddings")}
        images = {each.digest: each for each in of_kind(media, "image")}
        cached = {digest: self._cache.get(digest) for digest in images}
        known |= {digest: data for digest, data in cached.items() if data is not None}
        missing = [each for digest, each in images.items() if digest not in known]
        if missing:
            files = await self._encoder.embeddings(self._facts.placeholder * len(missing), missing)
            for image, data in zip(missing, files, strict=True):
                known[image.digest] = data
                self._cache.put(image.digest, data)
        return [known[each.digest] for each in media]

    async def _offered(self, files: Sequence[bytes]) -> tuple[EmbeddingDescriptor, ...]:
        """Offer all files and return their descriptors; if one does not fit, none is offered."""
        offered: list[EmbeddingDescriptor] = []
        try:
            for data in files:
                offered.append(await self._transfer.offer(data))  # noqa: PERF401 - what was offered must be known
        except BaseException:
            for descriptor in offered:
                await self._transfer.release(descriptor)
            raise
        return tuple(offered)
