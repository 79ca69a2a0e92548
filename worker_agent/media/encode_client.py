"""Request and answer of `POST /v1/encode`, the client of encode workers, and which of several it asks.

The request is JSON. Media have the client's URLs: the encode worker loads them, by its own rules. `prompt` is the
complete prompt, because some models' handles depend on it; it has one placeholder for each item.

    form          the answer has                                            encoded as     usable by
    handles       `disaggregated_params`: the engine's handles, and a       JSON           a worker of the same machine,
                  hash of eight ints for each item, which is our digest                    once
    embeddings    `embeddings`: a `.safetensors` file of one tensor for     MessagePack    any worker
                  each item

    answer                        result
    200, handles                  a handoff, whose hashes are the media's digests
    200, embeddings               media, checked by `parts.embeddings_media`
    400 with a reason             `MediaRefused` with that reason: the encode worker refuses the client's media
    503, none, or too late        another worker is asked; after `ATTEMPTS_MAX` workers, or all, `EncoderUnavailable`
    any other                     also another worker is asked: the error is not the client's

The answer is bounded while it is read.

    registered with role encode                     asked
    draining                                        not asked
    left                                            forgotten
    no heartbeat, or a failure, within `SILENT_S`   asked after all others

Of several, the one with the fewest of our requests in flight is asked; of these, the one that was asked least often. An
engine opens only handles that were made on its machine: if handles are wanted, only workers at `host` are asked.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog
from msgspec import Meta

from kv_protocol import fleet, subjects
from kv_protocol.errors import UNDECODABLE, MalformedMessage
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, MISSED_HEARTBEATS_MAX, WorkerDraining, WorkerRegistered
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.openai.parts import ABSENT
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.http.answers import bounded_body
from kv_runtime.supervise import Part
from kv_runtime.telemetry import RateLimitedLog
from worker_agent.media.parts import MediaPart, embeddings_media
from worker_agent.media.refusals import MediaReason, MediaRefused
from worker_agent.port.handoff import Handoff, read_handoff
from worker_agent.port.types import EncoderUnavailable, Media

PATH = "/v1/encode"
MEDIA_MAX = 256
Form = Literal["handles", "embeddings"]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
SILENT_S = HEARTBEAT_PERIOD_S * MISSED_HEARTBEATS_MAX
ANSWER_BYTES_MAX: dict[Form, int] = {"handles": 8 << 20, "embeddings": 1 << 30}
"""A GiB has the embeddings of a hundred large images."""
_OK, _REFUSED = 200, 400
ANSWER_S = 30.0
"""How long an answer may take: an encode worker gives up loading its media earlier, and queues few requests."""
ATTEMPTS_MAX = 3
"""How many encode workers are asked for one prompt."""
_RETRY_S_MAX = 60
_FOLLOW_RETRY_S = 1.0
_log = structlog.get_logger("media")


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


class EncodeWorker:
    """One encode worker of the fleet, with the times of its newest heartbeat and failure, and our requests to it."""

    def __init__(self, registration: WorkerRegistered, now_s: float) -> None:
        self.registration, self.draining = registration, registration.drained
        self.heard_s, self.failed_s = now_s, -math.inf
        self.in_flight = self.asked_total = 0

    def order(self, now_s: float) -> tuple[bool, int, int]:
        """Return the worker's sort key: the worker with the smallest key is asked."""
        is_doubtful = now_s >= self.heard_s + SILENT_S or now_s < self.failed_s + SILENT_S
        return is_doubtful, self.in_flight, self.asked_total


EncodedMedia = tuple[tuple[Media, ...], Handoff | None]
"""Embeddings of a prompt's media, or an encode worker's handles of them."""


