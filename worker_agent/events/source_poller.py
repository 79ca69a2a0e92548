"""Polls an engine's events, and applies them one by one, without encoding them.

The engine is polled again once all that a poll brought is applied; meanwhile the engine's own buffer fills, and when it
is full, it drops the oldest events. A thread of its own (`SupervisedWork.call`) translates the events, and polls the
engine if that is in this process: so neither waits for work on requests.

    pace      begins                                                            polls             ends
    -------   ---------------------------------------------------------------   ---------------   ----------------------
    normal                                                                      wait for events
    pressed   a poll returned more than half of the buffer's capacity, or its   do not wait       a poll returned none,
              events show that others were lost                                                   and none were lost

    the engine                      the poller
    -----------------------------   ------------------------------------------------------------------------------------
    cannot be polled                polls again until it succeeds; the engine's event ids show what was lost meanwhile
      (`EngineError`)
    raises anything else            does not know which events of the poll were applied: a loss follows, which removes
                                      the engine's blocks. Then the polls start again, until they fail too often
                                      (`Restarts`): the process drains and ends

Polls that brought events, and losses, are numbered from 0 in one sequence; each event is a batch of its own.
Source of the buffer: `docs/SOURCES.md` E1.5, E8.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import structlog

from kv_runtime.clock import Clock
from kv_runtime.supervise import RESTARTS, Restarts, SupervisedWork
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineBatch
from worker_agent.events.mirror import ENGINE
from worker_agent.port.types import POLL_S, EngineError

_EVENTS_AT_ONCE = 256
"""Events that are applied before other tasks have their turn."""
_FAILED_S = 0.1
"""Pause after a failed poll."""

_log = structlog.get_logger("source_poller")


class Source(NamedTuple):
    """An engine that is polled for its events, by one poll at a time.

    `take` waits at most the given seconds for an event, and returns all raw events, which `rules` translate. It
    must make blocking calls in a thread, by `SupervisedWork.call`.
    `buffer_events` is how many events the engine buffers until it is polled; 0: unknown.
    """

    take: Callable[[SupervisedWork, float], Awaitable[list[Any]]]
    rules: TrtllmRules
    buffer_events: int = 0


class Pace:
    """The pace of polls. `buffer_events` is the buffer's capacity; 0: unknown, and only losses press the pace."""

    def __init__(self, buffer_events: int = 0) -> None:
        self._buffer_events = buffer_events
        self.is_pressed = False
        """Whether the next poll must not wait."""
        self._largest = self.pressed_polls_total = self.polls_total = 0

    def on_poll(self, events: int, *, is_lossy: bool) -> bool:
        """Note a poll whose events are handed on; return whether the source has no more events and lost none."""
        is_all = not events and not is_lossy
        self.polls_total += 1
        self.pressed_polls_total += self.is_pressed
        self._largest = max(self._largest, events)
        self.is_pressed = is_lossy or 2 * events > self._buffer_events > 0 or (self.is_pressed and not is_all)
        return is_all

    @property
    def largest_ratio(self) -> float:
        """The largest poll relative to the buffer's capacity; 0 if that is unknown."""
        return self._largest / self._buffer_events if self._buffer_events else 0.0


class SourcePoller:
    """Polls one source. `on_batch` applies a batch, `on_loss` a loss."""

    def __init__(
        self,
        source: Source,
        on_batch: Callable[[EngineBatch], None],
        on_loss: Callable[[], None],
        clock: Clock,
        *,
        poll_s: float = POLL_S,
        restarts: Restarts = RESTARTS,
    ) -> None:
        self.source = source
        self._on_batch, self._on_loss = on_batch, on_loss
        self._clock, self._poll_s = clock, poll_s
        self.work = SupervisedWork(f"{ENGINE}-events", self._run, restarts=restarts)
        """The polls as a part of the process; it counts their unexpected failures."""
        self._sequence = 0
        self._requested: list[asyncio.Future[None]] = []
        self.pace = Pace(source.buffer_events)
        self.lost_before_read: Mapping[int, int] = {}
        """By rank, how many events had been lost when all of the source's events were last applied.

        A rank that has lost more since is being learned again, from where its event ids jumped.
        """
        self.poll_failures_total = 0
        self.failure = ""
        """Why the source could not be polled; empty while it can."""

    async def until_applied(self) -> None:
        """Return once all events that the source had before the call are applied."""
        request = asyncio.get_running_loop().create_future()
        self._requested.append(request)
        await request

    async def _run(self, stop: asyncio.Event) -> None:
        try:
            while not stop.is_set():
                await self._poll(0 if self.pace.is_pressed else self._poll_s)
                if self.failure:
                    await self._clock.wait(stop, _FAILED_S)
            await self._poll(0)
        except Exception:
            self.pace.is_pressed = True
            self._sequence += 1
            self._on_loss()
            raise

    async def _poll(self, timeout_s: float) -> None:
        rules, requests = self.source.rules, len(self._requested)
        lost_before = sum(rules.events_lost.values())
        try:
            events = await self.source.take(self.work, timeout_s)
        except EngineError as error:
            self.poll_failures_total += 1
            if not self.failure:
                _log.warning("source_not_polled", reason=str(error))
            self.failure = f"cannot be polled: {error}"
            return
        self.failure = ""
        translated = await self.work.call(partial(rules.translate, events)) if events else []
        now_s = self._clock.wall_ns() / 1e9
        for at, (dp_rank, event) in enumerate(translated, 1):
            self._on_batch(EngineBatch(sequence=self._sequence, time_s=now_s, dp_rank=dp_rank, events=(event,)))
            if at % _EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._sequence += bool(translated)
        answered, self._requested = self._requested[:requests], self._requested[requests:]
        for request in answered:
            if not request.done():  # its caller may have been cancelled
                request.set_result(None)
        lost = dict(rules.events_lost)
        if self.pace.on_poll(len(events), is_lossy=sum(lost.values()) > lost_before):
            self.lost_before_read = lost
