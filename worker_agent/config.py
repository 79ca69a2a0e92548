"""The agent's configuration tree."""

import re
import secrets
import socket
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from aiohttp import web
from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from kv_protocol.body_limits import BodyLimits
from kv_protocol.fleet import Role
from kv_protocol.ids import WORKER_ID_PATTERN
from kv_runtime.config.sections import LINES, BodyBoundsSection, NatsClientSection, Section, Settings, TelemetrySection
from kv_runtime.http.hosts import HostName, HostNames, is_loopback
from kv_runtime.http.server import HttpServer
from kv_runtime.tracing.service import TracingSection
from worker_agent.api.parsers.families import REASONING_PARSERS, TOOL_CALL_PARSERS, AnswerFormat
from worker_agent.engines.simulated.handovers import NETWORK
from worker_agent.engines.trtllm.settings import TrtllmSection
from worker_agent.events.mirror import ENGINE
from worker_agent.events.outbox import RING_BYTES_MAX
from worker_agent.events.publishers import PublisherSection
from worker_agent.media.config import EncodeSection, ImageModelSection, MediaSection

SIMULATED = "sim-8b"
"""The simulated engine's default model."""
_HOST_CHARACTERS_MAX = 48
"""How many characters of the host's name a generated worker id has at most."""
_NAME = Annotated[str, Field(min_length=1, max_length=256)]
_Taint = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s,]([^,]*[^\s,])?$")]
"""Requests separate taints by commas: so a taint has no comma, and no space at its ends."""
_ENDPOINT = re.compile(r"(?:dyn://)?((?:[A-Za-z0-9_-]{1,64}\.){2}[A-Za-z0-9_-]{1,64})")
"""A worker's endpoint name, which separates the pools of one fleet.

Source: `docs/SOURCES.md` D6.1 (three parts, `dyn://`, defaults); characters and lengths are ours.
"""
_COMPONENTS: Mapping[Role, str] = {
    "aggregated": "backend",
    "prefill": "prefill",
    "decode": "backend",
    "encode": "encode",
}
"""The middle part of the default endpoint name, by role."""
_OF_EVERY_ENGINE = {
    *("kind", "model", "served_names", "text", "chat_template", "default_max_tokens"),
    *("tool_call_parser", "reasoning_parser"),
}
"""The fields of the section `engine` for any engine; all others are the simulated engine's."""
_MARGIN_S = 5.0
"""Time that a stop takes beyond that of requests and engine, to put the events that were read into the log."""


class WorkerSection(Section):
    """The worker's id, role and address."""

    id: str = Field(
        "",
        pattern=f"^({WORKER_ID_PATTERN})?$",
        description="unique in the fleet, kept over restarts; empty: made at each start, of the host's name and 8"
        " random hex digits",
    )
    role: Literal["aggregated", "prefill", "decode", "encode"] = Field("aggregated", description="phases it serves")
    endpoint: str = Field(
        "", description="its name, namespace.component.endpoint, with or without dyn://; empty: by its role"
    )
    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs worker.token")
    port: int = Field(0, ge=0, le=65535, description="0: any free one, which is advertised")
    advertise_host: str = Field("", description="host that routers use; empty: worker.host")
    taints: tuple[_Taint, ...] = Field(
        (),
        max_length=64,
        description="its labels, which requests require or prefer (x-required-taints, x-preferred-taints)",
    )
    transfer_domain: str = Field(
        "",
        max_length=256,
        description="rack or zone within which its engine can exchange KV; a prompt is decoded in the"
        " domain in which it was computed",
    )
    token: SecretStr = Field(SecretStr(""), description="bearer token of the agent's HTTP; required beyond loopback")
    hosts: tuple[HostName, ...] = Field(
        (), max_length=64, description="names that requests without the token may call it by (Host), else 421; *: any"
    )
    body_bytes_max: int = Field(64 << 20, ge=1024, le=1 << 30, description="larger bodies are refused with 413")
    inflight_requests_max: int = Field(4096, ge=1, le=1_000_000, description="beyond it requests are refused with 503")
    drain_s: float = Field(10.0, ge=0, le=3600, description="how long running requests may take after a stop")

    @field_validator("endpoint")
    @classmethod
    def _three_parts(cls, endpoint: str) -> str:
        named = _ENDPOINT.fullmatch(endpoint)
        if endpoint and named is None:
            raise ValueError("allowed namespace.component.endpoint, each 1..64 letters, digits, `_` or `-`")
        return named[1] if named else ""

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> "WorkerSection":
        if not is_loopback(self.host) and not self.token.get_secret_value():
            raise ValueError(f"host is {self.host}: beyond loopback a token is required")
        return self

    def identified(self) -> Self:
        """Return the section with an id: the configured one, else a unique one."""
        if self.id:
            return self
        host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:_HOST_CHARACTERS_MAX]
        return self.model_copy(update={"id": f"{host or 'worker'}-{secrets.token_hex(4)}"})

    @property
    def advertised_host(self) -> str:
        """The host in the registered address."""
        return self.advertise_host or (self.host if self.host != "0.0.0.0" else socket.gethostname())  # noqa: S104

    def server(self, app: web.Application) -> HttpServer:
        """Return the server of `app` at the worker's address, not started; it accepts the advertised host's name."""
        hosts = HostNames(self.host, (self.advertised_host.lower(), *self.hosts), setting="worker.hosts")
        return HttpServer(app, self.host, self.port, hosts=hosts, drain_s=self.drain_s, handler_cancellation=True)

    @property
    def endpoint_name(self) -> str:
        """The name that is registered."""
        return self.endpoint or f"dynamo.{_COMPONENTS[self.role]}.generate"


