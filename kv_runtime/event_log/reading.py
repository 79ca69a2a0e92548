"""Reads a stream in order, by a push consumer, which the server deletes with the connection; and single messages of it.

    a new connection, a missing message, or a server       continue after the last delivered message
    that was silent for `SILENCE_S`
    another stream than before, or one that ends before    the log was lost: begin at its beginning; messages may be
    the last delivered message                             delivered again
    the stream dropped messages behind the last            continue with the first message that it still has
    delivered one

The server sends no faster than messages are processed (flow control), and sends a heartbeat every `HEARTBEAT_S`.

Single messages are found by time, or by seq: a seq without a message gives the first one behind it. Times are read in
nanoseconds, so that messages of one microsecond stay apart: the client's own `get_msg` cuts them to microseconds. They
are the server's, and ascend unless its clock is set back or another server of a cluster takes over.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header
from nats.js.errors import NotFoundError

from kv_runtime.event_log.errors import mapped
from kv_runtime.event_log.streams import answer_of, ns_of, state_of

HEARTBEAT_S = 2.0
SILENCE_S = 2.5 * HEARTBEAT_S
_OF_STREAM = "$JS.ACK."
_SEQ_AT, _TOKENS = 5, 9
_IDLE = "100"
_NO_MESSAGE = 10037
"""The server's code for a stream without such a message; a missing stream has another code."""

_log = structlog.get_logger("event_log")


class LogMessage(NamedTuple):
    """A received message; `reply` is the subject for an answer, if one is wanted.

    `stream_seq` and `time_ns`, the server's time since 1970, are 0 on core NATS. `headers` are the publisher's; None if
    it set none.
    """

    subject: str
    data: bytes
    stream_seq: int = 0
    reply: str = ""
    time_ns: int = 0
    headers: Mapping[str, str] | None = None


OnMessage = Callable[[LogMessage], Awaitable[None]]


class _Delivery(NamedTuple):
    """The delivery data in a message's reply subject.

    `$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>`; 9 tokens; newer
    servers put two before the stream: the domain and the account's hash.
    """

    stream_seq: int
    consumer_seq: int
    time_ns: int
    pending: int


def _delivery(reply: str) -> _Delivery:
    tokens = reply.split(".")
    first = _SEQ_AT if len(tokens) == _TOKENS else _SEQ_AT + 2
    return _Delivery(*map(int, tokens[first : first + 4]))


