"""`GET /v1/planner` and the same numbers as metrics, computed when they are asked for.

    GET /v1/planner?ttft_s=&itl_s=&kept_ratio=    objectives in place of those of the section `planner`

The load is that of this router, and of the replicas that send it their bookings (`ledger.replicas`): each of them
answers for the whole fleet. An autoscaler takes the greatest of their answers, not the sum.
"""

from collections.abc import Iterator
from typing import Any

from aiohttp import web
from pydantic import Field, ValidationError

from kv_protocol.journal import OutcomeKnown
from kv_runtime.config.sections import Section
from kv_runtime.http.answers import BadRequest, json_response
from kv_runtime.telemetry import Family, gauge
from router.decision.policy_config import field_of, refused
from router.decision.routing import Routing
from router.fleet.registry import Worker
from router.planner.plan import Group, GroupPlan, Objectives, Rates, Size, offered

METHOD = "prompts: M/G/k by Lee and Longton's approximation; sequences: M/G/infinity with a limit by rank"
WINDOW_S = 60.0
"""The window of the offered load: an autoscaler asks every 15 to 60 s, and smooths by itself."""
_ANSWERS_MAX = 1000
"""The mean length of answers is over this many of the newest decisions, or `journal.decisions_max` if that is less."""


class PlannerSection(Section):
    """The objectives that advised workers keep."""

    ttft_s: float = Field(1.6, gt=0, le=600, description="a first token within this time is in time")
    itl_s: float = Field(0.1, gt=0, le=60, description="mean seconds between the tokens of an answer that is in time")
    kept_ratio: float = Field(
        0.95, ge=0.5, le=0.9999, description="share that has to be in time; a larger one needs more workers"
    )


class Planner:
    """The plans of all groups, computed when they are asked for."""

    def __init__(self, routing: Routing, settings: PlannerSection) -> None:
        self._routing, self._settings, self._began_s = routing, settings, routing.clock.now()

    def plans(self, settings: PlannerSection) -> list[GroupPlan]:
        """Return the plan of each model and role that has workers, or got requests in the window."""
        now_s, state, objectives = self._routing.clock.now(), self._routing.state, Objectives(**settings.model_dump())
        loads = offered(state.core, WINDOW_S, now_s, self._began_s)
        workers: dict[Group, list[Worker]] = {group: [] for group in loads}
        for worker in state.fleet.workers():
            registration = worker.registration
            if registration.role != "encode":
                known = workers.setdefault(Group(registration.model, registration.role), [])
                if not state.fleet.unfit(worker, now_s):
                    known.append(worker)
        return [
            GroupPlan(group, _size(each), loads[group], self._rates(group), objectives)
            for group, each in sorted(workers.items())
        ]

    def _rates(self, group: Group) -> Rates:
        state, prefills, decodes = self._routing.state, list[float](), list[float]()
        for rank, factors in state.rate_factors().items():
            worker = state.fleet.worker(rank.worker_id)
            if worker is not None and Group(worker.registration.model, worker.registration.role) == group:
                prefills += [factors.prefill] if factors.prefills else []
                decodes += [factors.decode] if factors.decodes else []
        return Rates(_mean(prefills), _mean(decodes), self._output_tokens(group.model))

    def _output_tokens(self, model: str) -> float | None:
        """Return the mean length of the newest answers; None if none is known."""
        newest = self._routing.decisions.newest(_ANSWERS_MAX)
        found = [answered_tokens(each.outcome) for each in newest if each.verdict.request.model == model]
        return _mean([tokens for tokens in found if tokens is not None])

    async def show(self, request: web.Request) -> web.Response:
        """Answer `GET /v1/planner`."""
        try:
            settings = PlannerSection.model_validate({**self._settings.model_dump(), **request.query})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise BadRequest(field_of(first), refused(first)) from error
        return json_response(
            {
                "method": METHOD,
                "window_s": WINDOW_S,
                "objectives": settings.model_dump(),
                "groups": [shown(each) for each in self.plans(settings)],
            }
        )

    def families(self) -> Iterator[Family]:
        """Yield the offered load, what one worker can do, and the present and advised numbers of workers."""
        plans = self.plans(self._settings)
        for name, meaning, values in (
            ("offered_prefill_tokens_per_second", "Prompt tokens to compute that are routed to the workers",
             [each.load.prefill_tokens_per_s for each in plans]),
            ("offered_output_tokens_per_second", "Routed requests a second times the mean length of the newest answers",
             [each.output_tokens_per_s for each in plans]),
            ("worker_prefill_tokens_per_second", "Prompt tokens that one worker can compute, by its learnt rate",
             [each.worker_capacity.prefill_tokens_per_s for each in plans]),
            ("worker_output_tokens_per_second",
             "Tokens that one worker can answer within planner.itl_s, by its learnt rate",
             [each.worker_capacity.output_tokens_per_s for each in plans]),
            ("workers", "Workers that take new work", [each.size.workers for each in plans]),
            ("advised_workers", "Fewest workers that keep the objectives of the section planner",
             [each.advised_workers for each in plans]),
        ):  # fmt: skip
            known = [(each.group, value) for each, value in zip(plans, values, strict=True) if value is not None]
            yield gauge(f"planner_{name}", meaning, ("model", "role"), known)


def shown(found: GroupPlan) -> dict[str, Any]:
    """Return the plan as JSON has it; null: unknown, or not the group's work."""
    load = found.load
    return {
        **found.group._asdict(),
        **found.size._asdict(),
        "offered": {
            "covered_s": load.covered_s,
            "requests_per_s": load.requests_per_s,
            "prefill_tokens_per_s": load.prefill_tokens_per_s,
            "output_tokens_per_s": found.output_tokens_per_s,
            "context_tokens": load.context_tokens,
        },
        "learnt": found.rates._asdict(),
        "worker_capacity": found.worker_capacity._asdict(),
        "predicted": [each._asdict() for each in found.predicted],
        "advised_workers": found.advised_workers,
        "reason": found.reason,
        "unreachable": found.unreachable,
        "unknown": found.unknown,
    }


def answered_tokens(outcome: OutcomeKnown | None) -> float | None:
    """Return the length of an answer: as the worker reported, else by the times of its tokens; None if unknown.

    A mean ITL is (duration - TTFT) / later tokens, so the length of a stream without usage can be computed.
    """
    if outcome is None or outcome.outcome != "ok":
        return None
    if outcome.output_tokens is not None:
        return float(outcome.output_tokens)
    if outcome.ttft_s is None or outcome.duration_s is None or not outcome.itl_s:
        return None
    return 1.0 + (outcome.duration_s - outcome.ttft_s) / outcome.itl_s


def _size(workers: list[Worker]) -> Size:
    registrations = [worker.registration for worker in workers]
    ranks = sum(len(each.dp_ranks) for each in registrations)
    return Size(
        len(registrations),
        max(1, -(-ranks // len(registrations))) if registrations else 1,
        min((each.max_num_seqs for each in registrations if each.max_num_seqs), default=0),
        min((each.total_kv_blocks * each.block_size for each in registrations if each.total_kv_blocks), default=0),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
