"""The router's tree of settings, as `docs/reference/settings.md` lists it.

A `WorkerAddress` names an engine that the router attaches, as `URL[,OPTION=VALUE...]` in flags, YAML and lists:

engine             the kind of engine, as in the agent's `engine.kind`; without it the engine is asked
kv-events          tcp://host:port of rank 0, `poll`, or `none`; without it what the engine states, else its default
replay-endpoint    tcp://host:port of rank 0
id                 the worker's name in the fleet; without it host and port
"""

import re
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import AfterValidator, Field, SecretStr, model_validator

from kv_protocol.body_limits import BodyLimits
from kv_protocol.fleet import is_base_url
from kv_protocol.ids import WORKER_ID_PATTERN
from kv_protocol.openai.endpoints import ENGINE_PATHS
from kv_runtime.clock import Clock
from kv_runtime.config.sections import (
    BodyBoundsSection,
    ControlSection,
    EmbeddedNatsSection,
    IndexSection,
    Section,
    Settings,
    TelemetrySection,
)
from kv_runtime.http.hosts import HostName, HostNames, WebOrigin
from kv_runtime.http.server import CONTROL_CONNECTIONS_MAX, HttpServer
from kv_runtime.text.encoders import Wanted
from kv_runtime.tracing.service import TracingSection
from router.attribution.service import ReportSection
from router.decision.policy_config import DisaggregationSection, PolicySection, picked
from router.fleet.breakers import BreakerLimits
from router.http.credentials import Credentials
from router.http.limits import HttpLimits
from router.http.sites import Sites
from router.journal.log import JournalSection
from router.planner.service import PlannerSection
from router.prompt.prompts import CACHE_BYTES_MAX
from router.queue.config import QueueSection
from router.shadows.service import ShadowSection

OPTIONS = ("engine", "kv-events", "replay-endpoint", "id")
WORKERS_MAX = 256
_ID_CHARACTERS_MAX = 64
DNS = "dns://"
"""A list's place that begins so is a DNS name and a port, not a file."""
FALLBACKS_MAX = 8
_HTTP = HttpLimits()
_BREAKERS = BreakerLimits()
PassedPath = Annotated[str, Field(pattern=r"^/[!-~]*$", max_length=64)]


class WorkerAddress(NamedTuple):
    """An engine's URL without a slash at its end, its name, and the options that are settings of its agent."""

    url: str
    worker_id: str
    engine: str = "auto"
    kv_events: str = ""
    replay_endpoint: str = ""


def worker_address(text: str) -> WorkerAddress:
    """Return the address in `text`.

    Raises:
        ValueError: names what was found and what is allowed.
    """
    url, *rest = text.strip().split(",")
    options = {name: value for name, _, value in (each.partition("=") for each in rest)}
    for name, value in options.items():
        if name not in OPTIONS or not value:
            raise ValueError(f"found {name}={value!r}, allowed {', '.join(OPTIONS)}, each with a value")
    if not is_base_url(url):
        found = "an address with a user" if "@" in url else repr(url)
        raise ValueError(f"found {found}, allowed http(s)://host:port")
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    worker_id = options.get("id") or re.sub(r"[^a-z0-9]+", "-", f"{parts.hostname}-{port}").strip("-")
    if not re.fullmatch(WORKER_ID_PATTERN, worker_id):
        raise ValueError(f"id: found {worker_id[:_ID_CHARACTERS_MAX]!r}, allowed ^{WORKER_ID_PATTERN}$")
    settings = {name.replace("-", "_"): value for name, value in options.items() if name != "id"}
    return WorkerAddress(url.rstrip("/"), worker_id, **settings)


WorkerText = Annotated[str, AfterValidator(lambda text: worker_address(text) and text)]
"""A setting with the address of an engine."""


def check_place(place: str) -> str:
    """Return the place of a list; raise `ValueError` if a name lacks its port."""
    name, _, port = place.removeprefix(DNS).rpartition(":")
    if place.startswith(DNS) and not (name and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"found {place!r}, allowed a file, or dns://name:port")
    return place


class PickerSection(Section):
    """The endpoint picker: decisions for a gateway of the Gateway API, over gRPC. Needs the extra `gateway`.

    With `data.tls_certificate` it speaks TLS, and with `data.tls_client_ca` asks gateways for a certificate.
    """

    enabled: bool = Field(default=False, description="serve Envoy's external processing")
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(9002, ge=0, le=65535, description="0: any free one, with one process")
    fallbacks: int = Field(
        0,
        ge=0,
        le=FALLBACKS_MAX,
        description="further endpoints that are named to the gateway for its retries; above 0 only if the gateway takes"
        " a list",
    )


