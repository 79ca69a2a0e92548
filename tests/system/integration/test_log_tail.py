"""The log in lines, followed on a real nats-server from now, from a place, from a time, and of the wanted ranks."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from indexer.commands.tail import BEGINNING, follow, places
from indexer.service.history import AvailableMoment, NotRetained
from indexer.service.log_lines import EventLine, FleetLine, Line
from kv_protocol import fleet, subjects
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from tests.support.parts import at_work
from tests.system.integration.broker import eventually
from tests.system.integration.scripted_rank import MODEL, ScriptedRank
from tests.unit.router.samples import registered


@asynccontextmanager
async def tailing(log: EventLog, wanted: Mapping[str, Any]) -> AsyncIterator[list[Line]]:
    lines: list[Line] = []
    await follow(log, partial(subjects.pattern, **wanted), BEGINNING, lines.append)
    async with at_work(Part("event-log", log.run)):
        yield lines


def events(lines: list[Line]) -> list[tuple[int, int | None]]:
    return [(line.stream_seq, line.first_hash) for line in lines if isinstance(line, EventLine)]


def came(lines: list[Line]) -> list[str]:
    return [line.worker_id for line in lines if isinstance(line, FleetLine)]


async def register(log: EventLog, *worker_ids: str) -> None:
    for worker_id in worker_ids:
        registration = fleet.encode(registered(worker_id, model=MODEL))
        await log.publish(subjects.fleet(MODEL, worker_id), registration)


async def lived(log: EventLog) -> ScriptedRank:
    """Return a rank whose log has five messages, with two workers' registrations in their midst."""
    scripted = ScriptedRank(log)
    await register(log, "w0")
    for block in range(1, 4):
        await scripted.store(block)
    await register(log, "w1")
    for block in range(4, 6):
        await scripted.store(block)
    return scripted


async def all_of(lines: list[Line], count: int) -> None:
    await eventually(lambda: len(lines) >= count)


@pytest.mark.parametrize("seq", [2, 6, 1 << 70])
async def test_a_message_that_is_not_there_is_refused_with_those_that_are(log: EventLog, seq: int) -> None:
    await lived(log)
    await log.purge(subjects.EVENTS_STREAM, 2)
    third = await log.message_from(subjects.EVENTS_STREAM, 3)
    assert third is not None
    with pytest.raises(NotRetained) as refused:
        await places(log, from_seq=seq)
    told = refused.value
    assert (told.field, told.found, told.oldest, told.last_seq) == (
        "from-seq",
        seq,
        AvailableMoment(3, third.time_ns),
        5,
    )


@pytest.mark.parametrize(
    ("wanted", "told", "fleet_of"),
    [
        ({"worker_id": "w0", "dp_rank": 1}, [(2, 12)], ["w0"]),
        ({"slug": subjects.model_slug(MODEL)}, [(1, 11), (2, 12), (3, 13)], ["w0", "w1"]),
        ({"slug": subjects.model_slug("other")}, [], []),
    ],
    ids=["rank", "model", "other model"],
)
async def test_only_of_whom_is_wanted_is_told(
    log: EventLog, wanted: Mapping[str, Any], told: list[tuple[int, int]], fleet_of: list[str]
) -> None:
    await register(log, "w0", "w1")
    ranks = [ScriptedRank(log, "w0", 0), ScriptedRank(log, "w0", 1), ScriptedRank(log, "w1", 0)]
    for at, scripted in enumerate(ranks):
        await scripted.store(11 + at)
    async with tailing(log, wanted) as lines, tailing(log, {}) as whole:
        await all_of(whole, 5)
        await all_of(lines, len(told) + len(fleet_of))
        assert (came(lines), events(lines)) == (fleet_of, told)
