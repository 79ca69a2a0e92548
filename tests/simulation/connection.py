"""A process's line to the broker, as `kv_runtime.event_log` keeps it.

    connected     until the broker did not answer for `SILENT_S`, or died
    lost          what is on its way to the process is not heard any more; what is asked is refused at once; what was
                  not confirmed has failed
    found         as soon as the broker is reached, at most every `RETRY_S`

The fleet's stream, and requests to the broker, always go over an ordered connection: a reader of a stream finds out
what is missing of it, and reads it again. No reader of the events' stream may rely on that.
What a dead process said to the fleet last and is still on its way is lost: its next life takes longer to begin than
that takes to arrive, and what is said last counts.
What is not confirmed within `CONFIRM_S` has failed, and may have been done nevertheless.
"""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from kv_protocol.ids import WorkerRank
from kv_runtime.event_log import BrokerUnavailable
from tests.simulation.broker import BROKER, EVENTS, FLEET, Broker, Receive, ReceiveStored
from tests.simulation.network import Faults, Network, Receiver, Spoiler, cut
from tests.simulation.stream import Stored

SILENT_S = 3.0
RETRY_S = 1.0
CONFIRM_S = 3.0
SURE_RATIO = 0.1
"""How long the ordered connection delays at most, beside the others."""
_WORD = b"."

Operation = Callable[[Broker], Any]
Talk = Generator[Operation, Any, None]
"""What a process has the broker do, one operation after another; `BrokerAway` is thrown in where one fails."""


class BrokerAway(BrokerUnavailable):
    """The broker did not do as asked, or it is unknown whether it did."""


def _nothing() -> None:
    """Do nothing."""


class Connection:
    """The line of one life of a process; `life` counts how often it was found."""

    def __init__(
        self,
        process: str,
        network: Network,
        broker: Broker,
        faults: Faults,
        *,
        is_connection: bool,
        spoil: Spoiler = cut,
        on_found: Callable[[], None] = _nothing,
    ) -> None:
        self._broker, self._timeline, self._spoil = broker, network.timeline, spoil
        sure = Faults(delay_max_s=faults.delay_max_s * (1.0 if is_connection else SURE_RATIO))
        self._sure_up = network.way(process, BROKER, sure, is_connection=True)
        self._sure_down = network.way(BROKER, process, sure, is_connection=True)
        self._up, self._down = self._sure_up, self._sure_down
        if not is_connection:
            self._up = network.way(process, BROKER, faults, is_connection=False)
            self._down = network.way(BROKER, process, faults, is_connection=False)
        self._on_found = on_found
        self.life = 0
        self.is_connected = self._is_closed = False
        self._broker_life = -1
        self._answered_at_s = self._tried_at_s = float("-inf")
        self._unconfirmed: dict[int, Callable[[], None]] = {}
        self._asked = 0

    # -------------------------------------------------------------- whether it stands
    def look(self) -> None:
        """See whether the broker is there."""
        now_s = self._timeline.now_s
        is_reached = self._broker.is_answering and self._up.is_open and self._down.is_open
        if is_reached:
            self._answered_at_s = now_s
        if self.is_connected:
            if self._broker_life != self._broker.life or now_s - self._answered_at_s >= SILENT_S:
                self._lose()
        elif is_reached and now_s - self._tried_at_s >= RETRY_S and not self._is_closed:
            self._tried_at_s = now_s
            self._broker_life = self._broker.life
            self.life += 1
            self.is_connected = True
            self._on_found()

    def _lose(self) -> None:
        self.is_connected = False
        self._tried_at_s = self._timeline.now_s
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        for failed in unconfirmed.values():
            failed()

    def close(self) -> None:
        """The process is gone: it hears nothing any more, not even that something failed."""
        self._is_closed, self.is_connected = True, False
        self._unconfirmed.clear()

    def set_faults(self, faults: Faults) -> None:
        """From now on, what is sent suffers these."""
        for way in (self._up, self._down, self._sure_up, self._sure_down):
            way.set_faults(faults)

    # -------------------------------------------------------------- to the broker
    def listen(self, subject: str, receive: Receive) -> None:
        """`receive` is called with what is announced on `subject` while the line stands."""
        self._broker.listen(subject, self, receive)

    def announce(self, subject: str, rank: WorkerRank, data: bytes, reply: str = "") -> None:
        """Every listener of `subject` receives the message; none does while the line is down."""
        if self.is_connected:
            broker, life = self._broker, self._broker.life
            self._up.send(data, lambda came: broker.do(life, lambda: broker.announce(subject, rank, came, reply)))

    def publish(self, name: str, subject: str, data: bytes, message_id: str, done: Callable[[bool], None]) -> None:
        """The message is in the stream of this name, or not; `done` says whether that is sure."""
        number = self._expect(partial(done, False))
        if number is None:
            return
        life = self._broker.life

        def append(came: bytes) -> None:
            if name == FLEET and self._is_closed:
                return
            takes, confirms = self._broker.mood()
            if takes:
                self._broker.append(name, subject, came, message_id)
            if confirms:
                answer = self._confirmed if takes else self._refused
                self._down.send(_WORD, lambda _: answer(number, partial(done, True)))

        up = self._up if name == EVENTS else self._sure_up
        up.send(data, lambda came: self._broker.do(life, partial(append, came)), self._spoil)

    def call(self, operation: Operation, done: Callable[[Any], None], failed: Callable[[], None]) -> None:
        """The broker does `operation`; `done` is told what came of it, or it has `failed`."""
        number = self._expect(failed)
        if number is None:
            return
        life = self._broker.life

        def perform() -> None:
            result = operation(self._broker)
            self._sure_down.send(_WORD, lambda _: self._confirmed(number, partial(done, result)))

        self._sure_up.send(_WORD, lambda _: self._broker.do(life, perform))

    def _expect(self, failed: Callable[[], None]) -> int | None:
        if not self.is_connected:
            if not self._is_closed:
                self._timeline.after(0.0, failed)
            return None
        self._asked += 1
        number = self._asked
        self._unconfirmed[number] = failed
        self._timeline.after(CONFIRM_S, partial(self._refused, number))
        return number

    def _confirmed(self, number: int, done: Callable[[], None]) -> None:
        if self._unconfirmed.pop(number, None) is not None:
            done()

    def _refused(self, number: int, _: object = None) -> None:
        failed = self._unconfirmed.pop(number, None)
        if failed is not None:
            failed()

    def converse(self, talk: Talk) -> None:
        """The broker does what `talk` yields, one after another."""
        self._go_on(partial(next, talk), talk)

    def _go_on(self, resume: Callable[[], Operation], talk: Talk) -> None:
        try:
            operation = resume()
        except StopIteration:
            return
        self.call(
            operation,
            lambda result: self._go_on(lambda: talk.send(result), talk),
            lambda: self._go_on(lambda: talk.throw(BrokerAway()), talk),
        )

    # -------------------------------------------------------------- from the broker
    def tell(self, rank: WorkerRank, data: bytes, reply: str, receive: Receive) -> None:
        """The broker has something for the process that was announced."""
        self._down.send(data, partial(self._hear, self.life, lambda came: receive(rank, came, reply)))

    def tell_stored(self, name: str, stored: Stored, receive: ReceiveStored) -> None:
        """The broker has a message of a stream for the process."""
        hear = partial(self._hear, self.life, lambda came: receive(stored, came))
        down = self._down if name == EVENTS else self._sure_down
        down.send(stored.data, hear, self._spoil)

    def _hear(self, life: int, receive: Receiver, data: bytes) -> None:
        if self.is_connected and life == self.life:
            receive(data)
