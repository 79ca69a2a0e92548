"""The settings of the queue, and its bounds that are not settings."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from kv_runtime.config.sections import Section
from router.queue.tenants import SECRET_HEADERS

QueuePolicy = Literal["fcfs", "wspt", "edf"]
Weight = Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)]


class QueueSection(Section):
    """Admission."""

    tokens_max: ClassVar[int] = 16_000_000
    """Uncached tokens of all requests that wait: far more than a fleet computes within `wait_s`."""
    tenants_max: ClassVar[int] = 256
    """Tenants with a share of their own; all others share one."""
    ttft_default_s: ClassVar[float] = 10.0
    """edf: the TTFT target of a request that states none; longer than targets of interactive requests."""

    inflight_requests_max: int = Field(8192, ge=1, le=1_000_000, description="beyond it requests are refused with 503")
    threshold: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="requests wait while every rank that may take them has more uncached tokens queued than this x"
        " max_num_batched_tokens; none: no request waits; smaller leaves the choice of a rank open for longer",
    )
    policy: QueuePolicy = Field(
        "fcfs", description="which request of a tenant goes first: the first come, the shortest, the most urgent"
    )
    wait_s: float = Field(30.0, gt=0, le=3600, description="how long a request may wait; then it is refused with 503")
    requests_max: int = Field(2048, ge=1, le=1_000_000, description="requests that wait; beyond it 503; memory")
    tenant_requests_max: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="requests of one tenant that wait; beyond it 429; 0: no bound of its own",
    )
    fair_share_by: str = Field(
        "none",
        pattern=r"^[a-z0-9_-]{1,64}$",
        description="what tells tenants apart: none, api_key (a keyed hash of it), or the name of a header",
    )
    fair_share_weights: dict[str, Weight] = Field(
        {}, description="by tenant: weights other than 1, 0.001..1000; a tenant of weight 2 is served twice the tokens"
    )

    @field_validator("fair_share_by")
    @classmethod
    def _is_no_secret(cls, by: str) -> str:
        if by in SECRET_HEADERS:
            raise ValueError(f"found {by}, its values are secrets; allowed any other, or api_key")
        return by