class ServedWorkerSection(WorkerSection, BodyBoundsSection):
    """A worker whose engine runs in this process."""

    canary_wait_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="silence after which the engine is asked for a token; without one for as long, the worker leaves"
        " the fleet until one comes; 0: never. Above a prefill",
    )

    def body_limits(self) -> BodyLimits:
        """Return the bounds on a body's contents."""
        return BodyLimits(self.prompt_bytes_max, section="worker")

    @model_validator(mode="after")
    def _check_canary_role(self) -> "ServedWorkerSection":
        if self.canary_wait_s and self.role in ("prefill", "encode"):
            why = "it generates nothing" if self.role == "encode" else "no worker would fetch what it hands over"
            raise ValueError(f"canary_wait_s: found {self.canary_wait_s}, allowed 0 of role {self.role}: {why}")
        return self


class EngineSection(Section):
    """The engine; sizes are per rank, of the simulated engine: TensorRT-LLM has its own arguments for them."""

    kind: Literal["simulated", "trtllm"] = Field("simulated", description="which engine is served")
    model: str = Field(
        "",
        max_length=256,
        description=f"its name; of trtllm its directory, or its name on the hub; empty: {SIMULATED}, "
        "of trtllm what its arguments say",
    )
    served_names: tuple[_NAME, ...] = Field(
        (), max_length=64, description="what requests may call it; the first is its name in the fleet; empty: the model"
    )
    text: str = Field(
        "", description="tokenizer and template: `byte`, or a local directory; empty: `byte`, of trtllm the model"
    )
    chat_template: str = Field("", description="a Jinja file in place of the directory's template; empty: that one")
    tool_call_parser: str = Field(
        "",
        max_length=64,
        description=f"how answers' tool calls are read: {', '.join(TOOL_CALL_PARSERS)}; empty: they stay text",
    )
    reasoning_parser: str = Field(
        "",
        max_length=64,
        description=f"parser that separates reasoning from content: {', '.join(REASONING_PARSERS)}; empty: none",
    )
    block_size: int = Field(32, ge=1, le=4096, description="tokens in a KV block")
    total_kv_blocks: int = Field(8192, ge=2, le=10_000_000, description="KV blocks of a rank; more keeps more prefixes")
    max_num_seqs: int = Field(256, ge=1, le=65_536, description="requests decoded together")
    max_num_batched_tokens: int = Field(8192, ge=1, le=1 << 20, description="tokens computed in one iteration")
    max_seq_len: int = Field(65_536, ge=2, le=1 << 22, description="prompt and answer together, in tokens")
    default_max_tokens: int = Field(128, ge=1, le=1 << 20, description="tokens generated where none are named")
    dp_ranks: int = Field(1, ge=1, le=64, description="attention-DP ranks, each a KV cache of its own")
    host_blocks: int = Field(0, ge=0, le=100_000_000, description="KV blocks of a rank in host memory; 0: no host tier")
    speed: float = Field(1.0, gt=0, le=1000, description="simulated seconds a second; higher blurs measured latency")
    answer: Annotated[str, LINES] = Field(
        "",
        max_length=1 << 16,
        description="what the simulated engine says to everything, for tests and demonstrations; empty: made-up words",
    )

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _known_parser(cls, name: str, of: ValidationInfo) -> str:
        AnswerFormat(**{str(of.field_name): name})
        return name

    @property
    def answer_format(self) -> AnswerFormat:
        """The parsers of answers."""
        return AnswerFormat(self.tool_call_parser, self.reasoning_parser)

    @model_validator(mode="after")
    def _parts_fit(self) -> "EngineSection":
        _ = self.answer_format  # checks that the parsers fit together
        return self