class DataSection(BodyBoundsSection):
    """The data plane: the address for clients."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    reuse_port: bool = Field(default=False, description="let several routers share the port")
    processes: int = Field(
        1, ge=1, le=64, description="processes that serve; above 1, one more has the control plane of all"
    )
    body_bytes_max: int = Field(
        _HTTP.body_bytes_max, ge=1024, le=1 << 30, description="larger bodies are refused with 413"
    )
    bodies_bytes_max: int = Field(
        _HTTP.bodies_bytes_max,
        ge=1024,
        le=1 << 40,
        description="bodies of all requests that are read or served; beyond it 503; memory",
    )
    passed_paths: tuple[PassedPath, ...] = Field(
        ("/v1/", *ENGINE_PATHS),
        max_length=64,
        description="further paths that are passed on to workers that state them; a path that ends with / stands for"
        " all below it, except those that load and unload adapters",
    )
    hosts: tuple[HostName, ...] = Field(
        (),
        max_length=64,
        description="names by which clients may call it (Host); others get 421; *: any, as behind a balancer",
    )
    cors_origins: tuple[WebOrigin, ...] = Field(
        (), max_length=64, description="sites from which browsers may send requests (Origin); others get 403; *: any"
    )
    accounts_file: str = Field(
        "", description="file of accounts: API keys that clients need, rates, budgets (`SECURITY.md`); empty: none"
    )
    tls_certificate: str = Field("", description="file of the certificate chain, PEM; empty: plain text")
    tls_key: str = Field("", description="file of its private key, PEM")
    tls_client_ca: str = Field(
        "", description="file of authorities, PEM: one of them must have signed each client's certificate; empty: none"
    )
    worker_token: SecretStr = Field(SecretStr(""), description="bearer token that workers beyond loopback require")
    drain_s: float = Field(_HTTP.drain_s, ge=0, le=3600, description="how long running requests may take after a stop")

    @model_validator(mode="after")
    def _certificate_with_key(self) -> "DataSection":
        if bool(self.tls_certificate) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_certificate):
            names = [name for name in ("tls_certificate", "tls_key", "tls_client_ca") if getattr(self, name)]
            raise ValueError(f"found {' with '.join(names)}, allowed tls_certificate with tls_key, or neither")
        return self

    def credentials(self, clock: Clock) -> Credentials:
        """Return the accounts and certificates that guard the data plane; raise `ConfigurationError` for a bad file."""
        return Credentials(self.accounts_file, self.tls_certificate, self.tls_key, self.tls_client_ca, clock)

    def body_limits(self) -> BodyLimits:
        """Return the bounds on a body's contents."""
        return BodyLimits(self.prompt_bytes_max, section="data")

    def limits(self) -> HttpLimits:
        """Return the limits of the data plane."""
        return picked(self, HttpLimits)

    def sites(self) -> Sites:
        """Return the accepted host names and browser origins."""
        return Sites(HostNames(self.host, self.hosts, setting="data.hosts"), self.cors_origins)


class RouterControlSection(ControlSection):
    """The control plane of a router."""

    keep_text: bool = Field(
        default=False, description="keep the beginning and end of each prompt in memory; show them with its decision"
    )

    def server(self, app: web.Application) -> HttpServer:
        """Return the server of the control plane, which has this application."""
        hosts = self.host_names()
        return HttpServer(app, self.host, self.port, hosts=hosts, connections_max=CONTROL_CONNECTIONS_MAX)


class LedgerSection(Section):
    """The ledger of leases: work that was promised to ranks."""

    replicas: bool = Field(
        default=True,
        description="exchange leases with the other routers of the fleet; without, their load is what engines report",
    )


class FailuresSection(Section):
    """Retries and breakers after failures of workers."""

    first_byte_s: float = Field(120.0, gt=0, le=3600, description="how long an answer may take to begin")
    whole_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="how long an answer that is not streamed, and so comes whole, may take to begin",
    )
    between_bytes_s: float = Field(60.0, gt=0, le=3600, description="how long an answer may pause")
    total_s: float = Field(
        3600.0, gt=0, le=86_400, description="how long an answer may take from its request to its end"
    )
    retry_limit: int = Field(2, ge=0, le=16, description="other ranks tried before the first byte")
    migration_limit: int = Field(
        3, ge=0, le=16, description="how often a stream goes on at another worker after its worker failed"
    )
    breaker_failures: int = Field(
        _BREAKERS.failures,
        ge=1,
        le=100,
        description="failures of a rank in a row that open its breaker; a failed connection opens it at once",
    )
    breaker_open_s: float = Field(
        _BREAKERS.open_s,
        ge=0,
        le=3600,
        description="how long a failed rank gets no request; doubled while it goes on failing",
    )

    def breakers(self) -> BreakerLimits:
        """Return the limits of breakers."""
        open_s = self.breaker_open_s
        return BreakerLimits(
            failures=self.breaker_failures, open_s=open_s, open_s_max=max(open_s, _BREAKERS.open_s_max)
        )


