"""A journal on a real nats-server: written, read back, and every decision in it taken again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kv_protocol.journal import JournalBegan, JournalRecord, Lost, TimePassed
from kv_runtime.clock import Clock
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from router.decision.state import RouterState, StateSettings
from router.journal.log import JournalSection, JournalWriter, ensure_journal, read_journal
from router.journal.replay import Continuity, JournalEntry
from tests.support.parts import at_work
from tests.system.integration.broker import Broker, eventually
from tests.unit.router.samples import TEXT

SETTINGS = JournalSection(max_bytes=16 << 20)


async def read(log: EventLog, router: str = "router-1") -> list[JournalRecord]:
    """Return the router's records that the log has."""
    continuity, records = Continuity(), list[JournalRecord]()

    def take(told: JournalEntry) -> None:
        records.extend(continuity.records(told.message))

    await read_journal(log, router, take, asyncio.Event())
    return records


@asynccontextmanager
async def written(log: EventLog, router: str = "router-1", **bounds: int) -> AsyncIterator[JournalWriter]:
    """Yield a writer at work; afterwards what it had is on the log."""
    await ensure_journal(log, SETTINGS, NatsSection())
    made_of = StateSettings(text=TEXT)
    writer = JournalWriter(
        log,
        Clock(),
        SETTINGS,
        router=router,
        made_of=made_of,
        state=RouterState(made_of),
        kv_seq=lambda: 7,
        **bounds,
    )
    async with at_work(Part("journal", writer.run), Part("event-log", log.run, 1)):
        yield writer


async def test_what_is_recorded_while_the_server_is_away_comes_when_it_is_back(broker: Broker, log: EventLog) -> None:
    async with written(log, buffer_bytes_max=1024) as writer:
        await eventually(lambda: writer.records_total == 1)
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        for moment in range(100):
            writer.encoder.record(TimePassed(now_s=float(moment)))
        await broker.start()
        await eventually(lambda: not writer.waiting())
        began, *rest = await read(log)
    assert isinstance(began, JournalBegan)
    (lost,) = [record.count for record in rest if isinstance(record, Lost)]
    assert 0 < lost < 100
    assert [record.now_s for record in rest if isinstance(record, TimePassed)] == [float(at) for at in range(lost, 100)]
