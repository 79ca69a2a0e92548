"""Claims, watches and gives up one worker id in the log. The rules are in `worker_id_rules.py`.

Each publication carries the stream sequence that the subject's newest message must have
(`Nats-Expected-Last-Subject-Sequence`), so that an instance never overwrites an event that it has not read: if two
agents start at the same time, one is refused, and the end of one never removes the other.

The id's subjects, one for each model, are read message by message (`STREAM.MSG.GET`). No consumer is needed.
"""

import asyncio
import math
from urllib.parse import urlsplit

import structlog
from msgspec.structs import replace

from kv_protocol import fleet, subjects
from kv_protocol.errors import MalformedMessage
from kv_protocol.fleet import FleetEvent, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetEventRefused, FleetGate, claim_in
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LastSequenceDiffers, LogMessage
from kv_runtime.supervise import PartGaveUp
from worker_agent.fleet.worker_id_rules import (
    NO_CLAIM,
    SILENT_S,
    Action,
    Liveness,
    NewestMessage,
    action,
    drained_by_hand,
)

SUBJECTS_MAX = 16
"""How many subjects of one id are read at most."""
INSTANCES_MAX = 64
"""How many instances' heartbeats are remembered; beyond it the oldest heartbeat is forgotten."""
_ATTEMPTS = 8
_WAIT_S = 0.05
_CONNECT_S = 0.5

_log = structlog.get_logger("membership")


class WorkerIdTaken(PartGaveUp):
    """Another instance has the id: it is alive, and its claim is earlier."""


class WorkerId:
    """The id of one instance. `changed` is set whenever a fleet event of the id is received."""

    def __init__(self, log: EventLog, clock: Clock, gate: FleetGate, *, worker_id: str, instance: str) -> None:
        self._event_log, self._clock, self._gate = log, clock, gate
        self._worker_id, self._instance = worker_id, instance
        self._claim, self._own_seq = NO_CLAIM, 0
        self._heartbeats = _Heartbeats(log, clock)
        self._is_listening = self._is_drained = False
        self.changed = asyncio.Event()

    async def check(self) -> None:
        """Return once no other living instance has the id; called at the start, before an engine is loaded.

        If the log does not answer, return at once; `register` checks again.

        Raises:
            WorkerIdTaken: another living instance has the id.
        """
        try:
            await self._listen()
            await self._settled(None)
        except BrokerUnavailable as error:
            _log.info("worker_id_not_checked", worker=self._worker_id, reason=str(error))

    async def register(self, registration: WorkerRegistered) -> bool:
        """Make the registration the newest fleet event of the id; return whether it was published again.

        A first publication returns False. It is published again if another event replaced it, or if the log lacks it
        because of a purge, or because the log is new.
        Nothing is published if it is the newest already, or while an operator drains this instance or has removed it.

        Raises:
            WorkerIdTaken: another living instance has the id.
            BrokerUnavailable: the log cannot be read, or did not take the registration.
        """
        await self._listen()
        subject = subjects.fleet(registration.model, self._worker_id)
        for _ in range(_ATTEMPTS):
            self.changed.clear()
            settled = await self._settled(registration)
            changed = [message for message, what in settled if what != "keep"]
            if not changed:
                return False
            strange = [each for each in changed if self._claim != NO_CLAIM and each.seq != self._own_seq]
            for each in strange:
                _log.warning("registration_replaced", worker=self._worker_id, **_described(each))
            after_seq = next((each.seq for each, _ in settled if each.subject == subject), 0)
            try:
                if any(what == "replace" for _, what in settled):  # readers keep a forged address until `WorkerLeft`
                    left = WorkerLeft(worker_id=self._worker_id, instance=self._instance, reason="registration forged")
                    after_seq = await self._publish(subject, left, after_seq)
                claimed = replace(registration, drained=self._is_drained)
                self._own_seq = await self._publish(subject, claimed, after_seq)
            except LastSequenceDiffers:
                continue
            self._claim = min(self._claim, self._own_seq)
            if strange:
                _log.warning("worker_registered_again", worker=self._worker_id)
            else:
                _log.info("worker_registered", worker=self._worker_id, at=registration.base_url)
            return bool(strange)
        raise BrokerUnavailable(f"{subject} changes faster than it can be read")

    async def publish_event(self, model: str, event: FleetEvent) -> None:
        """Publish the event, unless another instance has the id in the log: then it is not needed.

        Raises:
            BrokerUnavailable: the log cannot be read, or did not take the event.
        """
        subject = subjects.fleet(model, self._worker_id)
        for _ in range(_ATTEMPTS):
            message = next((each for each in await self._read_newest() if each.subject == subject), None)
            if message is not None and message.event is not None and message.event.instance != self._instance:
                _log.warning("fleet_event_not_needed", kind=type(event).__name__, **_described(message))
            else:
                try:
                    await self._publish(subject, event, 0 if message is None else message.seq)
                except LastSequenceDiffers:
                    continue
            if isinstance(event, WorkerLeft):
                self._claim = NO_CLAIM
            return
        raise BrokerUnavailable(f"{subject} changes faster than it can be read")

    async def _publish(self, subject: str, event: FleetEvent, after_seq: int) -> int:
        data, claim = fleet.encode(event), 0 if self._claim == NO_CLAIM else self._claim
        headers = self._gate.headers(subject, self._worker_id, data, self._clock.wall_ns(), claim)
        return await self._event_log.publish(subject, data, headers=headers, after_seq=after_seq)

    async def _listen(self) -> None:
        if not self._is_listening:
            await self._heartbeats.listen(self._worker_id)
            await self._event_log.listen(subjects.pattern("fleet", worker_id=self._worker_id), self._on_fleet_event)
            self._is_listening = True

    async def _on_fleet_event(self, _: LogMessage) -> None:
        self.changed.set()

    async def _read_newest(self) -> list[NewestMessage]:
        """Return the newest message of each subject of the id."""
        pattern, found, seq = subjects.pattern("fleet", worker_id=self._worker_id), list[NewestMessage](), 1
        while len(found) < SUBJECTS_MAX:
            message = await self._event_log.message_from(subjects.FLEET_STREAM, seq, pattern)
            if message is None:
                break
            found.append(self._decoded(message))
            seq = message.stream_seq + 1
        return found

    def _decoded(self, message: LogMessage) -> NewestMessage:
        claim = claim_in(message.headers) or message.stream_seq
        event: FleetEvent | None = None
        refused = ""
        try:
            event = self._gate.admit(message.subject, message.data, message.headers)
        except FleetEventRefused as error:
            refused = str(error)
            if error.reason == "base_url":  # a reader that knew no address of it yet may have accepted it
                event = fleet.decode_fleet_event(message.data)
        return NewestMessage(event, claim, message.subject, message.stream_seq, refused)

    async def _settled(self, own: WorkerRegistered | None) -> list[tuple[NewestMessage, Action]]:
        """Return the id's newest messages and the action for each, once the liveness of all instances is known.

        The last row is for the subject of `own` if the log has no message there.
        """
        subject = "" if own is None else subjects.fleet(own.model, self._worker_id)
        while True:
            messages = await self._read_newest()
            if own is not None and all(each.subject != subject for each in messages):
                messages.append(NewestMessage(None, subject=subject, refused="no event"))
            settled = [(each, await self._action(each, own if each.subject == subject else None)) for each in messages]
            if all(what != "wait" for _, what in settled):
                break
            await self._clock.sleep(_WAIT_S)
        for each, what in settled:
            if what == "keep" and each.event is not None and each.event.instance == self._instance:
                self._is_drained = drained_by_hand(each.event, before=self._is_drained)  # later registrations keep it
        return settled

    async def _action(self, message: NewestMessage, own: WorkerRegistered | None) -> Action:
        """Return the action for one subject; raise `WorkerIdTaken` if the action is to stop."""
        event = message.event
        if event is None or event.instance == self._instance:
            return action(message, self._instance, own, self._claim, "unknown")
        what = action(message, self._instance, own, self._claim, await self._heartbeats.liveness(event))
        if what == "stop":
            raise WorkerIdTaken(_refusal(event))
        return "keep" if what == "register" and own is None and message.seq <= self._own_seq else what


