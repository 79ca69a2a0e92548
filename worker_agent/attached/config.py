"""The configuration of `attach` for an engine in another process, and the registration of that engine.

A field of the registration is as configured, else as the engine says, else as its kind of engine usually has it.
"""

import re
from importlib.metadata import version
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import UNSET
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from kv_protocol.errors import LimitExceeded
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import EAGLE_HASH_SCHEME, HASH_SCHEME, canary
from kv_protocol.ids import BLOCK_SIZE_MAX
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS, ApiEndpoint
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import ControlSection, NatsClientSection, Section, Settings, TelemetrySection
from kv_runtime.config.words import allowed
from kv_runtime.text.model import Text
from kv_runtime.tracing.service import TracingSection
from worker_agent.config import EventsSection, WorkerSection
from worker_agent.engines.servers import ASSUMED, SERVERS
from worker_agent.engines.servers.base import NO_EVENTS_ENDPOINT, POLL, EngineFacts, EngineServer
from worker_agent.events.consolidation import Origin
from worker_agent.events.consolidator import WorkerStreams
from worker_agent.events.engine_event_subscriber import PublisherAddress
from worker_agent.events.mirror import ENGINE
from worker_agent.events.publishers import rank_endpoints

_ANY_INTERFACE = re.compile(r"//(?:\*|0\.0\.0\.0|\[::\]):")
_EVENTS = ", ".join(f"{server.events} of {server.name}" for server in SERVERS.values())
_POLLED = ", ".join(server.name for server in SERVERS.values() if server.events == POLL)