class EncodeClient:
    """A client of the encode workers of `model`. Each question has a connection of its own.

    `host` is the machine of the workers that are asked; empty: any.
    """

    def __init__(self, clock: Clock, *, model: str, form: Form, host: str = "", token: str = "") -> None:
        self._model, self._form, self._host, self._clock = model, form, host.lower(), clock
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._gate = FleetGate()
        self._workers: dict[str, EncodeWorker] = {}
        self._failures = RateLimitedLog(_log, clock)
        self.attempts_total: Counter[str] = Counter()
        """Requests to encode workers, by outcome: ok, refused (media refused, or worker busy), failed."""

    def part(self, stage: int, log: EventLog, gate: FleetGate) -> Part:
        """Return the part that follows the workers in `log`; `gate` checks their fleet events."""
        self._gate = gate
        return Part("encode-workers", lambda stop: self._follow(log, stop), stage)

    async def _follow(self, log: EventLog, stop: asyncio.Event) -> None:
        slug, is_read = subjects.model_slug(self._model), False
        await log.listen(subjects.pattern("heartbeat", slug=slug), self._on_heartbeat)
        while not (is_read or stop.is_set()):
            try:
                await log.follow(subjects.FLEET_STREAM, subjects.pattern("fleet", slug=slug), self._on_fleet_event)
                is_read = True
            except BrokerUnavailable:  # a router makes the stream, perhaps later
                await self._clock.wait(stop, _FOLLOW_RETRY_S)
        await stop.wait()

    async def encode(self, prompt: str, parts: Sequence[MediaPart]) -> EncodedMedia:
        """Return the encoded `parts`; `prompt` must have one placeholder for each.

        Raises:
            MediaRefused: the media are refused.
            EncoderUnavailable: no encode worker answers now.
        """
        question = await asyncio.to_thread(self._question, prompt, parts)
        tried = set[str]()
        where = f" at {self._host}" if self._host else ""
        failure = EncoderUnavailable(f"no encode worker of {self._model} takes requests{where}")
        while len(tried) < ATTEMPTS_MAX and (worker := self.to_ask(tried)) is not None:
            url = worker.registration.base_url
            tried.add(url)
            try:
                with self.asking(worker):
                    data = await self._ask(url + PATH, question)
                    return await asyncio.to_thread(_read, data, self._form, parts)
            except EncoderUnavailable as error:
                failure = error
        raise failure

    def to_ask(self, tried: Container[str]) -> EncodeWorker | None:
        """Return the worker to ask, which has none of the `tried` addresses; None if there is none."""
        now_s = self._clock.now()
        workers = [
            each for each in self._workers.values() if not each.draining and each.registration.base_url not in tried
        ]
        return min(workers, key=lambda each: each.order(now_s), default=None)

    @contextmanager
    def asking(self, worker: EncodeWorker) -> Iterator[None]:
        """Count the `with` block as a request at the worker; log its `EncoderUnavailable` and add the address to it."""
        worker.in_flight += 1
        worker.asked_total += 1
        outcome = "failed"
        try:
            yield
            outcome = "ok"
        except MediaRefused:
            outcome = "refused"
            raise
        except EncoderUnavailable as error:
            if error.retry_s is None:
                worker.failed_s = self._clock.now()
            else:  # the worker is busy, not broken
                outcome = "refused"
            url = worker.registration.base_url
            self._failures.warning("encode_worker_failed", key=url, at=url, reason=str(error))
            raise EncoderUnavailable(f"the encode worker at {url}: {error}", error.retry_s) from error
        finally:
            worker.in_flight -= 1
            self.attempts_total[outcome] += 1

    async def _on_fleet_event(self, message: LogMessage) -> None:
        try:
            event = self._gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused:  # routers log it
            return
        known = self._workers.get(event.worker_id)
        if known is not None and known.registration.instance != event.instance:
            known = None
        if isinstance(event, WorkerRegistered):
            if event.role != "encode" or self._host not in ("", urlsplit(event.base_url).hostname):
                self._workers.pop(event.worker_id, None)
            elif known is None:
                self._workers[event.worker_id] = EncodeWorker(event, self._clock.now())
            else:
                known.registration = event
                known.draining = (known.draining or event.drained) and not event.ends_drain
        elif known is not None and isinstance(event, WorkerDraining):
            known.draining = True
        elif known is not None:
            del self._workers[event.worker_id]

    async def _on_heartbeat(self, message: LogMessage) -> None:
        try:
            worker = self._workers.get(subjects.rank_of(message.subject).worker_id)
            if worker is not None and fleet.decode_heartbeat(message.data).instance == worker.registration.instance:
                worker.heard_s = self._clock.now()
        except MalformedMessage:
            return

    def _question(self, prompt: str, parts: Sequence[MediaPart]) -> bytes:
        media = tuple(EncodeMedia(field=part.field, url=part.full_url) for part in parts)
        return msgspec.json.encode(EncodeRequest(model=self._model, form=self._form, prompt=prompt, media=media))

    async def _ask(self, url: str, body: bytes) -> bytes:
        bytes_max = ANSWER_BYTES_MAX[self._form]
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                aiohttp.ClientSession(trust_env=False, auto_decompress=False) as session,
                session.post(url, data=body, headers=self._headers, allow_redirects=False) as response,
            ):
                data = await bounded_body(response, bytes_max)
        except TimeoutError as error:
            raise EncoderUnavailable(f"no answer within {ANSWER_S} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EncoderUnavailable(f"{type(error).__name__}: {error}") from error
        if data is None:
            raise EncoderUnavailable(f"an answer of more than {bytes_max} bytes")
        if response.status != _OK:
            raise _refusal(response, data)
        return data


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    param: str | None = None
    code: str | None = None


def _read(data: bytes, form: Form, parts: Sequence[MediaPart]) -> EncodedMedia:
    """Return the encoded media in an answer for `parts`; raise `EncoderUnavailable` if it is not of this form."""
    try:
        if form == "embeddings":
            files = msgspec.msgpack.decode(data, type=EncodeAnswer).embeddings
            pairs = zip(parts, files, strict=True)
            return tuple(embeddings_media(part.field, file) for part, file in pairs), None
        handoff = read_handoff(msgspec.json.decode(data, type=EncodeAnswer).disaggregated_params)
    except UNDECODABLE as error:  # also `MediaRefused`: the embeddings are refused, not the client's media
        raise EncoderUnavailable(f"its answer: {error}") from error
    if handoff is None or len(handoff.multimodal_embedding_handles or ()) != len(parts):
        raise EncoderUnavailable("its answer has not a handle for each item")
    return (), handoff


def _refusal(response: aiohttp.ClientResponse, data: bytes) -> MediaRefused | EncoderUnavailable:
    try:
        reported = msgspec.json.decode(data, type=dict[str, _Error])["error"]
    except (msgspec.DecodeError, KeyError):
        reported = _Error()
    reason = next((each for each in get_args(MediaReason) if each == reported.code), None)
    if response.status == _REFUSED and reason is not None:  # `<field>: found <found>, allowed <allowed>`
        head, _, allowed = reported.message.rpartition(", allowed ")
        field, _, found = head.partition(": found ")
        return MediaRefused(reason, reported.param or field, found.strip("'"), allowed)
    return EncoderUnavailable(f"{response.status}: {reported.message}", _retry_s(response.headers.get("Retry-After")))


def _retry_s(header: str | None) -> float | None:
    return min(float(header), _RETRY_S_MAX) if header is not None and header.isdecimal() else None
