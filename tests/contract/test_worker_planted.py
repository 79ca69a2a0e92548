"""The contract suite of workers fails on bugs that are planted in a worker, and on each for its own reason."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from kv_protocol.fleet import WorkerRegistered
from tests.contract import test_worker as facts
from tests.contract import test_worker_roles as role_facts
from tests.contract import workers
from tests.contract.worker_kinds import KINDS
from tests.contract.workers import Ground, ground
from tests.integration.agent_http import COMPLETIONS
from worker_agent import serve
from worker_agent.core.consolidation import Consolidation
from worker_agent.core.engine import EngineOutput, EngineRequest
from worker_agent.engines.simulated import SimulatedEngine
from worker_agent.load_reports import LoadReports
from worker_agent.membership import Membership

__all__ = ["ground"]

KIND = "simulated"
Patch = pytest.MonkeyPatch
going_on: list[AsyncGenerator[EngineOutput, None]] = []
"""What nobody ends."""
Fact = Callable[[Ground], Awaitable[None]]


# ---------------------------------------------------------------------------------------------------- what is planted
def role_is_not_registered(patch: Patch) -> None:
    registration = serve._registration

    def forgetful(worker: Any, port: int) -> WorkerRegistered:
        return msgspec.structs.replace(registration(worker, port), role="aggregated")

    patch.setattr(serve, "_registration", forgetful)


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
        going_on.append(generate(self, request))
        async for output in going_on[-1]:
            yield output

    patch.setattr(SimulatedEngine, "generate", unmoved)


def nobody_is_told_of_draining(patch: Patch) -> None:
    async def silent(_: Membership) -> bool:
        return True

    patch.setattr(Membership, "drain", silent)


def a_removal_is_forgotten(patch: Patch) -> None:
    on_payload = Consolidation.on_payload

    def deaf(self: Consolidation, sequence: int, payload: bytes, *origin: Any) -> Any:
        return on_payload(self, sequence, payload.replace(b"BlockRemoved", b"BlockRemovex"), *origin)

    patch.setattr(Consolidation, "on_payload", deaf)


def nothing_is_said_of_the_cache(patch: Patch) -> None:
    generate = SimulatedEngine.generate

    async def silent(self: SimulatedEngine, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        async for output in generate(self, request):
            yield msgspec.structs.replace(output, cached_tokens=0)

    patch.setattr(SimulatedEngine, "generate", silent)


# ------------------------------------------------------------------------------------------------- what must find it
def of_one(fact: Callable[..., Awaitable[None]], *arguments: Any) -> Fact:
    """Return the fact, asked of a worker of its own."""

    async def asked(ground: Ground) -> None:
        async with KINDS[KIND].start(ground, "aggregated", "planted") as worker:
            await fact(worker, *arguments)

    return asked


def of_role(fact: Callable[..., Awaitable[None]], *arguments: Any) -> Fact:
    """Return the fact, which starts its workers itself."""

    async def asked(ground: Ground) -> None:
        await fact(ground, *arguments)

    return asked


JOINS = of_role(role_facts.test_it_joins_by_its_role_and_takes_its_leave, KIND, "prefill")
TWO = of_role(role_facts.test_two_workers_say_what_one_says, KIND, KIND, COMPLETIONS)
RANKS = of_one(facts.test_the_rank_that_computed_a_prompt_is_the_one_that_is_known_to_hold_it)
LOAD = of_one(facts.test_load_rises_with_a_request_and_falls_when_its_client_goes)
STOPS = of_role(facts.test_asked_to_stop_it_ends_what_it_began_and_takes_its_leave, KIND)
CACHED = of_one(facts.test_the_second_of_two_equal_prompts_is_found_in_the_cache)
PROOF = of_one(facts.test_the_index_holds_what_the_mirror_holds_after_any_traffic)

PLANTED: list[tuple[Callable[[Patch], None], Fact, str]] = [
    (role_is_not_registered, JOINS, "aggregated"),
    (handoff_is_dropped, TWO, "disaggregated_params"),
    (events_are_another_rank_s, RANKS, "0"),
    (load_is_never_reported, LOAD, "load that has risen"),
    (cancelled_requests_run_on, LOAD, "load that has fallen"),
    (nobody_is_told_of_draining, STOPS, "WorkerDraining"),
    (nothing_is_said_of_the_cache, CACHED, "0"),
    (a_removal_is_forgotten, PROOF, ""),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.interpreted
@pytest.mark.parametrize(("plant", "fact", "why"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
async def test_the_suite_fails_on_a_planted_bug(
    plant: Callable[[Patch], None], fact: Fact, why: str, ground: Ground, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(workers, "WAIT_S", 2.0)
    with pytest.raises((AssertionError, KeyError, BaseExceptionGroup)) as caught:
        await fact(ground)
    assert why in causes(caught.value)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fact", [JOINS, TWO, RANKS, LOAD, STOPS, CACHED, PROOF])
async def test_the_suite_finds_nothing_where_nothing_is_planted(fact: Fact, ground: Ground) -> None:
    await fact(ground)


def causes(error: BaseException) -> str:
    """Return what all the errors in this one say."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(causes(each) for each in error.exceptions)
    return f"{type(error).__name__}: {error}"
