"""`GET /v1/report` and the same sums as metrics: what this router's requests saved since it started.

The metrics name the `SHOWN_MAX` most requested models, tenants, adapters and families. A name that is pushed out of its
row and comes back begins at 0 again, as a counter does after a restart. Processes of one router differ in which names
they show, so each has series of its own by name: a sum over those that show a name would fall when one no longer does.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

from aiohttp import web
from pydantic import Field

from kv_runtime.clock import Clock
from kv_runtime.config.sections import Section
from kv_runtime.http.answers import json_response
from kv_runtime.telemetry import Family, Sample, counter
from router.attribution.report import (
    DIMENSIONS,
    AttributionLimits,
    Figures,
    SavingsReport,
    not_counted,
    report_of,
    top_rows,
    total,
)
from router.native import built

_LIMITS = AttributionLimits()
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Title = Annotated[str, Field(min_length=1, max_length=64)]
SHOWN_MAX = 20
_NS_PER_S = 1e9


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


class Savings:
    """Has a core sum up what its decisions save, and serves that as report and metrics."""

    def __init__(
        self,
        settings: ReportSection,
        core: built.Core,
        clock: Clock,
        limits: AttributionLimits | None = None,
    ) -> None:
        """`limits`: others than those of the settings."""
        self._settings, self._clock = settings, clock
        self._since = iso(clock.wall_ns())
        self.attribution = core.attribution = built.Attribution(*(limits or settings.limits()))

    def report(self) -> SavingsReport:
        """Return the report as of now."""
        until = iso(self._clock.wall_ns())
        return report_of(self.attribution, "router", self._since, until, self._settings.families)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the endpoint."""
        return [web.get("/v1/report", self._show)]

    async def _show(self, _: web.Request) -> web.Response:
        return json_response(self.report())


def iso(wall_ns: int) -> str:
    """Return a time since 1970 as text: UTC, to the millisecond."""
    return datetime.fromtimestamp(wall_ns / _NS_PER_S, UTC).isoformat(timespec="milliseconds")


def savings_families(found: built.Attribution, process: str = "") -> Iterator[Family]:
    """Yield the sums by name and process; `by="all"` is the total, which has no process."""
    named: list[tuple[tuple[str, ...], Figures]] = [(("all", "", ""), total(found))]
    for dimension in DIMENSIONS:
        named += [((dimension, row.name, process), row) for row in top_rows(found, dimension).rows[:SHOWN_MAX]]

    def samples(field: str) -> list[Sample]:
        return [(at, float(getattr(sums, field))) for at, sums in named]

    labels = ("by", "name", "process")
    yield counter(
        "savings_requests", "Requests that were answered, of those with an encoded prompt", labels, samples("requests")
    )
    yield counter("savings_prompt_tokens", "Tokens of their prompts", labels, samples("prompt_tokens"))
    yield counter(
        "savings_reused_tokens",
        "Prompt tokens that a cache provided: as the worker reported, or as predicted if it did not",
        (*labels, "known"),
        _in_two(named, "reused_tokens", "reported_tokens", ("reported", "predicted")),
    )
    yield counter(
        "savings_baseline_tokens",
        "Prompt tokens that a candidate drawn evenly would have reused",
        labels,
        samples("baseline_tokens"),
    )
    yield counter(
        "savings_foregone_tokens",
        "Prompt tokens that another candidate was expected to hold, and the chosen one was not",
        labels,
        samples("foregone_tokens"),
    )
    yield counter(
        "savings_prefill_seconds",
        "Prefill time that the reused tokens saved, by the rank's learnt rate or the reference engine's",
        (*labels, "rate"),
        _in_two(named, "saved_s", "learnt_s", ("learnt", "reference")),
    )
    yield counter(
        "savings_baseline_prefill_seconds",
        "Prefill time that a candidate drawn evenly would have saved",
        labels,
        samples("baseline_s"),
    )
    reasons = [((reason,), float(count)) for reason, count in not_counted(found).items() if reason != "pending"]
    yield counter(
        "savings_not_counted",
        "Decisions that are in none of these sums, by reason; another may have answered the request",
        ("reason",),
        reasons,
    )


def _in_two(
    named: Sequence[tuple[tuple[str, ...], Figures]], whole: str, part: str, values: tuple[str, str]
) -> list[Sample]:
    """Return two samples a name: the part of the whole, and the rest of it."""
    found = list[Sample]()
    for at, sums in named:
        of_part = float(getattr(sums, part))
        found += [((*at, values[0]), of_part), ((*at, values[1]), float(getattr(sums, whole)) - of_part)]
    return found
