"""Shadows in a router: the newest decisions are evaluated in batches; endpoints and metrics.

    every `PERIOD_S`        the newest decisions not yet read are read from `DecisionLog`, `WAITING_MAX` at most: each
                            is evaluated by all shadows while the budget allows it; the rest is skipped and counted.
                            After `SLICE_S` the event loop gets a turn
    GET    /v1/shadows      the shadows and their figures      PUT  /v1/shadows    sets others, until a restart
    DELETE /v1/shadows      sets the configured ones again

Each request adds `budget_us` to an allowance, from which the time of evaluations is subtracted. They begin only while
the allowance is above 0, so that all time spent is at most `requests * budget_us` plus one evaluation. What is not used
is kept, up to the allowance of `KEPT_REQUESTS` requests.

Figures begin anew whenever the shadows or the policy in force change: they compare two policies. Shadows that were set
over HTTP do not survive a restart; those of the configuration do.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import thread_time
from typing import Any

import msgspec
import structlog
from aiohttp import web
from pydantic import Field, ValidationError, field_validator

from kv_protocol.errors import UNDECODABLE
from kv_protocol.journal import PolicyChanged
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import Section
from kv_runtime.http.answers import BadRequest, error_response, json_response
from kv_runtime.supervise import until
from kv_runtime.telemetry import Family, Mean, RateLimitedLog, counter, gauge, summary
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.policy_config import field_of, refused
from router.decision.policy_store import fields_of, swapped
from router.decision.routing import Routing
from router.decision.verdict import Verdict
from router.shadows.comparison import SHADOW_NAME, Comparison, Pairs, ShadowReport, Tally, compared, merged

SHADOWS_MAX = 8
BUDGET_US = 50.0
KEPT_REQUESTS = 256
WAITING_MAX = 512
"""How many decisions may wait for their evaluation; fewer if the log keeps less."""
PERIOD_S = 0.01
SLICE_S = 0.0005
"""Evaluations block the event loop at most this long, plus the time of one decision."""

_log = structlog.get_logger("router")


class ShadowPolicySection(Section):
    """One shadow: its name, and the fields in which its policy differs from the policy in force."""

    name: str = Field(pattern=SHADOW_NAME, description="its name in metrics; each name once")
    policy: dict[str, Any] = Field(
        min_length=1, description="fields of the section policy that differ from the policy in force"
    )


class ShadowSection(Section):
    """Policies that decide beside the one in force, without effect ([WHAT_IF](../WHAT_IF.md))."""

    policies: tuple[ShadowPolicySection, ...] = Field(
        (), max_length=SHADOWS_MAX, description="shadows, in this order; more take more of budget_us"
    )
    budget_us: float = Field(
        BUDGET_US,
        gt=0,
        le=10_000,
        description="CPU time that all shadows may take, in microseconds a request on average; beyond it decisions are"
        " skipped, and counted",
    )

    @field_validator("policies")
    @classmethod
    def _have_names_of_their_own(cls, policies: tuple[ShadowPolicySection, ...]) -> tuple[ShadowPolicySection, ...]:
        names = [each.name for each in policies]
        if len(set(names)) < len(names):
            raise ValueError(f"found names {', '.join(names)}, allowed each name once")
        return policies

    def replaced(self, given: Mapping[str, Any]) -> "ShadowSection":
        """Return the section with these fields; a budget that is not given stays. Raises pydantic's ValidationError."""
        return ShadowSection(**{"budget_us": self.budget_us, **given})

    def resolved(self, live: Policy, modes: Mapping[str, Mode]) -> dict[str, Policy]:
        """Return the policies by name: the live one with each shadow's fields.

        Raises:
            ConfigurationError: a name is no field of a policy, or a value is not allowed.
        """
        found, problems = dict[str, Policy](), list[str]()
        for each in self.policies:
            try:
                found[each.name] = swapped(live, each.policy, modes, replace_all=False)
            except ConfigurationError as error:
                problems += [f"shadow.policies: {each.name}: {problem}" for problem in error.problems]
        if problems:
            raise ConfigurationError(problems)
        return found


