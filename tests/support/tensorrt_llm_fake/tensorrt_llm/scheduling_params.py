"""Where a request is to be computed. Source: `tensorrt_llm/scheduling_params.py` @ 3699edad."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """The attention-DP rank that is asked for, and whether another may take the request."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool = True
    agent_hierarchy: list[tuple[str, int]] | None = None
