"""The settings of the journal."""

from pydantic import Field

from kv_runtime.config.sections import Section


class JournalSection(Section):
    """The journal on the log, and the decisions kept for people."""

    decisions_max: int = Field(1000, ge=1, le=1_000_000, description="newest decisions that can be explained; memory")
    enabled: bool = Field(default=True, description="write the journal: without it no decision can be replayed")
    router: str = Field("", pattern=r"^[a-z0-9-]{0,64}$", description="this router's name there; empty: made at start")
    max_age_s: float = Field(86_400.0, ge=1, le=30 * 86_400, description="how long KV_JOURNAL keeps; costs disk")
    max_bytes: int = Field(
        512 << 20, ge=1 << 20, le=1 << 40, description="what KV_JOURNAL keeps of all routers, bytes of disk"
    )