class Shadows:
    """The shadows of one router."""

    def __init__(self, routing: Routing, configured: ShadowSection, timer: Callable[[], float] = thread_time) -> None:
        """Compare the shadows with the policy in force from now on.

        `timer` measures the CPU time of evaluations, in seconds.

        Raises:
            ConfigurationError: a shadow's fields are not allowed.
        """
        self._routing, self._state, self._clock, self._timer = routing, routing.state, routing.clock, timer
        self._configured = configured
        self._failures = RateLimitedLog(_log, self._clock)
        self._changed_policies = asyncio.Event()
        self.change(configured)
        routing.listeners[PolicyChanged].append(self._on_policy_changed)

    def change(self, section: ShadowSection) -> None:
        """Compare these shadows with the policy in force from now on.

        Raises:
            ConfigurationError: a field is not allowed; nothing has changed.
        """
        live = self._state.policy
        self._policies = section.resolved(live, self._state.modes)
        self._section, self._live = section, live
        self.tallies = {each.name: Tally(each.name, each.policy) for each in section.policies}
        self._requests, self._spent_s, self._allowance_s = 0, 0.0, 0.0
        self._seen = self._routing.decisions.added_total
        self._since_s = self._clock.now()
        self._changed_policies.set()

    # ------------------------------------------------------------------------------------------------- decisions

    def _on_policy_changed(self, _: PolicyChanged) -> None:
        """Begin anew if another policy is in force."""
        if self._policies and self._state.policy != self._live:
            self.change(self._section)

    def _skip(self, reason: str, count: int = 1) -> None:
        for tally in self.tallies.values():
            tally.skipped[reason] += count

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate decisions until `stop` is set."""
        await until(stop, self._evaluate_all())

    async def _evaluate_all(self) -> None:
        while True:
            if not self._policies:
                self._changed_policies.clear()
                await self._changed_policies.wait()
            await self._clock.sleep(PERIOD_S)
            while self.evaluate_slice():
                await self._clock.sleep(0)

    def evaluate_slice(self) -> bool:
        """Evaluate the decisions after the last evaluated one, for `SLICE_S` at most; return whether more wait."""
        timer, decisions, budget_s = self._timer, self._routing.decisions, 1e-6 * self._section.budget_us
        began_s = timer()
        waiting = decisions.since(self._seen, WAITING_MAX)
        while waiting:
            lease = waiting.pop()
            new, self._seen = lease.number - self._seen, lease.number
            self._requests += new
            self._allowance_s = min(self._allowance_s + new * budget_s, KEPT_REQUESTS * budget_s)
            self._skip("full", new - 1)
            if self._allowance_s <= 0.0:
                self._skip("budget")
                continue
            one_s = timer()
            for name, tally in self.tallies.items():
                tally.add(self._compared(name, lease.verdict))
            now_s = timer()
            self._spent_s += now_s - one_s
            self._allowance_s -= now_s - one_s
            if now_s - began_s >= SLICE_S:
                break
        return bool(waiting)

    def _compared(self, name: str, verdict: Verdict) -> Comparison | str:
        """Return the comparison, or why there is none: one of `SKIPS`."""
        try:
            return compared(self._state, verdict, self._live, self._policies[name])
        except Exception as error:  # noqa: BLE001 - a user's mode may raise anything; it is the shadow's failure alone
            self._failures.warning("shadow_failed", key=name, shadow=name, reason=f"{type(error).__name__}: {error}")
            return "failed"

    def beside(self, verdict: Verdict) -> list[dict[str, Any]]:
        """Return what each shadow chooses in the place of a decision; empty for one before the last `change`."""
        if verdict.now_s < self._since_s:
            return []
        return [{"name": name, **_shown(self._compared(name, verdict))} for name in self._policies]

    # ------------------------------------------------------------------------------------------------- endpoints

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the endpoints."""
        return [
            web.get("/v1/shadows", self._show),
            web.put("/v1/shadows", self._put),
            web.delete("/v1/shadows", self._reset),
        ]

    async def _show(self, _: web.Request) -> web.Response:
        return json_response(self.page())

    async def _put(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            given = msgspec.json.decode(body, type=dict[str, Any])
            self.change(self._section.replaced(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise BadRequest(field_of(first), refused(first, "shadow.")) from error
        except UNDECODABLE as error:
            return error_response(400, f"body: {error}", param="body")
        except ConfigurationError as error:
            return error_response(400, "; ".join(error.problems), param="policies")
        return self._changed()

    async def _reset(self, _: web.Request) -> web.Response:
        self.change(self._configured)
        return self._changed()

    def _changed(self) -> web.Response:
        _log.info("shadows_changed", shadows={each.name: each.policy for each in self._section.policies})
        return json_response(self.page())

    def page(self) -> dict[str, Any]:
        """Return the answer of `/v1/shadows`."""
        return {
            "live": fields_of(self._state.policy),
            "budget_us": self._section.budget_us,
            "requests": self._requests,
            "spent_us": 1e6 * self._spent_s / max(1, self._requests),
            "shadows": [msgspec.to_builtins(tally.report()) for tally in self.tallies.values()],
        }

    def families(self) -> Iterator[Family]:
        """Yield the metrics of shadows; sums are of the live choices and of the shadow's for the same requests."""
        tallies = self.tallies.values()
        decisions = [
            ((each.name, verdict), getattr(each, verdict)) for each in tallies for verdict in ("agree", "differ")
        ]
        meaning = "Decisions of a shadow policy, by whether it chose the live policy's rank"
        yield counter("shadow_decisions", meaning, ("shadow", "verdict"), decisions)
        skipped = [((each.name, reason), count) for each in tallies for reason, count in each.skipped.items()]
        yield counter(
            "shadow_skipped", "Live decisions that a shadow did not take, by cause", ("shadow", "reason"), skipped
        )
        choices, of_these = ("shadow", "choice"), "at the rank of each choice, of requests with a shadow's decision"
        ttfts = [((each.name,), each.pairs["ttft_gain_s"]) for each in tallies]
        yield summary("shadow_predicted_ttft_seconds", f"Predicted TTFT {of_these}", choices, _means(ttfts))
        cached = [((each.name,), each.pairs["cached_blocks_gain"]) for each in tallies]
        yield summary("shadow_cached_blocks", f"Blocks expected {of_these}", choices, _means(cached))
        costs = [((each.name, of), each.pairs[f"{of}_cost_gain_ms"]) for each in tallies for of in ("live", "own")]
        meaning = "Cost of each choice, under the live policy's cost and the shadow's own"
        yield summary("shadow_cost_seconds", meaning, ("shadow", "cost", "choice"), _means(costs, 1e-3))
        yield counter("shadow_requests", "Decisions offered to shadows", rows=[((), self._requests)])
        yield counter("shadow_spent_seconds", "Time that shadows took to decide", rows=[((), self._spent_s)])
        meaning = "Time that all shadows may take for a request, on average"
        yield gauge("shadow_budget_seconds", meaning, rows=[((), 1e-6 * self._section.budget_us)])


def pooled_page(pages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one answer, made of the answers of several processes that have the same shadows."""
    requests = sum(page["requests"] for page in pages)
    by_name = dict[str, list[ShadowReport]]()
    for page in pages:
        for each in page["shadows"]:
            by_name.setdefault(each["name"], []).append(msgspec.convert(each, ShadowReport))
    return {
        **pages[0],
        "requests": requests,
        "spent_us": sum(page["spent_us"] * page["requests"] for page in pages) / max(1, requests),
        "shadows": [msgspec.to_builtins(merged(reports)) for reports in by_name.values()],
    }


def _shown(found: Comparison | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"skipped": found}
    fields = found._asdict()
    return {**fields.pop("rank")._asdict(), **fields}


def _means(
    found: Iterable[tuple[tuple[str, ...], Pairs]], factor: float = 1.0
) -> Iterator[tuple[tuple[str, ...], Mean]]:
    for labels, pairs in found:
        for choice, total in (("live", pairs.live), ("shadow", pairs.shadow)):
            mean = Mean()
            mean.count, mean.total = pairs.count, factor * total
            yield (*labels, choice), mean
