"""The endpoint `POST /v1/encode`, which only encode workers have (`media/encode_client.py`).

    200    the media were encoded
    400    the request is unreadable or refused; if its media are refused, `code` is the reason, and `param` the item's
           field in the client's request, or `prompt`
    404    the request names another model
    500    the engine failed the request
    503    there are too many requests (`Retry-After`), or the engine has stopped

The endpoint caches embeddings by the digest of their image, and does not encode an image again while its embeddings
are cached. It does not cache handles, because each can be used only once.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from kv_protocol.errors import UNDECODABLE
from kv_runtime.http.answers import error_response
from worker_agent.api.bodies import engine_refusal, no_such_model
from worker_agent.api.in_flight import HandledRequest, InFlight
from worker_agent.media.encode_client import PATH, EncodeAnswer, EncodeRequest
from worker_agent.media.image_models import ImageFacts
from worker_agent.media.loader import MediaLoader
from worker_agent.media.parts import MediaPart
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.handoff import Handoff, handoff_json
from worker_agent.port.types import EngineError, Media


class ImageEncoder(Protocol):
    """An engine that encodes images; `text` has one placeholder for each."""

    async def encode(self, text: str, media: Sequence[Media]) -> Handoff:
        """Return handles, and the media's digests as hashes; raise `RequestRefused`, `EngineStopped`."""

    async def embeddings(self, text: str, media: Sequence[Media]) -> tuple[bytes, ...]:
        """Return a `.safetensors` file for each item; raise the same errors."""


class EmbeddingCache:
    """The embeddings of the media that were used last, `bytes_max` bytes at most.

    All embeddings in one cache are of one model with one set of options. A value above the bound is not kept. Lookups
    are counted since the start.
    """

    def __init__(self, bytes_max: int) -> None:
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


class EncodeApi:
    """The endpoint of one encode worker."""

    def __init__(
        self,
        encoder: ImageEncoder,
        loader: MediaLoader,
        facts: ImageFacts,
        *,
        cache_bytes_max: int,
        served_names: tuple[str, ...],
        inflight_requests_max: int,
    ) -> None:
        self._encoder, self._loader, self._facts = encoder, loader, facts
        self.cache, self._served_names = EmbeddingCache(cache_bytes_max), served_names
        self.in_flight = InFlight(inflight_requests_max)

    def routes(self) -> list[web.RouteDef]:
        """Return the endpoint's route. The worker's application, to which it is added, checks token and body size."""
        return [web.post(PATH, self.in_flight.serving(self._answered))]

    async def _answered(self, http: web.Request) -> HandledRequest:
        try:
            request = msgspec.json.decode(await http.read(), type=EncodeRequest)
        except UNDECODABLE as error:
            return error_response(400, str(error)), "refused"
        if request.model not in self._served_names:
            return no_such_model(request.model, self._served_names), "refused"
        try:
            answer = await self._encoded(request)
        except MediaRefused as error:
            self._loader.refused_total[error.reason] += 1
            return error_response(400, str(error), param=error.field, code=error.reason), "refused"
        except EngineError as error:
            return engine_refusal(error)
        if request.form == "embeddings":
            return web.Response(body=msgspec.msgpack.encode(answer), content_type="application/msgpack"), "ok"
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json"), "ok"

    async def _encoded(self, request: EncodeRequest) -> EncodeAnswer:
        parts = [MediaPart(field=each.field, url=each.url) for each in request.media]
        places = request.prompt.count(self._facts.placeholder)
        if places != len(parts):
            raise MediaRefused("placeholder", "prompt", f"{places} placeholders", f"{len(parts)}, one an item")
        media = await self._loader.load(parts)
        digests = tuple(each.digest for each in media)
        if request.form == "embeddings":
            return EncodeAnswer(digests=digests, embeddings=await self._embeddings(media))
        handoff = await self._encoder.encode(request.prompt, media)
        return EncodeAnswer(digests=digests, disaggregated_params=msgspec.Raw(handoff_json(handoff)))

    async def _embeddings(self, media: Sequence[Media]) -> tuple[bytes, ...]:
        """Return a file for each item, in their order; a repeated image is encoded once."""
        images = {each.digest: each for each in media}
        cached = {digest: self.cache.get(digest) for digest in images}
        known = {digest: data for digest, data in cached.items() if data is not None}
        missing = [each for digest, each in images.items() if digest not in known]
        if missing:
            files = await self._encoder.embeddings(self._facts.placeholder * len(missing), missing)
            for image, data in zip(missing, files, strict=True):
                known[image.digest] = data
                self.cache.put(image.digest, data)
        return tuple(known[each.digest] for each in media)
