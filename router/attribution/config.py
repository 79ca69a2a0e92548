"""The section `report`: what the report of savings keeps apart."""

from typing import Annotated

from pydantic import Field

from kv_runtime.config.sections import Section
from router.attribution.attribution import AttributionLimits

_LIMITS = AttributionLimits()
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Title = Annotated[str, Field(min_length=1, max_length=64)]


class ReportSection(Section):
    """What prompts' reuse saved, by model, tenant, LoRA adapter and prefix family."""

    family_blocks: int = Field(
        _LIMITS.family_blocks,
        ge=1,
        le=1024,
        description="prompts that begin with the same blocks, so many, are one prefix family; more tells longer system"
        " prompts apart, and makes more families",
    )
    families: dict[Hash, Title] = Field(
        {}, max_length=1024, description="titles of prefix families, by the hash that the report shows"
    )

    def limits(self) -> AttributionLimits:
        """Return the bounds of the sums."""
        return AttributionLimits(family_blocks=self.family_blocks)
