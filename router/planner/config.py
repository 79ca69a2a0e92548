"""The section `planner`: what an autoscaler's inputs are computed for."""

from pydantic import Field

from kv_runtime.config.sections import Section
from router.planner.plan import Objectives


class PlannerSection(Section):
    """The objectives that advised workers keep."""

    ttft_s: float = Field(1.6, gt=0, le=600, description="a first token within this time is in time")
    itl_s: float = Field(0.1, gt=0, le=60, description="mean seconds between the tokens of an answer that is in time")
    kept_ratio: float = Field(0.95, ge=0.5, le=0.9999, description="share that is to be in time; more wants workers")

    def objectives(self) -> Objectives:
        """Return what is to be kept."""
        return Objectives(self.ttft_s, self.itl_s, self.kept_ratio)
