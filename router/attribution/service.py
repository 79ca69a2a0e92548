"""What this router's requests saved since it started: the report of `GET /v1/report`, and the same sums as metrics.

The metrics name the `SHOWN_MAX` most requested models, tenants, adapters and families. A name that is pushed out of its
row and comes back begins at 0 again, as a counter does after a restart. The processes of a router show different names,
so each has its own series by name: a sum over processes would fall when one of them no longer shows the name.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field

from kv_runtime.clock import Clock
from kv_runtime.config.sections import Section
from kv_runtime.telemetry import Family, Sample, by_name, counter
from router.attribution.report import FAMILY_BLOCKS, PENDING_MAX, ROWS_MAX, Figures, SavingsReport, report_of
from router.native import built

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Title = Annotated[str, Field(min_length=1, max_length=64)]
SHOWN_MAX = 20
_NS_PER_S = 1e9


class ReportSection(Section):
    """What prompts' reuse saved, by model, tenant, LoRA adapter and prefix family."""

    family_blocks: int = Field(
        FAMILY_BLOCKS,
        ge=1,
        le=1024,
        description="prompts that begin with the same blocks, so many, are one prefix family; more tells longer system"
        " prompts apart, and makes more families",
    )
    families: dict[Hash, Title] = Field(
        {}, max_length=1024, description="titles of prefix families, by the hash that the report shows"
    )

    def attribution(self) -> built.Attribution:
        """Return new sums, of no request yet."""
        return built.Attribution(ROWS_MAX, self.family_blocks, PENDING_MAX)


class Savings:
    """What a core's decisions save: from the creation of this object on, the core sums that up."""

    def __init__(self, settings: ReportSection, core: built.Core, clock: Clock, process: str = "") -> None:
        """`process` names the process in metrics, if the router has several."""
        self._settings, self._clock, self._process = settings, clock, process
        self._since = iso(clock.wall_ns())
        self.attribution = core.attribution = settings.attribution()

    def report(self) -> SavingsReport:
        """Return the report as of now."""
        until = iso(self._clock.wall_ns())
        return report_of(self.attribution, "router", self._since, until, self._settings.families)

    def families(self) -> Iterator[Family]:
        """Yield the sums by name and process; `by="all"` is the total, which has no process."""
        report, process = report_of(self.attribution), self._process
        named: list[tuple[tuple[str, ...], Figures]] = [(("all", "", ""), report.total)]
        for dimension, top in report.by.items():
            named += [((dimension, row.name, process), row) for row in top.rows[:SHOWN_MAX]]
        labels = ("by", "name", "process")
        for name, meaning, field in (
            ("requests", "Requests that were answered, of those with an encoded prompt", "requests"),
            ("prompt_tokens", "Tokens of their prompts", "prompt_tokens"),
            ("baseline_tokens", "Prompt tokens that a candidate drawn evenly would have reused", "baseline_tokens"),
            ("foregone_tokens", "Prompt tokens that another candidate was expected to hold, and the chosen one was not",
             "foregone_tokens"),
            ("baseline_prefill_seconds", "Prefill time that a candidate drawn evenly would have saved", "baseline_s"),
        ):  # fmt: skip
            yield counter(f"savings_{name}", meaning, labels, [(at, getattr(sums, field)) for at, sums in named])
        for name, meaning, label, whole, part, (of_it, rest) in (
            ("reused_tokens",
             "Prompt tokens that a cache provided: as the worker reported, or as predicted if it did not",
             "known", "reused_tokens", "reported_tokens", ("reported", "predicted")),
            ("prefill_seconds",
             "Prefill time that the reused tokens saved, by the rank's learnt rate or the reference engine's",
             "rate", "saved_s", "learnt_s", ("learnt", "reference")),
        ):  # fmt: skip
            rows = list[Sample]()
            for at, sums in named:
                of_part = getattr(sums, part)
                rows += [((*at, of_it), of_part), ((*at, rest), getattr(sums, whole) - of_part)]
            yield counter(f"savings_{name}", meaning, (*labels, label), rows)
        meaning = "Decisions that are in none of these sums, by reason; another may have answered the request"
        counts = {reason: count for reason, count in report.not_counted.items() if reason != "pending"}
        yield counter("savings_not_counted", meaning, ("reason",), by_name((), counts))


def iso(wall_ns: int) -> str:
    """Return a time since 1970 as text: UTC, to the millisecond."""
    return datetime.fromtimestamp(wall_ns / _NS_PER_S, UTC).isoformat(timespec="milliseconds")
