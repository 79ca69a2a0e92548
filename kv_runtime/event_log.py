"""The event log's client: streams, confirmed publishing, ordered reading, and core NATS beside it.

Everything foreign ends here: callers see `BrokerUnavailable` and `LogMessage`. A lost connection is found again by
itself, for as long as it takes. `run`, a part of the process, then makes streams again that are gone, and sees to it
that what is followed goes on:

    the connection is a new one, a message is missing,     go on after the last message that was told
    or the server said nothing for `_SILENCE_S`
    the stream is another than before, or ends before      the log was lost: begin at its beginning; what had been
    the last message that was told                         told may be told again

An `on_message` that raises is our fault: `run` raises it.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Self

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import SlowConsumerError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    Header,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError

from kv_runtime.supervise import until

_CONNECT_S = 5
_RECONNECT_WAIT_S = 1
_PING_S, _PINGS_MISSED_MAX = 1, 2
"""A frozen server is lost after 3 s: before the 5 s after which its silence would be taken for that of the workers."""
_PUBLISH_S = 5.0
_HEARTBEAT_S = 2.0
_SILENCE_S = 2.5 * _HEARTBEAT_S
_LOOK_S = 1.0
_OF_STREAM = "$JS.ACK."
_USER_INFO = re.compile(r"//[^/@]*@")

_log = structlog.get_logger("event_log")


class BrokerUnavailable(Exception):
    """The server cannot be reached, or did not do as asked; what was meant to be done may be tried again."""


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"{what}: {str(error) or type(error).__name__}") from error


class StreamSpec(NamedTuple):
    """What a stream keeps; `per_subject` bounds the messages of one subject (-1: no bound)."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int
    per_subject: int = -1
    duplicate_window_s: float = 30.0


class LogMessage(NamedTuple):
    """A message as read: `stream_seq` is 0 on core NATS; `reply` is where an answer goes, if one is wanted."""

    subject: str
    data: bytes
    stream_seq: int = 0
    reply: str = ""


OnMessage = Callable[[LogMessage], Awaitable[None]]