class EventsSection(Section):
    """The buffers between an engine's events and the log, of each rank, and further sources of the worker's caches."""

    batch_ring_bytes_max: int = Field(
        RING_BYTES_MAX, ge=0, le=1 << 34, description="memory for published batches, for readers that missed some"
    )
    sources: tuple[PublisherSection, ...] = Field(
        (), max_length=64, description="publishers of other keepers of the worker's blocks: a KV block manager"
    )

    @model_validator(mode="after")
    def _each_its_own(self) -> "EventsSection":
        names = [each.source for each in self.sources]
        ranks = {name: [each.dp_rank for each in self.sources if each.source == name] for name in names}
        problems = [
            f"sources: found source {name!r} of dp_ranks {dp_ranks}, allowed each rank once"
            for name, dp_ranks in ranks.items()
            if len(dp_ranks) > 1 and (None in dp_ranks or len(set(dp_ranks)) < len(dp_ranks))
        ]
        if ENGINE in names:
            problems.append(f"sources: found source {ENGINE!r}, allowed another name: that is the engine's own")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class AgentSettings(Settings):
    """The settings of `worker-agent serve`."""

    worker: ServedWorkerSection = ServedWorkerSection()
    engine: EngineSection = EngineSection()
    trtllm: TrtllmSection = TrtllmSection()
    events: EventsSection = EventsSection()
    media: MediaSection = MediaSection()
    images: ImageModelSection = ImageModelSection()
    encode: EncodeSection = EncodeSection()
    nats: NatsClientSection = NatsClientSection()
    telemetry: TelemetrySection = TelemetrySection()
    tracing: TracingSection = TracingSection()

    @model_validator(mode="after")
    def _of_this_engine(self) -> "AgentSettings":
        engine, trtllm = self.engine, self.trtllm
        if engine.kind == "trtllm":
            strange = [f"engine.{name}" for name in _set_fields(engine) if name not in _OF_EVERY_ENGINE]
            allowed = "of the simulated engine alone: TensorRT-LLM has arguments of its own"
        else:
            strange = [f"trtllm.{name}" for name in _set_fields(trtllm)]
            allowed = "where engine.kind is trtllm"
        if strange:
            raise ValueError("; ".join(f"{name}: found a value, allowed {allowed}" for name in strange))
        return self

    @property
    def drain_s(self) -> float:
        """How long a stop may take: running requests, then the engine's shutdown, and its remaining events."""
        of_engine = 0.0
        is_prefill = self.worker.role == "prefill"
        if self.engine.kind == "trtllm":
            of_engine = self.trtllm.shutdown_s + (self.trtllm.transfer_s if is_prefill else 0.0)
        elif is_prefill:
            of_engine = NETWORK.timeout_s / self.engine.speed
        return self.worker.drain_s + of_engine + _MARGIN_S


def _set_fields(section: Section) -> list[str]:
    """Return the names of the fields that differ from their defaults."""
    fields = type(section).model_fields
    return [name for name, field in fields.items() if getattr(section, name) != field.default]
