"""What workers tell the fleet, as it comes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kv_protocol import fleet, subjects
from kv_protocol.fleet import FleetEvent
from kv_runtime.event_log import EventLog, LogMessage


@asynccontextmanager
async def fleet_events(log: EventLog) -> AsyncIterator[list[FleetEvent]]:
    """Be where every fleet event from now on is added to the list."""
    events: list[FleetEvent] = []

    async def on_message(message: LogMessage) -> None:
        events.append(fleet.decode_fleet_event(message.data))

    await log.listen(subjects.FLEET_ALL, on_message)
    yield events
