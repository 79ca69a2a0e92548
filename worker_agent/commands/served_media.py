"""Media of one served worker: its prompts' media, the registration's image rule, the encode endpoint.

role                   `encode.form`
aggregated, prefill    who encodes its images
decode                 none
encode                 none; a model that takes no images is refused
"""

from collections.abc import Iterator, Mapping

from aiohttp import web

from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from kv_runtime.telemetry import Family, by_name, counter, gauge
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.model import Text
from worker_agent.api.encode_endpoint import EncodeApi, ImageEncoder
from worker_agent.api.prompts import EnginePrompts
from worker_agent.commands.engine_choice import EngineChoice
from worker_agent.config import AgentSettings
from worker_agent.media.encode_client import EncodeClient
from worker_agent.media.image_models import image_facts, image_rule
from worker_agent.media.loader import MediaLoader


class ServedMedia:
    """The media of one worker.

    Raises:
        TextError: the model's image settings contradict each other, or the role.
    """

    def __init__(
        self, settings: AgentSettings, chosen: EngineChoice, text: Text, clock: Clock, engine: ImageEncoder
    ) -> None:
        section, form, path = settings.worker, settings.encode.form, chosen.text if chosen.takes_media else ""
        facts = image_facts(path, text, settings.images)
        if form != "none" and section.role not in ("aggregated", "prefill"):
            raise TextError("encode.form", form, f"none on a worker of role {section.role}: it computes no prompt")
        self._loader = MediaLoader(settings.media)
        self._client: EncodeClient | None = None
        if form != "none":
            host, token = section.advertised_host if form == "handles" else "", section.token.get_secret_value()
            self._client = EncodeClient(clock, model=chosen.names[0], form=form, host=host, token=token)
        self.rule = image_rule(path, facts, settings.images)
        """For the worker's registration."""
        self.prompts = EnginePrompts(text, self._loader, facts, self._client)
        self._api: EncodeApi | None = None
        if section.role == "encode":
            if facts is None:
                allowed = "a model that takes images, or images.placeholder and images.token_id"
                raise TextError("role", section.role, allowed)
            self._api = EncodeApi(
                engine,
                self._loader,
                facts,
                cache_bytes_max=settings.media.cache_bytes_max,
                served_names=chosen.names,
                inflight_requests_max=section.inflight_requests_max,
            )

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes of an encode worker."""
        return [] if self._api is None else self._api.routes()

    def parts(self, stage: int, log: EventLog, gate: FleetGate) -> tuple[Part, ...]:
        """Return the parts to run; encode workers are learnt from `log`."""
        return () if self._client is None else (self._client.part(stage, log, gate),)

    def families(self, worker: str) -> Iterator[Family]:
        """Yield the media metrics."""
        attempts_total = None if self._client is None else self._client.attempts_total
        yield from media_families(worker, self._loader, attempts_total, self._api)


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