class _Heartbeats:
    """The heartbeats of an id's instances."""

    def __init__(self, log: EventLog, clock: Clock) -> None:
        self._event_log, self._clock = log, clock
        self._heartbeat_at_s: dict[str, float] = {}
        self._ended: dict[str, bool] = {}
        self._since_s, self._reconnects = 0.0, 0

    async def listen(self, worker_id: str) -> None:
        """Receive heartbeats from now on."""
        await self._event_log.listen(subjects.pattern("heartbeat", worker_id=worker_id), self._on_heartbeat)
        self._since_s = self._clock.now()

    async def _on_heartbeat(self, message: LogMessage) -> None:
        try:
            instance = fleet.decode_heartbeat(message.data).instance
        except MalformedMessage:
            return
        self._heartbeat_at_s.pop(instance, None)
        if len(self._heartbeat_at_s) >= INSTANCES_MAX:
            del self._heartbeat_at_s[next(iter(self._heartbeat_at_s))]
        self._heartbeat_at_s[instance] = self._clock.now()

    async def liveness(self, event: FleetEvent) -> Liveness:
        """Return the liveness of an event's instance; a reconnection restarts the wait for its heartbeats."""
        now_s, reconnects = self._clock.now(), self._event_log.statistics().reconnects_total
        if reconnects != self._reconnects:
            self._since_s, self._reconnects = now_s, reconnects
        if now_s < self._heartbeat_at_s.get(event.instance, -math.inf) + SILENT_S:
            return "alive"
        return "silent" if now_s >= self._since_s + SILENT_S or await self._has_ended(event) else "unknown"

    async def _has_ended(self, event: FleetEvent) -> bool:
        """Return whether the instance's address refuses connections; tested once for each instance.

        Only an agent's own address is tested: an address that takes no token ids is an engine's, which may be down
        while its agent lives.
        """
        if not isinstance(event, WorkerRegistered) or not event.accepts_token_ids:
            return False
        if event.instance not in self._ended:
            if len(self._ended) >= INSTANCES_MAX:
                self._ended.clear()
            self._ended[event.instance] = not await _accepts_connections(event.base_url)
        return self._ended[event.instance]


async def _accepts_connections(base_url: str) -> bool:
    """Return False if the address refuses a connection; True also if it does not answer in time."""
    url = urlsplit(base_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(url.hostname, port)
    except ConnectionRefusedError:
        return False
    except OSError:  # a timeout is one
        return True
    writer.close()
    return True


def _refusal(event: FleetEvent) -> str:
    where = f" at {event.base_url}" if isinstance(event, WorkerRegistered) else ", which is draining"
    return (
        f"worker id {event.worker_id} belongs to the living instance {event.instance}{where}: "
        "stop that worker, or choose another id with --worker-id"
    )


def _described(message: NewestMessage) -> dict[str, object]:
    """Return the fields of a log line about an event."""
    event = message.event
    fields: dict[str, object] = {"subject": message.subject, "seq": message.seq}
    if message.refused:
        fields["refused"] = message.refused
    if event is not None:
        fields |= {"by": type(event).__name__, "by_instance": event.instance}
    if isinstance(event, WorkerRegistered):
        fields["by_address"] = event.base_url
    if isinstance(event, WorkerLeft):
        fields["cause"] = event.reason
    return fields
