"""The router's configuration tree: every section of `interfaces.md`; a section without fields takes none yet."""

from collections.abc import Callable
from inspect import signature
from typing import TypeVar

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from kv_runtime.config import ControlSection, IndexSection, NatsSection, Section, Settings, TelemetrySection
from kv_runtime.encoders import Wanted
from router.core.affinity import AffinityLimits
from router.core.approximate import ApproximateLimits
from router.core.breakers import BreakerLimits
from router.core.fair_share import FairShareLimits
from router.core.policies import MODES
from router.core.policy import Affinity, CostParameters, Policy, Unmet
from router.core.tenants import SECRET_HEADERS, FairShareBy
from router.core.waiting import QueueLimits, QueuePolicy
from router.http.limits import HttpLimits
from router.tokens.prompts import PromptLimits

_WEIGHT_MIN, _WEIGHT_MAX = 0.001, 1000.0

_Limits = TypeVar("_Limits")


def _picked(section: Section, kind: Callable[..., _Limits], **own: object) -> _Limits:
    """Return one of `kind`, its fields the section's of the same names, or those given; others have their defaults."""
    names = type(section).model_fields.keys() & signature(kind).parameters.keys()
    return kind(**{name: getattr(section, name) for name in names} | own)


class DataSection(Section):
    """The data plane: what clients talk to."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    reuse_port: bool = Field(default=False, description="let several routers share the port")
    body_bytes_max: int = Field(64 << 20, ge=1024, le=1 << 30, description="larger bodies are refused with 413")
    bodies_bytes_max: int = Field(
        1 << 30,
        ge=1024,
        le=1 << 40,
        description="bodies of all requests that are read or served; beyond it 503; memory",
    )
    worker_token: SecretStr = Field(SecretStr(""), description="bearer token that workers beyond loopback want")
    drain_s: float = Field(30.0, ge=0, le=3600, description="how long running requests may take after a stop")

    head_s: float = Field(20.0, gt=0, le=3600, description="how long a request's head may take, else 408")
    body_s: float = Field(30.0, gt=0, le=3600, description="how long a request's body may pause, else 408")
    idle_s: float = Field(75.0, gt=0, le=86_400, description="how long a client's connection is kept between requests")
    write_s: float = Field(60.0, gt=0, le=3600, description="how long a client may read nothing before it is cut off")
    connections_max: int = Field(
        16_384, ge=1, le=1_000_000, description="clients' connections; beyond it 503; each takes a file descriptor"
    )
    worker_connections_max: int = Field(16_384, ge=1, le=1_000_000, description="connections to workers; beyond it 503")
    worker_idle_s: float = Field(
        4.0, ge=0, le=3600, description="how long a worker's connection is kept idle; less than the worker keeps it"
    )

    def limits(self) -> HttpLimits:
        """Return what is taken from clients, and how long they are awaited."""
        return _picked(self, HttpLimits)


class PolicySection(Section):
    """How a worker rank is chosen; formulas in `router/core/cost.py`."""

    user_modes: tuple[str, ...] = Field(
        (), max_length=64, description="functions that can be modes, each `package.module:function`; they are imported"
    )
    mode: str = Field(
        "kv",
        description="kv, predicted-ttft, round-robin, random, power-of-two, least-loaded, direct, or one of user_modes",
    )
    overlap_credit: float = Field(1.0, ge=0, le=1, description="what a block on the GPU saves, in blocks")
    overlap_credit_decay: float = Field(0.0, ge=0, le=1000, description="how fast queued prefill devalues overlap")
    host_weight: float = Field(0.75, ge=0, le=1, description="what a block in host memory saves")
    disk_weight: float = Field(0.25, ge=0, le=1, description="what a block on disk saves")
    prefill_scale: float = Field(
        1.0, ge=0, le=1000, description="weight of prefill against decode; more favours overlap"
    )
    request_weight: float = Field(0.0, ge=0, le=1000, description="blocks that every active request costs")
    history_weight: float = Field(0.5, ge=0, le=1000, description="weight of recent prefill; more spreads the load")
    temperature: float = Field(0.0, ge=0, le=100, description="0: the cheapest wins; more: drawn by softmax(-cost / T)")
    seed: int = Field(0, ge=0, le=(1 << 64) - 1, description="of every draw and tie-break")
    spill_tokens: int = Field(
        16384, ge=0, le=1 << 40, description="queued tokens beyond which a rank may lose its credit; 0: none ever does"
    )
    newcomers: bool = Field(
        default=True, description="a joining rank gets a bounded share of the requests of which nobody holds anything"
    )
    affinity: Affinity = Field("off", description="what a session's former rank means: off, soft or hard")
    affinity_discount: float = Field(0.5, ge=0, lt=1, description="soft: by what share that rank costs less")
    affinity_idle_s: float = Field(
        600.0, ge=1, le=86_400, description="how long after its last request a session is still at home at its rank"
    )
    affinity_sessions_max: int = Field(
        65_536, ge=1, le=1 << 24, description="sessions that are known; the longest idle are forgotten first; memory"
    )
    ttft_target_s: float | None = Field(
        None, gt=0, le=3600, description="predicted-ttft: longest time to a first token"
    )
    itl_target_s: float | None = Field(None, gt=0, le=60, description="predicted-ttft: longest time between tokens")
    unmet: Unmet = Field("admit", description="requests that no rank is predicted to serve so: admit, queue or reject")
    predict_on_route: bool = Field(
        default=True, description="blocks on their way to a rank count as held: siblings of a burst land together"
    )
    approximate_ttl_s: float = Field(
        120.0, ge=1, le=86_400, description="how long a routed block counts at a rank without events; costs memory"
    )
    approximate_blocks_max: int = Field(
        1 << 18,
        ge=1,
        le=1 << 26,
        description="routed blocks that count at one rank, and no more than its total_kv_blocks; costs memory",
    )

    @field_validator("mode")
    @classmethod
    def _is_a_mode(cls, mode: str, info: ValidationInfo) -> str:
        allowed = (*MODES, *info.data.get("user_modes", ()))
        if mode not in allowed:
            raise ValueError(f"allowed {', '.join(allowed)}")
        return mode

    def affinity_limits(self) -> AffinityLimits:
        """Return how sessions are remembered."""
        return AffinityLimits(idle_s=self.affinity_idle_s, sessions_max=self.affinity_sessions_max)

    def approximate(self) -> ApproximateLimits:
        """Return the bounds of the approximate index."""
        return ApproximateLimits(ttl_s=self.approximate_ttl_s, blocks_max=self.approximate_blocks_max)

    def policy(self) -> Policy:
        """Return the policy that decisions are taken with."""
        return _picked(self, Policy, parameters=_picked(self, CostParameters))


class LedgerSection(Section):
    """Promised work."""

    lease_s: float = Field(300.0, ge=1, le=86_400, description="how long a booking lives of which nothing is heard")
    replicas: bool = Field(
        default=True,
        description="exchange bookings with the other routers of the fleet; without, their load is what engines report",
    )


class QueueSection(Section):
    """Admission."""

    inflight_requests_max: int = Field(8192, ge=1, le=1_000_000, description="beyond it requests are refused with 503")
    threshold: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="requests wait while every rank that may take them has more uncached tokens queued than this x"
        " max_num_batched_tokens; none: nobody waits; smaller leaves the choice of a rank open for longer",
    )
    policy: QueuePolicy = Field(
        "fcfs", description="who goes first of a tenant's: the first come, the shortest, the most urgent"
    )
    wait_s: float = Field(30.0, gt=0, le=3600, description="how long a request may wait; then it is refused with 503")
    ttft_default_s: float = Field(10.0, gt=0, le=3600, description="edf: the target of requests that state none")
    requests_max: int = Field(2048, ge=1, le=1_000_000, description="requests that wait; beyond it 503; memory")
    tokens_max: int = Field(
        16_000_000,
        ge=1,
        le=1 << 40,
        description="uncached tokens that wait; beyond it 503; more lets requests wait longer",
    )
    tenant_requests_max: int = Field(
        0, ge=0, le=1_000_000, description="requests of one tenant that wait; beyond it 429; 0: no bound of its own"
    )
    tenant_tokens_max: int = Field(
        0,
        ge=0,
        le=1 << 40,
        description="uncached tokens of one tenant that wait; beyond it 429; 0: no bound of its own",
    )
    tenants_max: int = Field(256, ge=1, le=4096, description="tenants that wait apart; the others share one turn; CPU")
    fair_share_by: FairShareBy = Field("none", description="what tells tenants apart")
    fair_share_header: str = Field(
        "x-tenant-id", pattern=r"^[a-z0-9-]{1,64}$", description="whose value names a tenant"
    )
    fair_share_quantum_tokens: int = Field(
        2048,
        ge=1,
        le=1 << 24,
        description="uncached tokens a tenant may have a round; more serves it longer at a stretch",
    )
    fair_share_weights: dict[str, float] = Field(
        {}, description="by header value: tenants that have another share of a round than 1, 0.001..1000"
    )

    @field_validator("fair_share_header")
    @classmethod
    def _is_no_secret(cls, header: str) -> str:
        if header in SECRET_HEADERS:
            raise ValueError(f"found {header}, whose values are secrets; allowed any other, or fair_share_by: api_key")
        return header

    @field_validator("fair_share_weights")
    @classmethod
    def _are_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for tenant, weight in weights.items():
            if not _WEIGHT_MIN <= weight <= _WEIGHT_MAX:
                raise ValueError(f"{tenant}: found {weight}, allowed {_WEIGHT_MIN}..{_WEIGHT_MAX}")
        return weights

    def limits(self) -> QueueLimits:
        """Return how requests wait."""
        shares = FairShareLimits(quantum_tokens=self.fair_share_quantum_tokens, weights=dict(self.fair_share_weights))
        return _picked(self, QueueLimits, fair_share=shares)


class FailuresSection(Section):
    """What is done when a worker fails."""

    connect_s: float = Field(2.0, gt=0, le=60, description="how long a connection may take")
    first_byte_s: float = Field(120.0, gt=0, le=3600, description="how long an answer may take to begin")
    whole_s: float = Field(
        600.0, gt=0, le=86_400, description="how long an answer that is not streamed may take to begin: it comes whole"
    )
    between_bytes_s: float = Field(60.0, gt=0, le=3600, description="how long an answer may pause")
    total_s: float = Field(
        3600.0, gt=0, le=86_400, description="how long an answer may take from its request to its end"
    )
    retry_limit: int = Field(2, ge=0, le=16, description="other ranks tried before the first byte")
    breaker_failures: int = Field(
        3,
        ge=1,
        le=100,
        description="failures of a rank in a row that open its breaker; a failed connection does at once",
    )
    breaker_window_s: float = Field(60.0, gt=0, le=3600, description="within which they have to lie")
    breaker_open_s: float = Field(
        10.0, ge=0, le=3600, description="how long a failed rank is left alone; doubled while it goes on failing"
    )
    breaker_open_s_max: float = Field(120.0, ge=0, le=86_400, description="the longest that it is left alone")
    retry_after_s_max: float = Field(
        30.0, ge=0, le=3600, description="the longest that a busy rank (429, 503) is left alone at its own word"
    )

    def breakers(self) -> BreakerLimits:
        """Return when a breaker opens, and for how long."""
        return BreakerLimits(
            failures=self.breaker_failures,
            window_s=self.breaker_window_s,
            open_s=self.breaker_open_s,
            open_s_max=max(self.breaker_open_s, self.breaker_open_s_max),
            retry_after_s_max=self.retry_after_s_max,
        )


class TokensSection(Section):
    """Text to tokens."""

    text: str = Field("byte", description="tokenizer and template: `byte`, or a local model directory")
    encoder: Wanted = Field(
        "auto", description="hf: tokenizers; fast: fastokens, refused where not equal; auto: fast where it is equal"
    )
    cache_bytes_max: int = Field(
        256 << 20, ge=0, le=1 << 40, description="chats encoded before, of which only what is new is encoded; memory"
    )
    threads: int = Field(1, ge=1, le=64, description="threads that encode long texts; more costs cores")
    off_loop_bytes: int = Field(
        0, ge=0, le=1 << 30, description="longer new text is left to the threads; 0: 4 KiB with hf, else 64 KiB"
    )
    waiting_bytes_max: int = Field(
        64 << 20, ge=1024, le=1 << 34, description="text that may wait for them; beyond it requests get 503"
    )
    always: bool = Field(default=False, description="encode also in modes that read no overlap; costs CPU")

    def limits(self) -> PromptLimits:
        """Return the bounds of encoding."""
        return _picked(self, PromptLimits)


class PoolsSection(Section):
    """Pools of workers; it takes no fields yet."""


class JournalSection(Section):
    """The journal on the log, and the decisions kept for people."""

    decisions_max: int = Field(1000, ge=1, le=1_000_000, description="newest decisions that can be explained; memory")
    enabled: bool = Field(default=True, description="write the journal: without it no decision can be replayed")
    router: str = Field("", pattern=r"^[a-z0-9-]{0,64}$", description="this router's name there; empty: made at start")
    max_age_s: float = Field(86_400.0, ge=1, le=30 * 86_400, description="how long KV_JOURNAL keeps; costs disk")
    max_bytes: int = Field(
        512 << 20, ge=1 << 20, le=1 << 40, description="what KV_JOURNAL keeps of all routers, bytes of disk"
    )
    buffer_records_max: int = Field(
        65_536, ge=64, le=10_000_000, description="records that wait for the log; beyond it the oldest are lost; memory"
    )


class RouterSettings(Settings):
    """All of it."""

    nats: NatsSection = NatsSection()
    data: DataSection = DataSection()
    control: ControlSection = ControlSection()
    index: IndexSection = IndexSection()
    policy: PolicySection = PolicySection()
    ledger: LedgerSection = LedgerSection()
    queue: QueueSection = QueueSection()
    failures: FailuresSection = FailuresSection()
    tokens: TokensSection = TokensSection()
    pools: PoolsSection = PoolsSection()
    journal: JournalSection = JournalSection()
    telemetry: TelemetrySection = TelemetrySection()
