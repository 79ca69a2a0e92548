"""Which instance keeps a worker id: the table, row by row."""

import asyncio
import re

import pytest
from msgspec.structs import replace

from kv_protocol.fleet import REMOVED_BY_HAND, FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.ids import checked_worker_id
from tests.support.manual_clock import ManualClock
from tests.system.integration.broker import eventually
from tests.unit.router.samples import registered
from worker_agent.config import AgentSettings, ServedWorkerSection
from worker_agent.fleet.membership import CHECK_PAUSE_S, CHECK_PERIOD_S, Membership
from worker_agent.fleet.worker_id import WorkerId
from worker_agent.fleet.worker_id_rules import NO_CLAIM, NewestMessage, action, drained_by_hand

OWN = registered(instance="own")
OTHER = registered(instance="other", base_url="http://127.0.0.1:2")
FORGED = registered(instance="own", base_url="http://10.6.6.6:1")


def left(instance: str, reason: str = "stopped") -> WorkerLeft:
    return WorkerLeft(worker_id="w0", instance=instance, reason=reason)


@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (NewestMessage(None), "register"),
        (NewestMessage(OWN, 5), "keep"),
        (NewestMessage(FORGED, 5), "replace"),
        (NewestMessage(replace(OWN, ends_drain=True), 5), "keep"),
        (NewestMessage(replace(FORGED, ends_drain=True), 5), "replace"),
        (NewestMessage(replace(OWN, drained=True), 5), "keep"),
        (NewestMessage(WorkerDraining(worker_id="w0", instance="own", by_hand=True), 5), "keep"),
        (NewestMessage(WorkerDraining(worker_id="w0", instance="own"), 5), "replace"),
        (NewestMessage(left("own", REMOVED_BY_HAND), 5), "keep"),
        (NewestMessage(left("own"), 5), "register"),
        (NewestMessage(left("other"), 4), "register"),
        (NewestMessage(OTHER, 6), "register"),
        (NewestMessage(WorkerDraining(worker_id="w0", instance="other"), 6), "register"),
    ],
)
def test_what_is_done_whatever_the_life_of_another_instance(newest: NewestMessage, expected: str) -> None:
    assert {action(newest, "own", OWN, 5, life) for life in ("alive", "silent", "unknown")} == {expected}


@pytest.mark.parametrize("before", [False, True])
def test_a_drain_by_hand_lasts_from_its_event_to_the_registration_that_ends_it(before: bool) -> None:
    by_hand = WorkerDraining(worker_id="w0", instance="own", by_hand=True)
    assert drained_by_hand(by_hand, before=before)
    assert drained_by_hand(replace(OWN, drained=True), before=before)
    assert not drained_by_hand(replace(OWN, ends_drain=True), before=before)
    for other in (OWN, left("own", REMOVED_BY_HAND)):
        assert drained_by_hand(other, before=before) is before


@pytest.mark.parametrize("event", [OTHER, WorkerDraining(worker_id="w0", instance="other")])
@pytest.mark.parametrize("own_claim", [5, NO_CLAIM])
def test_an_earlier_instance_is_given_way_to_if_it_is_alive(event: FleetEvent, own_claim: int) -> None:
    newest = NewestMessage(event, 4)
    actions = {life: action(newest, "own", OWN, own_claim, life) for life in ("alive", "silent", "unknown")}
    assert actions == {"alive": "stop", "silent": "register", "unknown": "wait"}


@pytest.mark.parametrize("host", ["gpu-7.cluster.example", "GPU_7", "", "x" * 200, "-é-"])
def test_without_a_configured_id_each_start_makes_one_that_no_other_has(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    section, named = AgentSettings().worker, ServedWorkerSection(id="w0")
    assert named.identified() == named
    made = {section.identified().id for _ in range(100)}
    assert len(made) == 100
    assert all(checked_worker_id(each) for each in made)
    slug = "-".join(re.findall("[a-z0-9]+", host.lower()))[:48] or "worker"
    assert all(re.fullmatch(f"{slug}-[0-9a-f]{{8}}", each) for each in made)


# ---------------------------------------------------------------- membership
class SlowLog(WorkerId):
    """A worker id that keeps its registration; the log answers while `answers` is set."""

    def __init__(self) -> None:
        self.changed, self.answers, self.checks = asyncio.Event(), asyncio.Event(), 0

    async def register(self, registration: WorkerRegistered) -> bool:  # noqa: ARG002 - the base's name
        self.checks += 1
        await self.answers.wait()
        return False


async def test_a_worker_that_is_withdrawn_and_restored_during_a_check_is_not_registered_before_the_next() -> None:
    log, clock, stop = SlowLog(), ManualClock(), asyncio.Event()
    membership = Membership(OWN, log, clock)
    log.answers.set()
    async with asyncio.timeout(20.0), asyncio.TaskGroup() as group:
        running = group.create_task(membership.run(stop))
        await eventually(lambda: membership.is_registered)
        log.answers.clear()
        while log.checks < 2:
            await clock.advance(CHECK_PAUSE_S + CHECK_PERIOD_S)
        membership.withdraw("its /health does not answer")
        assert not membership.is_registered  # an engine that comes back is described anew
        membership.restore()
        assert not membership.is_registered
        log.answers.set()
        await eventually(lambda: membership.is_registered)
        running.cancel()