class EventLog:
    """One connection. Made by `connect`; `run` watches over it; `close` ends it."""

    def __init__(self, url: str, on_lost: Callable[[], None], on_found: Callable[[], None]) -> None:
        self._url = url
        self._shown_url = _USER_INFO.sub("//", url)
        self._on_lost, self._on_found = on_lost, on_found
        self._client = Client()
        self._stream = self._client.jetstream(timeout=_PUBLISH_S)
        self._specs: dict[str, StreamSpec] = {}
        self._readings: list[_Reading] = []
        self._listenings: list[Subscription] = []
        self._due = asyncio.Event()
        self._streams_doubtful = self._closing = False
        self._failure: Exception | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        token: str = "",
        on_lost: Callable[[], None] = lambda: None,
        on_found: Callable[[], None] = lambda: None,
    ) -> Self:
        """Return a connected client; `on_lost` and `on_found` tell of the connection from then on.

        Raises:
            BrokerUnavailable: there is no server at `url`, or it refuses us.
        """
        log = cls(url, on_lost, on_found)
        await log._connect(name, token)
        return log

    async def _connect(self, name: str, token: str) -> None:
        with _mapped(f"nats.url {self._shown_url}"):
            await self._client.connect(
                servers=[self._url],
                name=name,
                token=token or None,
                connect_timeout=_CONNECT_S,
                reconnect_time_wait=_RECONNECT_WAIT_S,
                max_reconnect_attempts=1,
                ping_interval=_PING_S,
                max_outstanding_pings=_PINGS_MISSED_MAX,
                disconnected_cb=self._lost,
                reconnected_cb=self._found,
                closed_cb=self._closed,
                error_cb=self._erred,
            )
        self._client.options["max_reconnect_attempts"] = -1

    async def _lost(self) -> None:
        if not self._closing:
            _log.warning("log_lost", url=self._shown_url)
            self._on_lost()

    async def _found(self) -> None:
        _log.info("log_found", url=self._shown_url)
        self._streams_doubtful = True
        for reading in self._readings:
            reading.is_broken = True
        self._due.set()
        self._on_found()

    async def _closed(self) -> None:
        if not self._closing:
            reason = self._client.last_error
            self._fail(BrokerUnavailable(f"nats.url {self._shown_url}: the server ended the connection: {reason}"))

    async def _erred(self, error: Exception) -> None:
        level = logging.WARNING if isinstance(error, SlowConsumerError) else logging.DEBUG
        _log.log(level, "log_error", error=str(error) or type(error).__name__)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._due.set()

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached at this moment, as far as is known: a frozen one is found out in 3 s."""
        return self._client.is_connected

    async def run(self, stop: asyncio.Event) -> None:
        """Watch over the streams and what is followed until `stop` is set.

        Raises:
            BrokerUnavailable: the server ended the connection, and will not have another.
            Exception: what an `on_message` raised.
        """
        while not stop.is_set():
            self._due.clear()
            if self._failure is not None:
                raise self._failure
            if self.is_connected:
                await self._tend()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await until(stop, self._due.wait())

    async def _tend(self) -> None:
        try:
            if self._streams_doubtful:
                for spec in self._specs.values():
                    await self.ensure_stream(spec)
                self._streams_doubtful = False
            for reading in self._readings:
                if reading.is_broken or reading.is_silent:
                    await reading.begin()
        except BrokerUnavailable as error:
            _log.warning("log_not_followed", reason=str(error))

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """The stream exists with these limits, now and whenever the log was lost and found; the rest of it stays."""
        limits = {
            "subjects": list(spec.subjects),
            "max_age": spec.max_age_s,
            "max_bytes": spec.max_bytes,
            "max_msgs_per_subject": spec.per_subject,
            "duplicate_window": min(spec.duplicate_window_s, spec.max_age_s or spec.duplicate_window_s),
        }
        with _mapped(f"stream {spec.name}"):
            try:
                present = (await self._stream.stream_info(spec.name)).config
                await self._stream.update_stream(present, **limits)
            except NotFoundError:
                await self._stream.add_stream(
                    StreamConfig(
                        name=spec.name,
                        retention=RetentionPolicy.LIMITS,
                        storage=StorageType.FILE,
                        discard=DiscardPolicy.OLD,
                        allow_direct=True,
                    ),
                    **limits,
                )
        self._specs[spec.name] = spec

    async def publish(self, subject: str, data: bytes, message_id: str = "") -> int:
        """Return the message's place in its stream, where it now is, once for each `message_id`."""
        headers = {"Nats-Msg-Id": message_id} if message_id else None
        with self._reachable(f"publish {subject}"):
            ack = await self._stream.publish(subject, data, headers=headers)
        return ack.seq

    async def announce(self, subject: str, data: bytes, reply: str = "") -> None:
        """The message was handed to core NATS: whoever listens now hears it, nobody else ever does."""
        with self._reachable(f"announce {subject}"):
            await self._client.publish(subject, data, reply=reply)

    @contextmanager
    def _reachable(self, what: str) -> Iterator[None]:
        """Refuse at once while the server is away: kept until it is back, old news would be told as new."""
        if not self.is_connected:
            raise BrokerUnavailable(f"{what}: not connected")
        with _mapped(what):
            yield

    async def follow(self, stream: str, subject: str, on_message: OnMessage) -> None:
        """`on_message` gets every message of the stream, from the first that it still has, in order, once.

        One at a time: the server sends no faster than they are taken. `run` has to run.
        """
        reading = _Reading(self._client, self._stream, stream, subject, self._teller(on_message), self._due.set)
        await reading.begin()
        self._readings.append(reading)

    async def listen(self, subject: str, on_message: OnMessage) -> None:
        """`on_message` gets what is announced on `subject` from now on, one at a time."""
        tell = self._teller(on_message)

        async def received(message: Msg) -> None:
            await tell(LogMessage(message.subject, message.data, reply=message.reply))

        with _mapped(f"listen {subject}"):
            self._listenings.append(await self._client.subscribe(subject, cb=received))
            await self._client.flush()

    def _teller(self, on_message: OnMessage) -> OnMessage:
        async def tell(message: LogMessage) -> None:
            try:
                await on_message(message)
            except Exception as error:  # noqa: BLE001 - the client would swallow it; `run` raises it
                error.add_note(f"taking a message of {message.subject}")
                self._fail(error)

        return tell

    def new_inbox(self) -> str:
        """Return a subject that nobody else uses, for answers."""
        return self._client.new_inbox()

    async def close(self) -> None:
        """The connection is gone, nothing is told any more; what was announced before has left, if it could."""
        self._closing = True
        with suppress(NatsError, TimeoutError, OSError):
            for reading in self._readings:
                await reading.end()
            for listening in self._listenings:
                await _unsubscribe(listening)
            if self.is_connected:
                await self._client.flush(timeout=1)
        with suppress(RuntimeError, OSError):  # it writes what is pending, also to a transport that is closed already
            await self._client.close()