class AttachedEngineSection(Section):
    """The attached engine; sizes are per rank. An empty or 0 field is taken from the engine, if it reports it."""

    kind: str = Field(
        "auto",
        description=f"which engine it is, {', '.join(SERVERS)}; auto: as it says, without an address {ASSUMED}",
    )
    base_url: str = Field("", description="its OpenAI endpoint, http://host:port; empty: it is not registered")
    api_key: SecretStr = Field(SecretStr(""), description="what the engine wants of its clients as a bearer token")
    requests: Literal["auto", "direct", "forward"] = Field(
        "auto", description="from routers to the engine itself, or through here; auto: forward where ranks are chosen"
    )
    metrics_path: str = Field(
        "/metrics", pattern="^(/[!-~]*)?$", description="where its load is read; empty: it is not read"
    )
    model: str = Field("", max_length=256, description="the model's name; empty: the first that the engine serves")
    served_names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="the names that requests may use; empty: as the engine says, else the model's"
    )
    api_endpoints: tuple[ApiEndpoint, ...] = Field(
        (),
        description="OpenAI endpoints that it serves: chat, completions, responses, embeddings; empty: as its"
        " /openapi.json says, else chat and completions",
    )
    text: str = Field(
        "",
        description="tokenizer and template: a local model directory, or `byte`; empty: the directory that the engine"
        " states, if it is readable here",
    )
    block_size: int = Field(
        0, ge=0, le=BLOCK_SIZE_MAX, description="tokens in a KV block; 0: as the engine says, else its default"
    )
    dp_ranks: int = Field(
        0,
        ge=0,
        le=64,
        description="data-parallel ranks, beyond 1 each with a publisher of its own; 0: as the engine says, else 1",
    )
    is_eagle: bool = Field(
        default=False,
        description="whether its cache keys a block by the next token, too: a SGLang or vLLM 0.33 that drafts with"
        " EAGLE or MTP (of vLLM without --kv-transfer-config and with lookahead hashes, its default)",
    )
    total_kv_blocks: int = Field(0, ge=0, le=100_000_000, description="KV blocks of a rank")
    max_num_seqs: int = Field(0, ge=0, le=65_536, description="requests decoded together")
    max_num_batched_tokens: int = Field(0, ge=0, le=1 << 20, description="tokens computed in one iteration")
    max_seq_len: int = Field(0, ge=0, le=1 << 22, description="prompt and answer together, in tokens")
    kv_cache_dtype: str = Field(
        "",
        max_length=256,
        description="data type of its KV blocks: fp8, bfloat16; a prefill or decode worker without is in no pair",
    )
    publish_endpoint: str = Field(
        "",
        description="PUB socket of rank 0, rank r: port + r; or each rank's, between commas; `poll`: /kv_cache_events"
        f" is polled; `none`: it has none; empty: as the engine says, else {_EVENTS}",
    )
    replay_endpoint: str = Field("", description="ROUTER socket of rank 0, likewise; empty: every gap is a loss")
    stream_token_ids: bool = Field(
        default=True,
        description="routers ask vLLM for the token ids of streams, which costs it some bytes a token and once the"
        " prompt's ids, so that another worker resumes a stream whose engine dies; false: such a stream is lost",
    )
    allow_remote: bool = Field(default=False, description="other machines' addresses too; what they say is believed")

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        if kind != "auto" and kind not in SERVERS:
            raise ValueError(f"kind: found {kind!r}, allowed auto, {', '.join(SERVERS)}")
        return kind

    @field_validator("base_url")
    @classmethod
    def _without_path_of_requests(cls, base_url: str) -> str:
        if base_url.rstrip("/").endswith("/v1"):
            raise ValueError(f"base_url: found {base_url!r}, allowed without /v1, which every request adds")
        return base_url

    @model_validator(mode="after")
    def _ports_apart(self) -> "AttachedEngineSection":
        if self.is_polled:
            return self._checked_poll()
        addresses = [publisher.endpoint for publisher in self.publishers()]
        addresses += [publisher.replay_endpoint for publisher in self.publishers() if publisher.replay_endpoint]
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"replay_endpoint: found {self.replay_endpoint!r}, allowed ports that no publisher has")
        return self

    def _checked_poll(self) -> "AttachedEngineSection":
        if self.kind != "auto" and self.server.events != POLL:
            raise ValueError(f"publish_endpoint: found 'poll', allowed of {_POLLED} alone, not of {self.kind}")
        if not self.base_url:
            raise ValueError("base_url: found '', allowed http://host:port where /kv_cache_events is polled")
        if self.replay_endpoint:
            raise ValueError(f"replay_endpoint: found {self.replay_endpoint!r}, allowed none where events are polled")
        return self

    @property
    def is_polled(self) -> bool:
        """Whether the engine is polled for its events, instead of publishing them."""
        return (self.publish_endpoint or self.server.events) == POLL

    @property
    def is_forwarded(self) -> bool:
        """Whether requests go through this process, which hands each to its rank."""
        if self.requests == "auto":
            return self.dp_ranks > 1 and bool(self.server.rank_header)
        return self.requests == "forward"

    @property
    def server(self) -> EngineServer:
        """What is known of this kind of engine; while the kind is `auto`, of `ASSUMED`."""
        return SERVERS[ASSUMED if self.kind == "auto" else self.kind]

    def settled(self, facts: EngineFacts) -> "AttachedEngineSection":
        """Return the section; what was not set is as the engine says, else its kind's default.

        Event addresses that the engine states are allowed on any machine, because its own address was set.
        """
        kind = self.kind if self.kind != "auto" else facts.kind or ASSUMED
        found: dict[str, object] = {"kind": kind, "dp_ranks": self.dp_ranks or facts.dp_ranks or 1}
        if not self.publish_endpoint:
            publish = facts.publish_endpoint or SERVERS[kind].events
            found |= {"publish_endpoint": self._at_its_host(publish), "allow_remote": True}
            if publish not in (POLL, NO_EVENTS_ENDPOINT):
                found["replay_endpoint"] = self.replay_endpoint or self._at_its_host(facts.replay_endpoint)
        return type(self).model_validate(self.model_dump(exclude_unset=True) | found)

    def _at_its_host(self, endpoint: str) -> str:
        host = urlsplit(self.base_url).hostname or "127.0.0.1"
        return _ANY_INTERFACE.sub(f"//[{host}]:" if ":" in host else f"//{host}:", endpoint)

    def publishers(self) -> tuple[PublisherAddress, ...]:
        """Return the engine's publishers: one for all ranks, or one a rank; none if it is polled, or has no events."""
        if self.publish_endpoint in ("", POLL, NO_EVENTS_ENDPOINT):
            return ()
        ranks = max(1, self.dp_ranks)
        published = rank_endpoints("publish_endpoint", self.publish_endpoint, ranks, allow_remote=self.allow_remote)
        replayed = [""] * ranks
        if self.replay_endpoint:
            replayed = rank_endpoints("replay_endpoint", self.replay_endpoint, ranks, allow_remote=self.allow_remote)
        return tuple(
            PublisherAddress(Origin(ENGINE, dp_rank if ranks > 1 else None), publish, replay)
            for dp_rank, (publish, replay) in enumerate(zip(published, replayed, strict=True))
        )