class Reading:
    """The reading of one stream; `begin` creates its consumer, and replaces it."""

    def __init__(
        self,
        client: Client,
        context: JetStreamContext,
        stream: str,
        subject: str,
        deliver: OnMessage,
        on_broken: Callable[[], None],
        *,
        after_seq: int = 0,
        created: str = "",
        timeout_s: float,
    ) -> None:
        self._client, self._context, self._timeout_s = client, context, timeout_s
        self._stream, self._subject = stream, subject
        self._deliver, self._on_broken = deliver, on_broken
        self._lock = asyncio.Lock()
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self._received = 0
        self._received_at_s = 0.0
        self.is_broken = False
        self.created = created
        """When the stream that is read was created."""
        self.delivered_seq = after_seq
        """Seq of the last delivered and processed message; 0: none."""
        self.delivered_total = 0
        self.unread = 0
        """Messages behind that, by the server's last message."""
        self.read_anew_total = 0
        """How often the log was lost."""

    @property
    def is_silent(self) -> bool:
        """Whether the server's heartbeats are overdue; False while a message is being processed."""
        return not self._lock.locked() and asyncio.get_running_loop().time() - self._received_at_s > SILENCE_S

    async def begin(self) -> None:
        """Read on after the last delivered message; from the beginning if the stream is another one.

        Raises:
            BrokerUnavailable: there is no such stream, or no answer.
        """
        async with self._lock:
            with mapped(f"follow {self._stream}"):
                await self.end()
                await self._find_start()
                inbox = self._client.new_inbox()
                self._received = 0
                self._unsubscribe = (await self._client.subscribe(inbox, cb=self._on_message)).unsubscribe
                consumer = await self._context.add_consumer(self._stream, self._consumer(inbox))
            self.unread = consumer.num_pending or 0
            self._received_at_s = asyncio.get_running_loop().time()
            self.is_broken = False

    async def _find_start(self) -> None:
        state = await state_of(self._client, self._stream, self._timeout_s)
        if state.created == self.created and state.last_seq >= self.delivered_seq:
            return
        if self.delivered_seq:
            _log.warning("log_read_anew", stream=self._stream, told_seq=self.delivered_seq, last_seq=state.last_seq)
            self.read_anew_total += 1
        self.created, self.delivered_seq = state.created, 0

    def _consumer(self, inbox: str) -> ConsumerConfig:
        return ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE if self.delivered_seq else DeliverPolicy.ALL,
            opt_start_seq=self.delivered_seq + 1 if self.delivered_seq else None,
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            filter_subject=self._subject,
            flow_control=True,
            idle_heartbeat=HEARTBEAT_S,
            mem_storage=True,
            num_replicas=1,
        )

    async def end(self) -> None:
        """End the subscription."""
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            await unsubscribe()

    async def _on_message(self, message: Msg) -> None:
        async with self._lock:  # no message of a subscription that `begin` ended gets here
            self._received_at_s = asyncio.get_running_loop().time()
            if not message.reply.startswith(_OF_STREAM):
                await self._obey(message)
                return
            delivery = _delivery(message.reply)
            if delivery.consumer_seq != self._received + 1:
                self._break()
                return
            self._received += 1
            seq, time_ns = delivery.stream_seq, delivery.time_ns
            read = LogMessage(message.subject, message.data, seq, time_ns=time_ns, headers=message.headers)
            await self._deliver(read)
            self.delivered_seq, self.unread = delivery.stream_seq, delivery.pending
            self.delivered_total += 1

    async def _obey(self, message: Msg) -> None:
        """Handle a control message: a heartbeat, a flow control request, or the end of the consumer."""
        headers = message.headers or {}
        if answer_to := message.reply or headers.get(Header.CONSUMER_STALLED):
            await self._client.publish(answer_to)
        sent = headers.get(Header.LAST_CONSUMER)
        if headers.get(Header.STATUS) != _IDLE or (sent is not None and int(sent) != self._received):
            self._break()
        elif not answer_to:
            self.unread = 0  # an idle server without flow control has no more messages: unread ones were dropped

    def _break(self) -> None:
        self.is_broken = True
        self._on_broken()


class _Message(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    time: str
    data: str = ""
    hdrs: str = ""


class _Found(msgspec.Struct, frozen=True):
    message: _Message


async def message_from(
    client: Client, stream: str, seq: int, timeout_s: float, subject: str = ">"
) -> LogMessage | None:
    """Return the message of `subject`, which may have wildcards, at `seq` or the first behind it; None: there is none.

    Raises:
        NatsError: there is no such stream, or no answer.
    """
    question = msgspec.json.encode({"seq": max(seq, 1), "next_by_subj": subject})
    try:
        answer = await answer_of(client, f"STREAM.MSG.GET.{stream}", _Found, timeout_s, question)
    except NotFoundError as error:
        if error.err_code != _NO_MESSAGE:
            raise
        return None
    found = answer.message
    headers, data = _headers(base64.b64decode(found.hdrs)), base64.b64decode(found.data)
    return LogMessage(found.subject, data, found.seq, time_ns=ns_of(found.time), headers=headers)


def _headers(block: bytes) -> Mapping[str, str] | None:
    """Parse a block of headers: a line with the version, then `name: value`, each line ended by CRLF."""
    lines = block.decode(errors="replace").split("\r\n")[1:]
    fields = (line.partition(":") for line in lines if line)
    return {name: value.strip() for name, _, value in fields} or None


async def seq_at(client: Client, stream: str, time_ns: int, timeout_s: float) -> int:
    """Return the seq of the last message of that time or earlier; if all are later, the first message's seq less 1.

    Raises:
        NatsError: there is no such stream, or no answer.
    """
    state = await state_of(client, stream, timeout_s)
    low, high = state.first_seq - 1, state.last_seq
    while low < high:  # the message at `low` is not later, those behind `high` are
        middle = (low + high + 1) // 2
        found = await message_from(client, stream, middle, timeout_s)
        if found is None or found.time_ns > time_ns:
            high = middle - 1
        else:
            low = found.stream_seq
    return low
