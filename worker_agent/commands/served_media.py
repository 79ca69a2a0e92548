"""Media of one served worker: its prompts' media, the registration's image rule, the encode endpoint.

role                   `encode.form`
aggregated, prefill    who encodes its images
decode                 none
encode                 none; a model that takes no images is refused
"""

from collections.abc import Iterator, Mapping

from kv_protocol.fleet import Role
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from kv_runtime.telemetry import Family, by_name, counter, gauge
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Text
from worker_agent.api.encode_endpoint import EncodeApi, ImageEncoder
from worker_agent.api.prompts import EnginePrompts
from worker_agent.config import AgentSettings
from worker_agent.media.config import EncodeSection
from worker_agent.media.encode_client import EncodeClient
from worker_agent.media.image_models import ImageFacts, image_facts, image_rule
from worker_agent.media.loader import MediaLoader


class ServedMedia:
    """The media of one worker. `model` is the model's name in the fleet, `model_path` its text's directory.

    Raises:
        TextError: the model's image settings contradict each other, or the role.
    """

    def __init__(self, settings: AgentSettings, text: Text, clock: Clock, *, model: str, model_path: str) -> None:
        self._settings, role = settings, settings.worker.role
        self._facts = image_facts(model_path, text, settings.images)
        _check_role(role, settings.encode, self._facts)
        self.loader = MediaLoader(settings.media)
        self._client: EncodeClient | None = None
        if (form := settings.encode.form) != "none":
            host, token = settings.worker.advertised_host, settings.worker.token.get_secret_value()
            host = host if form == "handles" else ""
            self._client = EncodeClient(clock, model=model, form=form, host=host, token=token)
        self.rule = image_rule(model_path, self._facts, settings.images)
        """For the worker's registration."""
        self.prompts = EnginePrompts(text, self.loader, self._facts, self._client)
        self._api: EncodeApi | None = None

    def encode_api(self, encoder: ImageEncoder, served_names: tuple[str, ...]) -> EncodeApi:
        """Return the encode worker's endpoint, once: its routes are for the worker's application."""
        assert self._facts is not None
        self._api = EncodeApi(
            encoder,
            self.loader,
            self._facts,
            cache_bytes_max=self._settings.media.cache_bytes_max,
            served_names=served_names,
            inflight_requests_max=self._settings.worker.inflight_requests_max,
        )
        return self._api

    def parts(self, stage: int, log: EventLog, gate: FleetGate) -> tuple[Part, ...]:
        """Return the parts to run; encode workers are learnt from `log`."""
        return () if self._client is None else (self._client.part(stage, log, gate),)

    def families(self, worker: str) -> Iterator[Family]:
        """Yield the media metrics."""
        attempts_total = None if self._client is None else self._client.attempts_total
        yield from media_families(worker, self.loader, attempts_total, self._api)


def _check_role(role: Role, encode: EncodeSection, facts: ImageFacts | None) -> None:
    if encode.form != "none" and role not in ("aggregated", "prefill"):
        raise TextError("encode.form", encode.form, f"none on a worker of role {role}: it computes no prompt")
    if role == "encode" and facts is None:
        allowed = "a model that takes images, or images.placeholder and images.token_id"
        raise TextError("role", role, allowed)


def media_families(
    worker: str, loader: MediaLoader, attempts_total: Mapping[str, int] | None, api: EncodeApi | None
) -> Iterator[Family]:
    """Yield the counts of requests' media.

    `attempts_total` is of a worker that asks encode workers, `api` of an encode worker; None: the worker is neither.
    """
    at, by_outcome = (worker,), ("worker", "outcome")
    kinds, refused = by_name(at, loader.loaded_total), by_name(at, loader.refused_total)
    yield counter("media_loaded", "Media loaded for requests, by kind", ("worker", "kind"), kinds)
    meaning = "Bytes of media loaded for requests"
    yield counter("media_loaded_bytes", meaning, ("worker",), [(at, loader.loaded_bytes_total)])
    yield counter("media_refused", "Requests refused because of their media, by reason", ("worker", "reason"), refused)
    if attempts_total is not None:
        attempts = by_name(at, attempts_total)
        yield counter("encode_attempts", "Requests to encode workers, by outcome", by_outcome, attempts)
    if api is not None:
        requests, lookups = api.in_flight.requests_total, {"hit": api.cache.hits_total, "miss": api.cache.misses_total}
        yield counter("encode_requests", "Encoding requests, by outcome", by_outcome, by_name(at, requests))
        meaning = "Lookups in the cache of embeddings, by outcome"
        yield counter("embedding_lookups", meaning, by_outcome, by_name(at, lookups))
        running, size = [(at, api.in_flight.running)], [(at, api.cache.size_bytes)]
        yield gauge("encode_inflight_requests", "Prompts being encoded", ("worker",), running)
        yield gauge("embedding_cache_bytes", "Memory of cached embeddings", ("worker",), size)