class HandoverSection(Section):
    """The hand-over of a draining worker's prefixes before it leaves."""

    tokens: int = Field(
        200_000, ge=0, le=1 << 30, description="most tokens that other workers compute for one that drains; 0: none"
    )


class TokensSection(Section):
    """Text to tokens."""

    chat_template: str = Field("", description="a Jinja file to use instead of the directory's; the workers' one")
    text: str = Field(
        "",
        description="tokenizer and template: a local model directory, or `byte`; empty: the directory that the engines"
        " in `workers` state; without engines there `byte`",
    )
    encoder: Wanted = Field(
        "auto", description="hf: tokenizers; fast: fastokens, refused where not equal; auto: fast where it is equal"
    )
    cache_bytes_max: int = Field(
        CACHE_BYTES_MAX,
        ge=0,
        le=1 << 40,
        description="memory for segments of chats, kept with their token ids so that they are not encoded again",
    )
    threads: int = Field(
        1,
        ge=1,
        le=64,
        description="threads that encode long texts, and as many again for texts above 1 MiB; more costs cores",
    )
    always: bool = Field(default=False, description="encode also in modes that read no overlap; costs CPU")


class StateSection(Section):
    """State that survives a restart."""

    dir: str = Field(
        "",
        description="directory of this router alone, for the policy that was changed over /v1/policy and for the learnt"
        " rates of models; made if missing; empty: they are not kept",
    )


class RouterTracingSection(TracingSection):
    """Which requests are traced, where to, and where people look at them."""

    link: str = Field(
        "",
        max_length=2048,
        pattern=r"^(https?://.*)?$",
        description="http or https address of a trace in a tracing tool, for links on the web page; {request_id} and"
        " {decision_id} in it are replaced by a decision's ids; empty: no links",
    )

    ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the requests without a traceparent that are traced; none: as OTEL_TRACES_SAMPLER says,"
        " without it all; more costs CPU",
    )
    ttft_target_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="a request that was not sampled is traced as well if its first token came later than this; failed"
        " requests always are",
    )


class RouterTelemetrySection(TelemetrySection):
    """Logs, and the request log."""

    request_log_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of requests that are logged when they end, 0 none, 1 all; the router's own errors always"
        " are, at most one line for each reason in 10 s",
    )


class RouterSettings(Settings):
    """All settings of the router."""

    workers: tuple[WorkerText, ...] = Field(
        (),
        max_length=WORKERS_MAX,
        description="engines that run already, which this router attaches: URL[,kv-events=ADDRESS][,replay-endpoint="
        "ADDRESS][,engine=KIND][,id=NAME]",
    )
    workers_from: Annotated[str, AfterValidator(check_place)] = Field(
        "", description="a watched list of such engines: a file with one in each line, or dns://name:port"
    )
    nats: EmbeddedNatsSection = EmbeddedNatsSection()
    data: DataSection = DataSection()
    picker: PickerSection = PickerSection()
    control: RouterControlSection = RouterControlSection()
    index: IndexSection = IndexSection()
    policy: PolicySection = PolicySection()
    ledger: LedgerSection = LedgerSection()
    queue: QueueSection = QueueSection()
    failures: FailuresSection = FailuresSection()
    handover: HandoverSection = HandoverSection()
    tokens: TokensSection = TokensSection()
    disaggregation: DisaggregationSection = DisaggregationSection()
    journal: JournalSection = JournalSection()
    state: StateSection = StateSection()
    planner: PlannerSection = PlannerSection()
    shadow: ShadowSection = ShadowSection()
    report: ReportSection = ReportSection()
    telemetry: RouterTelemetrySection = RouterTelemetrySection()
    tracing: RouterTracingSection = RouterTracingSection()

    @model_validator(mode="after")
    def _attached_by_one_process(self) -> "RouterSettings":
        names = [worker_address(each).worker_id for each in self.workers]
        if len(set(names)) < len(names):
            raise ValueError(f"workers: found ids {', '.join(names)}, allowed each once")
        if self.data.processes > 1 and self.attaches:
            raise ValueError("workers: found some, allowed none with data.processes above 1: `worker-agent attach`")
        return self

    @property
    def attaches(self) -> bool:
        """Whether the router attaches engines from its start on."""
        return bool(self.workers or self.workers_from)
