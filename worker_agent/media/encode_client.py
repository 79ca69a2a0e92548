"""A client of encode workers: the `MediaEncoder` of chats (`chats.py`).

    answer                        result
    200, handles                  a handoff, whose hashes are the media's digests
    200, embeddings               media, fetched and checked like embeddings that a client brings
    400 with a reason             `MediaRefused` with that reason: the encode worker refuses the client's media
    503, none, or too late        another worker is asked; after `ATTEMPTS_MAX`, or all, `EncoderUnavailable`
    any other                     likewise: the error is not the client's

The answer is bounded while it is read. What a worker offered whose answer was not used expires.
"""

import asyncio
from collections.abc import Sequence
from typing import get_args

import aiohttp
import msgspec

from kv_runtime.http.answer_body import bounded_body
from worker_agent.media.chats import EncodedMedia
from worker_agent.media.encode_wire import (
    PATH,
    EncodeAnswer,
    EncodeMedia,
    EncodeRequest,
    EncodeUnreadable,
    Form,
    read_answer,
)
from worker_agent.media.encode_workers import EncodeWorkers
from worker_agent.media.parts import MediaPart, embeddings_media
from worker_agent.media.refusals import MEDIA_REASONS, MediaReason, MediaRefused
from worker_agent.media.transfer import EmbeddingDescriptor, EmbeddingTransfer
from worker_agent.port.handoff import HandoffInvalid, handoff_of_json
from worker_agent.port.types import EncoderUnavailable, Media

_ANSWER_BYTES_MAX = 8 << 20
_OK, _REFUSED = 200, 400
ANSWER_S = 30.0
"""How long an answer may take: an encode worker gives up loading its media earlier, and queues few requests."""
ATTEMPTS_MAX = 3
"""How many encode workers are asked for one prompt."""
_RETRY_S_MAX = 60


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    param: str | None = None
    code: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


class EncodeClient:
    """A client of encode workers; `close` it at the end."""

    def __init__(
        self,
        workers: EncodeWorkers,
        transfer: EmbeddingTransfer,
        *,
        model: str,
        form: Form,
        token: str,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.workers, self._transfer = workers, transfer
        self._model, self._form, self._answer_s = model, form, answer_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def encode(self, prompt: str, parts: Sequence[MediaPart]) -> EncodedMedia:
        """Return the encoded media; see `MediaEncoder`."""
        question = await asyncio.to_thread(self._question, prompt, parts)
        tried = set[str]()
        failure = EncoderUnavailable(f"no encode worker of {self._model} takes requests{self.workers.where}")
        while len(tried) < ATTEMPTS_MAX and (worker := self.workers.to_ask(tried)) is not None:
            tried.add(worker.url)
            try:
                with self.workers.asking(worker):
                    return await self._encoded_at(worker.url + PATH, question, parts)
            except EncoderUnavailable as error:
                failure = error
        raise failure

    async def _encoded_at(self, url: str, question: bytes, parts: Sequence[MediaPart]) -> EncodedMedia:
        answer = await self._ask(url, question)
        if len(answer.digests) != len(parts):
            raise EncoderUnavailable(f"{len(answer.digests)} digests for {len(parts)} items")
        if self._form == "handles":
            return _handles(answer)
        return await self._embeddings(answer, parts)

    def _question(self, prompt: str, parts: Sequence[MediaPart]) -> bytes:
        media = tuple(EncodeMedia(field=part.field, url=part.full_url) for part in parts)
        return msgspec.json.encode(EncodeRequest(model=self._model, form=self._form, prompt=prompt, media=media))

    async def _ask(self, url: str, body: bytes) -> EncodeAnswer:
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False, auto_decompress=False)
        try:
            async with (
                asyncio.timeout(self._answer_s),
                self._session.post(url, data=body, headers=self._headers, allow_redirects=False) as response,
            ):
                data = await bounded_body(response, _ANSWER_BYTES_MAX)
                if data is None or response.status != _OK:
                    raise _refusal(response, data)
                return read_answer(data)
        except TimeoutError as error:
            raise EncoderUnavailable(f"no answer within {self._answer_s} s") from error
        except (aiohttp.ClientError, OSError, EncodeUnreadable) as error:
            raise EncoderUnavailable(f"{type(error).__name__}: {error}") from error

    async def _embeddings(self, answer: EncodeAnswer, parts: Sequence[MediaPart]) -> EncodedMedia:
        descriptors = answer.embeddings or ()
        if len(descriptors) != len(parts):
            raise EncoderUnavailable(f"{len(descriptors)} embeddings for {len(parts)} items")
        return EncodedMedia(media=tuple([await self._fetched(*each) for each in zip(parts, descriptors, strict=True)]))

    async def _fetched(self, part: MediaPart, descriptor: EmbeddingDescriptor) -> Media:
        try:
            data = await self._transfer.fetch(descriptor)
            return await asyncio.to_thread(embeddings_media, part.field, data)
        except MediaRefused as error:  # the embeddings are refused, not the client's media
            raise EncoderUnavailable(str(error)) from error


def _refusal(response: aiohttp.ClientResponse, data: bytes | None) -> MediaRefused | EncoderUnavailable:
    if data is None:
        return EncoderUnavailable(f"an answer of more than {_ANSWER_BYTES_MAX} bytes")
    try:
        reported = msgspec.json.decode(data, type=_ErrorBody).error
    except msgspec.DecodeError:
        reported = _Error()
    if response.status == _REFUSED and reported.code in MEDIA_REASONS:
        return _refused(reported.code, reported)
    return EncoderUnavailable(f"{response.status}: {reported.message}", _retry_s(response.headers.get("Retry-After")))


def _handles(answer: EncodeAnswer) -> EncodedMedia:
    try:
        handoff = handoff_of_json(answer.disaggregated_params)
    except HandoffInvalid as error:
        raise EncoderUnavailable(str(error)) from error
    if len(handoff.multimodal_embedding_handles or ()) != len(answer.digests):
        raise EncoderUnavailable("not a handle for each item")
    return EncodedMedia(handoff=handoff)


def _refused(code: str, reported: _Error) -> MediaRefused:
    """Parse the encode worker's refusal: `<field>: found <found>, allowed <allowed>`."""
    head, _, allowed = reported.message.rpartition(", allowed ")
    field, _, found = head.partition(": found ")
    reason = next(each for each in get_args(MediaReason) if each == code)
    return MediaRefused(reason, reported.param or field, found.strip("'"), allowed)


def _retry_s(header: str | None) -> float | None:
    return min(float(header), _RETRY_S_MAX) if header is not None and header.isdecimal() else None