async def _unsubscribe(subscription: Subscription) -> None:
    await subscription.unsubscribe()


class _Reading:
    """One stream being read, by a consumer that the server forgets with the connection; `begin` makes it anew."""

    def __init__(
        self,
        client: Client,
        context: JetStreamContext,
        stream: str,
        subject: str,
        tell: OnMessage,
        on_broken: Callable[[], None],
    ) -> None:
        self._client, self._context = client, context
        self._stream, self._subject = stream, subject
        self._tell, self._on_broken = tell, on_broken
        self._turn = asyncio.Lock()
        self._subscription: Subscription | None = None
        self._created = ""
        self._told_seq = 0
        self._received = 0
        self._heard_at_s = 0.0
        self.is_broken = False

    @property
    def is_silent(self) -> bool:
        """Whether the server let its heartbeats fail; a reader that is still being told something hears none."""
        return not self._turn.locked() and asyncio.get_running_loop().time() - self._heard_at_s > _SILENCE_S

    async def begin(self) -> None:
        """The stream is read on after what was told already; from its beginning where it is another one."""
        async with self._turn:
            with _mapped(f"follow {self._stream}"):
                await self.end()
                info = await self._context.stream_info(self._stream)
                if str(info.created) != self._created or info.state.last_seq < self._told_seq:
                    if self._told_seq:
                        _log.warning("log_read_anew", stream=self._stream, told_seq=self._told_seq)
                    self._created, self._told_seq = str(info.created), 0
                inbox = self._client.new_inbox()
                self._received = 0
                self._subscription = await self._client.subscribe(inbox, cb=self._on_message)
                await self._context.add_consumer(self._stream, self._consumer(inbox))
            self._heard_at_s = asyncio.get_running_loop().time()
            self.is_broken = False

    def _consumer(self, inbox: str) -> ConsumerConfig:
        return ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE if self._told_seq else DeliverPolicy.ALL,
            opt_start_seq=self._told_seq + 1 if self._told_seq else None,
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            filter_subject=self._subject,
            flow_control=True,
            idle_heartbeat=_HEARTBEAT_S,
            mem_storage=True,
            num_replicas=1,
        )

    async def end(self) -> None:
        """Nothing is told any more."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await _unsubscribe(subscription)

    async def _on_message(self, message: Msg) -> None:
        async with self._turn:  # of a subscription that `begin` has dropped, nothing gets here
            self._heard_at_s = asyncio.get_running_loop().time()
            if not message.reply.startswith(_OF_STREAM):
                await self._obey(message)
                return
            place = message.metadata.sequence
            if place.consumer != self._received + 1:
                self._break()
                return
            self._received += 1
            self._told_seq = place.stream
            await self._tell(LogMessage(message.subject, message.data, place.stream))

    async def _obey(self, message: Msg) -> None:
        """Take what the server says of the reading: a heartbeat, a question whether we keep up, or its end."""
        headers = message.headers or {}
        if answer_to := message.reply or headers.get(Header.CONSUMER_STALLED):
            await self._client.publish(answer_to)
        sent = headers.get(Header.LAST_CONSUMER)
        if headers.get(Header.STATUS) != "100" or (sent is not None and int(sent) != self._received):
            self._break()

    def _break(self) -> None:
        self.is_broken = True
        self._on_broken()
