"""One rank's stream on its way into the log, as the agent's shell has it.

Messages are handed over in order, as many as the outbox gives, and confirmed each by itself. Where one is not, all that
are not confirmed are handed over again after a while; then one goes ahead, and once the log has it, the others follow.
"""

from functools import partial

from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from tests.simulation.broker import EVENTS
from tests.simulation.connection import Connection
from tests.simulation.timeline import Timeline
from worker_agent.events.outbox import Outbox, OutMessage

RETRY_S = 0.1
RETRY_MAX_S = 2.0


class Publishing:
    """From its making until the connection is closed."""

    def __init__(self, rank: WorkerRank, outbox: Outbox, connection: Connection, timeline: Timeline) -> None:
        self._rank, self._outbox, self._connection, self._timeline = rank, outbox, connection, timeline
        self._attempt = 0
        self._retry_s = RETRY_S
        self._is_waiting = self._is_refused = self._is_ahead = False

    def publish(self) -> None:
        """What the outbox gives is on its way."""
        while not self._is_waiting and not self._is_ahead and (message := self._outbox.next_message()) is not None:
            self._is_ahead = self._is_refused
            self._connection.publish(
                EVENTS,
                str(self._rank),
                message.payload,
                subjects.message_id(self._rank, self._outbox.epoch, message.first_seq),
                partial(self._ended, message, self._attempt),
            )

    def _ended(self, message: OutMessage, attempt: int, is_confirmed: bool) -> None:
        if is_confirmed:
            self._outbox.acknowledge(message)
            if not self._is_waiting:
                self._retry_s = RETRY_S
                self._is_refused = self._is_ahead = False
                self.publish()
        elif attempt == self._attempt and not self._is_waiting:
            self._is_waiting = self._is_refused = True
            self._timeline.after(self._retry_s, self._go_back)
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _go_back(self) -> None:
        self._attempt += 1
        self._is_waiting = self._is_ahead = False
        self._outbox.go_back()
        self.publish()
