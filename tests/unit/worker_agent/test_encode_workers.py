"""Which encode worker of the fleet is asked: those known, those left out, and that with the fewest requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from kv_protocol import fleet, subjects
from kv_protocol.fleet import WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.ids import WorkerRank
from tests.support.manual_clock import ManualClock
from tests.unit.router.samples import MODEL, registered
from tests.unit.router.test_feeds import Log
from worker_agent.media.encode_client import SILENT_S, EncodeClient
from worker_agent.media.refusals import MediaRefused
from worker_agent.port.types import EncoderUnavailable


def encoder(name: str, **fields: Any) -> WorkerRegistered:
    return registered(name, **{"role": "encode", "base_url": f"http://10.0.0.1:{9000 + int(name[1:])}"} | fields)


def client(clock: ManualClock | None = None, host: str = "") -> EncodeClient:
    return EncodeClient(clock or ManualClock(), model=MODEL, form="handles", host=host)


@asynccontextmanager
async def followed(workers: EncodeClient, *told: WorkerRegistered, keys: tuple[bytes, ...] = ()) -> AsyncIterator[Log]:
    log: Any = Log(*told)
    stop = asyncio.Event()
    following = asyncio.ensure_future(workers.part(0, log, FleetGate(keys)).run(stop))
    await log.followed.wait()
    try:
        yield log
    finally:
        stop.set()
        await following


def asked(workers: EncodeClient, *tried: str) -> str | None:
    worker = workers.to_ask(tried)
    return None if worker is None else worker.registration.worker_id


async def test_only_encode_workers_are_known_until_they_leave() -> None:
    workers = client()
    async with followed(workers, registered("w1", role="prefill")) as log:
        assert asked(workers) is None
        await log.join(encoder("w2"))
        assert asked(workers) == "w2"
        assert asked(workers, encoder("w2").base_url) is None
        await log.join(WorkerLeft(worker_id="w2", instance="another"))
        assert asked(workers) == "w2"
        await log.join(WorkerLeft(worker_id="w2", instance="w2-1"))
        assert asked(workers) is None


async def test_a_draining_worker_is_not_asked_until_its_drain_is_ended() -> None:
    workers = client()
    async with followed(workers, encoder("w1")) as log:
        await log.join(WorkerDraining(worker_id="w1", instance="w1-1", by_hand=True))
        assert asked(workers) is None
        await log.join(encoder("w1"))
        assert asked(workers) is None
        await log.join(encoder("w1", ends_drain=True))
        assert asked(workers) == "w1"
        await log.join(encoder("w1", instance="w1-2", drained=True))
        assert asked(workers) is None


async def test_where_engines_open_handles_only_workers_of_that_machine_are_asked() -> None:
    workers = client(host="10.0.0.1")
    async with followed(workers, encoder("w1", base_url="http://10.0.0.2:9001")) as log:
        assert asked(workers) is None
        await log.join(encoder("w2"))
        assert asked(workers) == "w2"


async def test_the_worker_with_fewest_requests_in_flight_is_asked_then_the_one_asked_least() -> None:
    workers = client()
    async with followed(workers, encoder("w1"), encoder("w2")):
        order = []
        with ExitStack() as running:
            for _ in range(4):
                worker = workers.to_ask(())
                assert worker is not None
                order.append(worker.registration.worker_id)
                running.enter_context(workers.asking(worker))
        assert order == ["w1", "w2", "w1", "w2"]
        for _ in range(2):
            worker = workers.to_ask(())
            assert worker is not None
            with workers.asking(worker):
                order.append(worker.registration.worker_id)
        assert order[4:] == ["w1", "w2"]
        assert workers.attempts_total == {"ok": 6}


async def test_a_silent_worker_is_asked_last() -> None:
    clock = ManualClock()
    workers = client(clock)
    async with followed(workers, encoder("w1"), encoder("w2")) as log:
        await clock.advance(SILENT_S)
        await log.say(subjects.heartbeat(MODEL, WorkerRank("w1", 0)), b"no heartbeat")
        await log.beat(WorkerRank("w1", 0), "another")
        await log.beat(WorkerRank("w2", 0), "w2-1")
        assert asked(workers) == "w2"
        assert asked(workers, encoder("w2").base_url) == "w1"
        await log.beat(WorkerRank("w1", 0), "w1-1")
        assert asked(workers) == "w1"


@pytest.mark.parametrize(
    ("error", "outcome", "next_asked"),
    [
        (EncoderUnavailable("gone"), "failed", "w2"),
        (EncoderUnavailable("503", 1.0), "refused", "w2"),
        (MediaRefused("content", "f", "no image", "one"), "refused", "w2"),
    ],
)
async def test_how_an_attempt_ended_is_counted(error: Exception, outcome: str, next_asked: str) -> None:
    workers = client()
    async with followed(workers, encoder("w1"), encoder("w2")):
        worker = workers.to_ask(())
        assert worker is not None
        with suppress(type(error)), workers.asking(worker):
            raise error
        assert workers.attempts_total == {outcome: 1}
        assert asked(workers) == next_asked


async def test_a_worker_that_failed_is_asked_last_for_a_while() -> None:
    clock = ManualClock()
    workers = client(clock)
    async with followed(workers, encoder("w1")) as log:
        worker = workers.to_ask(())
        assert worker is not None
        with pytest.raises(EncoderUnavailable, match=r"http://10.0.0.1:9001: gone"), workers.asking(worker):
            raise EncoderUnavailable("gone")
        assert asked(workers) == "w1"
        await log.join(encoder("w2"))
        for _ in range(3):
            other = workers.to_ask(())
            assert other is not None
            assert other.registration.worker_id == "w2"
            with workers.asking(other):
                pass
        await clock.advance(SILENT_S)
        for name in ("w1", "w2"):
            await log.beat(WorkerRank(name, 0), f"{name}-1")
        assert asked(workers) == "w1"


async def test_a_registration_without_the_fleets_signature_is_not_believed() -> None:
    workers = client()
    async with followed(workers, keys=(b"0123456789abcdef",)) as log:
        await log.join(encoder("w1"))
        assert asked(workers) is None
        data, subject = fleet.encode(encoder("w1")), subjects.fleet(MODEL, "w1")
        await log.say(subject, data, FleetGate((b"0123456789abcdef",)).headers(subject, "w1", data, 1))
        assert asked(workers) == "w1"
