"""Reads a stream in order, by a push consumer, which the server deletes with the connection.

    a new connection, a missing message, or a server       continue after the last delivered message
    that was silent for `SILENCE_S`
    another stream than before, or one that ends before    the log was lost: read from the beginning; messages may be
    the last delivered message                             delivered again
    the stream dropped messages after the last             continue with the first message that it still has
    delivered one

The server sends no faster than messages are processed (flow control), and sends a heartbeat every `HEARTBEAT_S`.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header

from kv_runtime.event_log.errors import mapped
from kv_runtime.event_log.streams import LogMessage, StreamClient

HEARTBEAT_S = 2.0
SILENCE_S = 2.5 * HEARTBEAT_S
_OF_STREAM = "$JS.ACK."
_SEQ_AT, _TOKENS = 5, 9
"""A message's reply subject is `$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>`.

Newer servers put two tokens before the stream: the domain and the account's hash.
"""
_IDLE = "100"

_log = structlog.get_logger("event_log")


OnMessage = Callable[[LogMessage], Awaitable[None]]


class Reading:
    """The reading of one stream; `begin` creates its consumer, and replaces it."""

    def __init__(
        self,
        server: StreamClient,
        stream: str,
        subject: str,
        deliver: OnMessage,
        on_broken: Callable[[], None],
        *,
        after_seq: int = 0,
        created: str = "",
    ) -> None:
        self._server, self._client = server, server.client
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
        """Messages after `delivered_seq`, as the server counted them last."""
        self.read_anew_total = 0
        """How often the log was lost, and read from the beginning again."""

    @property
    def is_silent(self) -> bool:
        """Whether the server's heartbeats are overdue; False while a message is being processed."""
        return not self._lock.locked() and asyncio.get_running_loop().time() - self._received_at_s > SILENCE_S

    async def begin(self) -> None:
        """Continue after the last delivered message, or from the beginning if the stream is another one.

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
                consumer = await self._server.context.add_consumer(self._stream, self._consumer(inbox))
            self.unread = consumer.num_pending or 0
            self._received_at_s = asyncio.get_running_loop().time()
            self.is_broken = False

    async def _find_start(self) -> None:
        state = await self._server.stream_state(self._stream)
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
            tokens = message.reply.split(".")
            first = _SEQ_AT if len(tokens) == _TOKENS else _SEQ_AT + 2
            seq, consumer_seq, time_ns, pending = map(int, tokens[first : first + 4])
            if consumer_seq != self._received + 1:
                self._break()
                return
            self._received += 1
            read = LogMessage(message.subject, message.data, seq, time_ns=time_ns, headers=message.headers)
            await self._deliver(read)
            self.delivered_seq, self.unread = seq, pending
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
