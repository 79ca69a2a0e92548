"""The router's configuration tree: every section of `interfaces.md`; a section without fields takes none yet."""

from typing import Literal

from pydantic import Field, SecretStr

from kv_runtime.config import ControlSection, IndexSection, NatsSection, Section, Settings, TelemetrySection
from router.core.approximate import ApproximateLimits
from router.core.cost import CostParameters
from router.core.decide import Policy


class DataSection(Section):
    """The data plane: what clients talk to."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    reuse_port: bool = Field(default=False, description="let several routers share the port")
    body_bytes_max: int = Field(64 << 20, ge=1024, le=1 << 30, description="larger bodies are refused with 413")
    worker_token: SecretStr = Field(SecretStr(""), description="bearer token that workers beyond loopback want")
    drain_s: float = Field(30.0, ge=0, le=3600, description="how long running requests may take after a stop")


class PolicySection(Section):
    """How a worker rank is chosen; formulas in `router/core/cost.py`."""

    mode: Literal["kv", "round-robin"] = Field("kv", description="by cost, or in turn")
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

    def approximate(self) -> ApproximateLimits:
        """Return the bounds of the approximate index."""
        return ApproximateLimits(ttl_s=self.approximate_ttl_s, blocks_max=self.approximate_blocks_max)

    def policy(self) -> Policy:
        """Return the policy that decisions are taken with."""
        fields = {name: getattr(self, name) for name in CostParameters.__struct_fields__}
        return Policy(
            mode=self.mode,
            parameters=CostParameters(**fields),
            temperature=self.temperature,
            predict_on_route=self.predict_on_route,
        )


class LedgerSection(Section):
    """Promised work."""

    lease_s: float = Field(300.0, ge=1, le=86_400, description="how long a booking lives of which nothing is heard")


class QueueSection(Section):
    """Admission."""

    inflight_requests_max: int = Field(8192, ge=1, le=1_000_000, description="beyond it requests are refused with 503")


class FailuresSection(Section):
    """What is done when a worker fails."""

    connect_s: float = Field(2.0, gt=0, le=60, description="how long a connection may take")
    first_byte_s: float = Field(120.0, gt=0, le=3600, description="how long an answer may take to begin")
    between_bytes_s: float = Field(60.0, gt=0, le=3600, description="how long an answer may pause")
    retry_limit: int = Field(2, ge=0, le=16, description="other ranks tried before the first byte")
    breaker_open_s: float = Field(10.0, ge=0, le=3600, description="how long a failed worker is left alone")


class TokensSection(Section):
    """Text to tokens."""

    text: str = Field("byte", description="tokenizer and template: `byte`, or a local model directory")


class PoolsSection(Section):
    """Pools of workers; it takes no fields yet."""


class JournalSection(Section):
    """Decisions kept for people."""

    decisions_max: int = Field(1000, ge=1, le=1_000_000, description="newest decisions that can be explained; memory")


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