class AttachedEventsSection(EventsSection):
    """The section `events` of `attach`."""

    attention_window: int = Field(
        0,
        ge=0,
        le=1 << 30,
        description="tokens of the widest attention window; needed if a polled engine is started before the agent,"
        " which then misses the engine's first events; 0: the widest window of the events that come",
    )


class AttachSettings(Settings):
    """The settings of `worker-agent attach`."""

    worker: WorkerSection = WorkerSection()
    engine: AttachedEngineSection = AttachedEngineSection()
    events: AttachedEventsSection = AttachedEventsSection()
    control: ControlSection = ControlSection(port=0)
    nats: NatsClientSection = NatsClientSection()
    telemetry: TelemetrySection = TelemetrySection()
    tracing: TracingSection = TracingSection()

    def settled(self, facts: EngineFacts) -> "AttachSettings":
        """Return the settings; what was not set of the engine is as it says, else its kind's default.

        Raises:
            ConfigurationError: what the engine says contradicts a setting.
        """
        try:
            return self.model_copy(update={"engine": self.engine.settled(facts)})
        except ValidationError as error:
            raise ConfigurationError([f"engine: {allowed(each)}" for each in error.errors()]) from error

    def streams(self, instance: str, model: str, block_size: int) -> WorkerStreams:
        """Return what the worker's event streams need; `block_size` is the engine's, 0 if it does not report one."""
        engine = self.engine
        return WorkerStreams(
            id=self.worker.id,
            model=model,
            instance=instance,
            block_size=engine.block_size or block_size or engine.server.block_size,
            dp_ranks=tuple(range(engine.dp_ranks)),
            is_eagle=engine.is_eagle,
            publishers=engine.publishers(),
        )


def completed_facts(engine: AttachedEngineSection, reported: EngineFacts) -> EngineFacts:
    """Return the configured facts, completed with the engine's reported ones.

    Raises:
        ConfigurationError: the reported block size differs from the configured one: no block would fit.
    """
    if engine.block_size and reported.block_size and engine.block_size != reported.block_size:
        raise ConfigurationError(
            [f"engine.block_size: found {engine.block_size}, allowed {reported.block_size}, which is the engine's"]
        )
    configured = EngineFacts(
        served_names=engine.served_names or ((engine.model,) if engine.model else ()),
        block_size=engine.block_size,
        total_kv_blocks=engine.total_kv_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_seq_len=engine.max_seq_len,
        api_endpoints=engine.api_endpoints,
    )
    return configured.with_more(reported).with_more(EngineFacts(block_size=engine.server.block_size))


def engine_registration(
    settings: AttachSettings, facts: EngineFacts, text: Text, instance: str, base_url: str
) -> WorkerRegistered:
    """Return the registration of the attached engine, whose requests go to `base_url`.

    Raises:
        ConfigurationError: a field is invalid.
    """
    engine = settings.engine
    scheme = EAGLE_HASH_SCHEME if engine.is_eagle else HASH_SCHEME
    api_endpoints = facts.api_endpoints or DEFAULT_ENDPOINTS
    tells_ids = engine.stream_token_ids and "completions" in api_endpoints  # by which streams are resumed
    try:
        return WorkerRegistered(
            worker_id=settings.worker.id,
            instance=instance,
            model=engine.model or next(iter(facts.served_names), ""),
            served_names=facts.served_names,
            role=settings.worker.role,
            base_url=base_url,
            dp_ranks=tuple(range(engine.dp_ranks)),
            block_size=facts.block_size,
            hash_scheme=scheme,
            tokenizer_digest=text.tokenizer_digest,
            template_digest=text.template_digest,
            canary=canary(facts.block_size, scheme),
            total_kv_blocks=facts.total_kv_blocks,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_seq_len=facts.max_seq_len,
            loras=facts.loras,
            kv_cache_dtype=engine.kv_cache_dtype,
            taints=settings.worker.taints,
            transfer_domain=settings.worker.transfer_domain,
            event_source=engine.server.event_source,
            accepts_token_ids=engine.is_forwarded,
            version=facts.version or version("kv-router"),
            endpoint=settings.worker.endpoint_name,
            api_endpoints=api_endpoints,
            stream_token_ids=engine.server.stream_format if tells_ids else "",
            event_flag=engine.server.event_flag or UNSET,
        )
    except LimitExceeded as error:
        raise ConfigurationError([f"engine.{error}"]) from error
