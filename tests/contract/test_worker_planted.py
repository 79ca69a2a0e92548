"""The contract suite of workers fails on bugs that are planted in a worker, and on each for its own reason."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from kv_protocol.fleet import Heartbeat, WorkerRegistered
from tests.contract import test_worker as facts
from tests.contract import test_worker_roles as role_facts
from tests.contract import worker_kinds, workers
from tests.contract.worker_kinds import KINDS
from tests.contract.workers import Ground, ground
from tests.support.planting import inside, plant
from tests.system.integration.agent_http import COMPLETIONS
from worker_agent.api.forwarding import engine_headers
from worker_agent.commands import serve
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.types import EngineOutput, EngineRequest
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineRemoved, RankEvent
from worker_agent.events.polled_events import PolledEvents
from worker_agent.fleet.membership import Membership
from worker_agent.load.attached import EngineLoads
from worker_agent.load.publisher import LoadReports

pytestmark = pytest.mark.slow

__all__ = ["ground"]

KIND = "simulated"
Patch = pytest.MonkeyPatch
going_on: list[AsyncGenerator[EngineOutput, None]] = []
"""Generations that `cancelled_requests_run_on` leaves open; the reference keeps them from being collected."""
Fact = Callable[[Ground], Awaitable[None]]


async def following(outputs: AsyncGenerator[EngineOutput, None]) -> EngineOutput | None:
    """Return the next output; None at the end."""
    return await anext(outputs, None)


# ---------------------------------------------------------------------------------------------------- what is planted
def role_is_not_registered(patch: Patch) -> None:
    registration = inside(serve, "_registration")

    def forgetful(*given: Any) -> WorkerRegistered:
        registered: WorkerRegistered = registration(*given)
        return msgspec.structs.replace(registered, role="aggregated")

    plant(serve, "_registration", forgetful, patch)


def handoff_is_dropped(patch: Patch) -> None:
    generate = SimulatedEngine.generate

    async def dropping(self: SimulatedEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        async for output in generate(self, request):
            yield msgspec.structs.replace(output, handoff=None)

    patch.setattr(SimulatedEngine, "generate", dropping)


def events_are_another_rank_s(patch: Patch) -> None:
    kv_events = SimulatedEngine.kv_events

    def swapped(self: SimulatedEngine, timeout_s: float) -> list[dict[str, Any]]:
        told = kv_events(self, timeout_s)
        return [event | {"attention_dp_rank": 1 - (event.get("attention_dp_rank") or 0)} for event in told]

    patch.setattr(SimulatedEngine, "kv_events", swapped)


def load_is_never_reported(patch: Patch) -> None:
    async def silent(_: LoadReports, stop: asyncio.Event) -> None:
        await stop.wait()

    patch.setattr(LoadReports, "run", silent)


def cancelled_requests_run_on(patch: Patch) -> None:
    generate = SimulatedEngine.generate

    async def unmoved(self: SimulatedEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        going_on.append(inner := generate(self, request))
        while (output := await asyncio.shield(following(inner))) is not None:
            yield output

    patch.setattr(SimulatedEngine, "generate", unmoved)
    patch.setattr(worker_kinds, "SPEED", 1.0)  # it would end by itself soon


def draining_is_not_told(patch: Patch) -> None:
    async def silent(_: Membership) -> bool:
        return True

    patch.setattr(Membership, "drain", silent)


def removals_are_not_told(patch: Patch) -> None:
    translate = TrtllmRules.translate

    def deaf(self: TrtllmRules, engine_events: object) -> list[RankEvent]:
        return [each for each in translate(self, engine_events) if not isinstance(each.event, EngineRemoved)]

    patch.setattr(TrtllmRules, "translate", deaf)


def the_mirror_is_not_what_was_published(patch: Patch) -> None:
    heartbeat = Consolidation.heartbeat

    def other(self: Consolidation, *arguments: Any) -> Heartbeat:
        beat = heartbeat(self, *arguments)
        tiers = tuple(msgspec.structs.replace(each, digest=each.digest ^ 1) for each in beat.tiers)
        return msgspec.structs.replace(beat, tiers=tiers)

    patch.setattr(Consolidation, "heartbeat", other)


def nothing_is_said_of_the_cache(patch: Patch) -> None:
    generate = SimulatedEngine.generate

    async def silent(self: SimulatedEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        async for output in generate(self, request):
            yield msgspec.structs.replace(output, cached_tokens=0)

    patch.setattr(SimulatedEngine, "generate", silent)


def load_is_never_read(patch: Patch) -> None:
    async def blind(_: EngineLoads, stop: asyncio.Event) -> None:
        await stop.wait()

    patch.setattr(EngineLoads, "run", blind)


def polled_events_are_lost(patch: Patch) -> None:
    take = PolledEvents.take

    def forgetful(self: PolledEvents, timeout_s: float) -> list[Any]:
        take(self, timeout_s)
        return []

    patch.setattr(PolledEvents, "take", forgetful)


def the_rank_is_not_passed_on(patch: Patch) -> None:
    def forgetful(headers: Any, *, dp_rank: int | None, api_key: str) -> Any:
        return engine_headers(headers, dp_rank=dp_rank and 0, api_key=api_key)

    patch.setattr("worker_agent.api.forwarder.engine_headers", forgetful)


# ------------------------------------------------------------------------------------------------- what must find it
def of_one(fact: Callable[..., Awaitable[None]], kind: str = KIND) -> Fact:
    """Return the fact, asked of a worker of its own."""

    async def asked(ground: Ground) -> None:
        async with KINDS[kind].start(ground, "aggregated", "planted") as worker:
            await fact(worker)

    return asked


def of_role(fact: Callable[..., Awaitable[None]], *arguments: Any) -> Fact:
    """Return the fact, which starts its workers itself."""

    async def asked(ground: Ground) -> None:
        await fact(ground, *arguments)

    return asked


JOINS = of_role(role_facts.test_it_joins_by_its_role_and_takes_its_leave, KIND, "prefill")
TWO = of_role(role_facts.test_two_workers_say_what_one_says, KIND, KIND, COMPLETIONS)
COMPUTED = facts.test_the_rank_that_computed_a_prompt_is_the_one_that_is_known_to_hold_it
RANKS = of_one(COMPUTED)
RISES = facts.test_load_rises_with_a_request_and_falls_when_its_client_goes
LOAD = of_one(RISES)
STOPS = of_role(facts.test_asked_to_stop_it_ends_what_it_began_and_takes_its_leave, KIND)
CACHED = of_one(facts.test_the_second_of_two_equal_prompts_is_found_in_the_cache)
PROOF = of_one(facts.test_the_index_holds_what_the_mirror_holds_after_any_traffic)

PLANTED: list[tuple[Callable[[Patch], None], Fact, str]] = [
    (role_is_not_registered, JOINS, "aggregated"),
    (handoff_is_dropped, TWO, "disaggregated_params"),
    (events_are_another_rank_s, RANKS, "0"),
    (load_is_never_reported, LOAD, "load that has risen"),
    (cancelled_requests_run_on, LOAD, "load that has fallen"),
    (draining_is_not_told, STOPS, "WorkerDraining"),
    (nothing_is_said_of_the_cache, CACHED, "0"),
    (removals_are_not_told, PROOF, "<= 900"),
    (the_mirror_is_not_what_was_published, PROOF, "equal digests"),
    (load_is_never_read, of_one(RISES, "attached-trtllm-serve"), "load that has risen"),
    (load_is_never_read, of_one(RISES, "attached-vllm"), "load that has risen"),
    (polled_events_are_lost, of_one(COMPUTED, "attached-trtllm-serve"), "blocks in the index"),
    (the_rank_is_not_passed_on, of_one(COMPUTED, "attached-vllm"), "{0: 5, 1: 0}"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("plant", "fact", "why"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
@pytest.mark.planted
async def test_the_suite_fails_on_a_planted_bug(
    plant: Callable[[Patch], None], fact: Fact, why: str, ground: Ground, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(workers, "WAIT_S", 3.0)
    with pytest.raises((AssertionError, KeyError, BaseExceptionGroup)) as caught:
        await fact(ground)
    assert why in causes(caught.value)


def causes(error: BaseException) -> str:
    """Return what all the errors in this one say."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(causes(each) for each in error.exceptions)
    return f"{type(error).__name__}: {error}"
