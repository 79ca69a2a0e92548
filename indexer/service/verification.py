"""Compares a live index with the mirrors of all ranks that should be in it (`difference.py`).

The log, not the index, says which ranks should be there: registered ones and those with heartbeats. A mirror's address
contains its model's slug. A worker that left is not included. A worker that died without leaving is still registered;
its mirror does not answer. A rank is left out if the index does not know it and its mirror does not answer.

The index is read first, the mirror second, so the mirror has the same seq or a higher one. If it is higher, the batches
between are requested from the mirror. Differences that may be temporary (another epoch, missing batches between, a rank
unknown to the index) are checked again for `timeout_s`.

A mirror answers a request with its state, or with the messages since the requested place, if it retains them and they
are no larger than the state. `MirrorSilent` is raised if nobody subscribes to the rank's subject, or no further part of
the answer comes in `answer_s`.

Requests are sent one at a time: the answer of a rank with a million blocks is 17 MB.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count

from msgspec.structs import replace

from indexer.follow.question import AnsweredState, AnswerParts
from indexer.service.difference import Finding, RankVerdict, compare
from indexer.service.index_client import IndexClient
from kv_protocol import codec, recovery, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import HEARTBEAT_PERIOD_S, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import DumpChunk, RecoverRequest
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage

LISTEN_S = 1.5 * HEARTBEAT_PERIOD_S
"""Every live rank sends at least one heartbeat in this time."""
_POLL_S = 0.05
_TEMPORARY: tuple[Finding, ...] = ("other_epoch", "behind", "unknown")
_RETRY_S = 0.25


class MirrorSilent(Exception):
    """No complete answer came; the message names the rank and what came."""


class Mirrors:
    """Requests to all mirrors of a fleet; call `start` before the first request."""

    def __init__(self, log: EventLog, answer_s: float) -> None:
        self._event_log, self._answer_s = log, answer_s
        self._inbox = log.new_inbox()
        self._request_ids = count(1)
        self._open: dict[str, asyncio.Queue[bytes]] = {}
        """By the id of the request in progress: the received parts of its answer."""

    async def start(self) -> None:
        """Subscribe to answers."""
        await self._event_log.listen(f"{self._inbox}.*", self._on_answer)

    async def state(self, slug: str, rank: WorkerRank) -> AnsweredState:
        """Return the state of the rank's mirror; `slug` is its model's.

        Raises:
            MirrorSilent: no complete answer came.
            BrokerUnavailable: the log is away.
        """
        state, _ = await self._answer(slug, rank, RecoverRequest(next(self._request_ids)))
        if state is None:
            raise MirrorSilent(f"{rank}: the mirror sent single batches, its complete state was requested")
        return state

    async def messages_since(self, slug: str, rank: WorkerRank, epoch: int, seq: int) -> list[bytes]:
        """Return the stream's messages after `seq` up to now.

        The list is empty if the mirror does not retain all of them, or if they are larger than its state.

        Raises: as `state`.
        """
        _, replayed = await self._answer(slug, rank, RecoverRequest(next(self._request_ids), epoch, seq))
        return replayed

    async def _answer(
        self, slug: str, rank: WorkerRank, request: RecoverRequest
    ) -> tuple[AnsweredState | None, list[bytes]]:
        """Return the complete answer: the mirror's state, or the messages since the request's place."""
        parts = asyncio.Queue[bytes]()
        self._open = {str(request.request_id): parts}
        reply = f"{self._inbox}.{request.request_id}"
        await self._event_log.announce(subjects.recover_slug(slug, rank), recovery.encode(request), reply)
        dump, replayed, reached_seq = AnswerParts(), list[bytes](), request.after_seq
        for number in range(recovery.DUMP_CHUNKS_MAX):
            try:
                async with asyncio.timeout(self._answer_s):
                    data = await parts.get()
                if not data:  # the server reports that there is no subscriber
                    raise MirrorSilent(f"{rank}: no mirror listens")
                part = recovery.decode_answer(data)
                if isinstance(part, DumpChunk):
                    dump.add(part)
                    if (state := dump.complete_answer()) is not None:
                        return state, replayed
                    continue
                if part.message:
                    replayed.append(part.message)
                    reached_seq = codec.decode_message(part.message)[-1].seq
            except TimeoutError:
                reason = f"{number} parts of an answer, and then {self._answer_s:g} s none"
                raise MirrorSilent(f"{rank}: {reason}") from None
            except MalformedMessage as error:
                raise MirrorSilent(f"{rank}: {error}") from error
            if reached_seq >= part.last_seq:
                return None, replayed
        raise MirrorSilent(f"{rank}: more than {recovery.DUMP_CHUNKS_MAX} parts of an answer")

    async def _on_answer(self, message: LogMessage) -> None:
        if (parts := self._open.get(message.subject.rpartition(".")[2])) is not None:
            parts.put_nowait(message.data)


async def fleet_slugs(log: EventLog, clock: Clock, gate: FleetGate, timeout_s: float) -> dict[WorkerRank, str]:
    """Listen for `LISTEN_S`, then return every rank that the log names, with its model's slug.

    Raises:
        BrokerUnavailable: the log does not answer, has no streams, or its fleet could not be read in `timeout_s`.
    """
    registered: dict[str, dict[WorkerRank, str]] = {}
    beating: dict[WorkerRank, str] = {}

    async def on_fleet_event(message: LogMessage) -> None:
        with suppress(FleetEventRefused):  # a live worker is found by its heartbeats
            event = gate.admit(message.subject, message.data, message.headers)
            if isinstance(event, WorkerRegistered):
                registered[event.worker_id] = dict.fromkeys(event.ranks, subjects.slug_of(message.subject))
            elif isinstance(event, WorkerLeft):
                registered.pop(event.worker_id, None)

    async def on_heartbeat(message: LogMessage) -> None:
        with suppress(MalformedMessage):
            beating[subjects.rank_of(message.subject)] = subjects.slug_of(message.subject)

    reading = await log.follow(subjects.FLEET_STREAM, subjects.FLEET_ALL, on_fleet_event)
    await log.listen(subjects.HEARTBEAT_ALL, on_heartbeat)
    await clock.sleep(LISTEN_S)
    ends_s = clock.now() + timeout_s
    while reading.unread:
        if clock.now() > ends_s:
            raise BrokerUnavailable(f"{subjects.FLEET_STREAM}: {reading.unread} messages not read")
        await clock.sleep(_POLL_S)
    await log.leave(reading)
    return {rank: slug for ranks in registered.values() for rank, slug in ranks.items()} | beating


async def verdicts(
    index: IndexClient,
    mirrors: Mirrors,
    clock: Clock,
    slugs: dict[WorkerRank, str],
    *,
    timeout_s: float,
    examples_max: int,
) -> AsyncIterator[RankVerdict]:
    """Yield a verdict for every rank that the index knows or that has a mirror that answers, in the order of ranks.

    `slugs` has the slugs of the ranks' models; the mirror of a rank without a slug is not asked.

    Raises:
        IndexUnavailable, BrokerUnavailable: the comparison could not be completed.
    """
    known = await index.ranks()
    for rank in sorted({*slugs, *known.ranks}):
        ends_s = clock.now() + timeout_s
        found = await _compared(index, mirrors, rank, slugs.get(rank, ""), examples_max)
        while found is not None and found.verdict in _TEMPORARY and clock.now() < ends_s:
            await clock.sleep(_RETRY_S)
            found = await _compared(index, mirrors, rank, slugs.get(rank, ""), examples_max)
        if found is not None:
            refused = known.refused.get(str(rank), "") if found.verdict == "unknown" else ""
            yield replace(found, reason=f"refused by the index: {refused}") if refused else found


async def _compared(
    index: IndexClient, mirrors: Mirrors, rank: WorkerRank, slug: str, examples_max: int
) -> RankVerdict | None:
    state = await index.state(rank)
    mirror, tail = None, list[bytes]()
    with suppress(MirrorSilent):
        if slug:
            mirror = await mirrors.state(slug, rank)
            if state is not None and state.epoch == mirror.epoch and state.seq < mirror.last_seq:
                tail = await mirrors.messages_since(slug, rank, state.epoch, state.seq)
    if state is None and mirror is None:
        return None
    return compare(rank, state, mirror, tail, examples_max=examples_max)
