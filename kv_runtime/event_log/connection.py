"""One connection to the event log: streams, confirmed publishing, ordered reading, objects, and core NATS beside it.

Callers see none of the NATS client's types: only `BrokerUnavailable` and `LogMessage`. A lost connection reconnects by
itself, without a time limit. `run`, a part of the process, then creates missing streams again and resumes readings
(`reading.py`). An error raised by an `on_message` is a bug of ours: `run` raises it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, Self

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import SlowConsumerError

from kv_runtime.clock import Clock
from kv_runtime.config.rendering import without_user
from kv_runtime.config.sections import NatsClientSection
from kv_runtime.event_log.errors import BrokerUnavailable, StoppedUnconnected, StreamUnfit, mapped
from kv_runtime.event_log.objects import ObjectBucket
from kv_runtime.event_log.reading import OnMessage, Reading
from kv_runtime.event_log.streams import LogMessage, StreamClient, StreamSpec
from kv_runtime.event_log.window import SendWindow
from kv_runtime.telemetry import Family, RateLimitedLog, counter, gauge

WINDOW_MESSAGES = 256
"""How many publications of one connection may be unconfirmed at once; more would hide a longer round trip."""
CONFIRM_S = 5.0
_CONNECT_S = 5
_RECONNECT_WAIT_S = 1
"""Pause between two attempts to connect, for the first time or again."""
_PING_S, _PINGS_MISSED_MAX = 1, 2
"""A frozen server counts as lost after 3 s: before the 5 s after which silent workers count as gone."""
_LOOK_S = 1.0
LISTEN_MESSAGES_MAX, LISTEN_BYTES_MAX = 65_536, 128 << 20
"""Bounds on what one subscription to core NATS has pending; an index gets the answers of all agents by a single one."""
_UNAUTHORIZED = re.compile(r"authorization|authentication", re.IGNORECASE)

_log = structlog.get_logger("event_log")


class LogStatistics(NamedTuple):
    """The figures of one connection to the log."""

    connected: bool
    reconnects_total: int
    unconfirmed: int
    """Publications that are sent and not yet confirmed."""
    publish_failures_total: int
    """Publications that were sent and never confirmed."""
    dropped_total: int
    """Core NATS messages (heartbeats, load reports, answers) that came faster than they were processed."""
    read_anew_total: int
    """How often a followed stream was read from its beginning again: it was replaced, or had lost its end."""


class EventLog(StreamClient):
    """One connection. `connect` makes it, `run` maintains it, `close` ends it."""

    def __init__(self, url: str, *, confirm_s: float = CONFIRM_S) -> None:
        super().__init__(confirm_s)
        self.url = url
        """What `connect` was given; it may contain a password."""
        self._shown_url = without_user(url)
        self._window = SendWindow(self.client, WINDOW_MESSAGES, confirm_s)
        self.send = self._window.send
        """Sends a message, and returns the future of its seq in the stream (`SendWindow.send`)."""
        self._ensured: dict[str, StreamSpec] = {}
        self._readings: list[Reading] = []
        self._listening: dict[str, list[OnMessage]] = {}
        self._unsubscribes: list[Callable[[], Awaitable[None]]] = []
        self._due = asyncio.Event()
        self._streams_doubtful = self._closing = False
        self._failure: Exception | None = None
        self._reconnects = self._dropped = 0
        self._were_credentials_refused = False
        self._clock = Clock()
        self._drops = RateLimitedLog(_log, self._clock)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        user: str = "",
        token: str = "",
        confirm_s: float = CONFIRM_S,
        awaited_until: asyncio.Event | None = None,
    ) -> Self:
        """Return a connected client.

        Args:
            url: `nats://host:port`; of a cluster, any of its servers, or several separated by commas.
            name: the name of the connection in the server's lists.
            user: for servers with named users.
            token: the user's password; without `user`, the server's common token.
            confirm_s: how long the server may take to confirm a publication, or to answer.
            awaited_until: until this event is set, wait for a server that is not there; None: do not wait.

        Raises:
            BrokerUnavailable: there is no server at `url`, or it refuses the connection.
            StoppedUnconnected: `awaited_until` was set first.
        """
        is_told = False
        while True:
            log = cls(url, confirm_s=confirm_s)
            try:
                await log._connect(name, user, token)
            except BrokerUnavailable as error:
                if awaited_until is None or log._were_credentials_refused:
                    raise
                if awaited_until.is_set():
                    raise StoppedUnconnected(str(error)) from error
                if not is_told:
                    _log.warning("log_awaited", url=log._shown_url, reason=str(error))
                    is_told = True
            else:
                return log
            await log._clock.wait(awaited_until, _RECONNECT_WAIT_S)

    async def _connect(self, name: str, user: str, token: str) -> None:
        with mapped(f"nats.url {self._shown_url}"):
            try:
                await self.client.connect(
                    servers=self.url.split(","),
                    name=name,
                    user=user or None,
                    password=token if user else None,
                    token=None if user else token or None,
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
            except NatsError as error:
                if not self._were_credentials_refused:
                    raise
                words = "the server refused the credentials, which are nats.user and nats.credentials"
                raise NatsError(words) from error  # the client's own error says only that there is no server
            await self._window.open()
        self.client.options["max_reconnect_attempts"] = -1

    async def _lost(self) -> None:
        self._window.fail("the connection was lost")
        if not self._closing:
            reason, self.client.ended_by = self.client.ended_by, ""
            _log.warning("log_lost", url=self._shown_url, reason=reason or "the connection broke")

    async def _found(self) -> None:
        _log.info("log_found", url=self._shown_url)
        self._reconnects += 1
        self._streams_doubtful = True
        for reading in self._readings:
            reading.is_broken = True
        self._due.set()

    async def _closed(self) -> None:
        self._window.fail("the connection was closed")
        if not self._closing:
            reason = self.client.last_error
            self._fail(BrokerUnavailable(f"nats.url {self._shown_url}: the server ended the connection: {reason}"))

    async def _erred(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self._dropped += 1
            self._drops.warning("log_messages_dropped", key=error.sid, subject=error.subject)
            return
        text = str(error) or type(error).__name__
        if _UNAUTHORIZED.search(text):  # a reset of the connection may follow
            self._were_credentials_refused = True
        _log.debug("log_error", error=text)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._due.set()

    @property
    def is_connected(self) -> bool:
        """Whether the server is reachable, as far as is known: a frozen one is detected within 3 s."""
        return self.client.is_connected

    def statistics(self) -> LogStatistics:
        """Return the connection's figures."""
        return LogStatistics(
            connected=self.is_connected,
            reconnects_total=self._reconnects,
            unconfirmed=len(self._window),
            publish_failures_total=self._window.failures_total,
            dropped_total=self._dropped,
            read_anew_total=sum(reading.read_anew_total for reading in self._readings),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Maintain streams and readings until `stop` is set.

        Raises:
            BrokerUnavailable: the server ended the connection and refuses another.
            Exception: raised by an `on_message`.
        """
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: self._due.set())
        try:
            while not stop.is_set():
                self._due.clear()
                if self._failure is not None:
                    raise self._failure
                if self.is_connected:
                    await self._tend()
                await self._clock.wait(self._due, _LOOK_S)
        finally:
            stopping.cancel()

    async def _tend(self) -> None:
        try:
            if self._streams_doubtful:
                for spec in self._ensured.values():
                    try:
                        await super().ensure_stream(spec)
                    except StreamUnfit as error:  # the stream was replaced meanwhile; it is still read
                        _log.error("stream_unfit", reason=str(error))
                self._streams_doubtful = False
            for reading in self._readings:
                if reading.is_broken or reading.is_silent:
                    await reading.begin()
        except BrokerUnavailable as error:
            self._streams_doubtful = True  # the stream may be gone: it is created again before the next attempt
            _log.warning("log_not_followed", reason=str(error))

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create or update the stream, now and after each reconnect; raises as the base class does."""
        await super().ensure_stream(spec)
        self._ensured[spec.name] = spec

    def objects(self, bucket: str) -> ObjectBucket:
        """Return the objects of a bucket, which need not exist."""
        return ObjectBucket(self, bucket)

    async def publish(
        self,
        subject: str,
        data: bytes,
        message_id: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        after_seq: int | None = None,
    ) -> int:
        """Publish a message, which is stored once for each `message_id`; return its seq in the stream.

        Args:
            subject: the subject that gets it.
            data: its bytes.
            message_id: the server drops a message whose id it has; empty: none is dropped.
            headers: for readers, besides the bytes.
            after_seq: the required seq of the subject's newest message; 0: there must be none; None: any is allowed.

        Raises:
            LastSequenceDiffers: the newest message of the subject is not at `after_seq`; nothing was stored.
            BrokerUnavailable: as `send`.
        """
        return await (await self.send(subject, data, message_id, headers=headers, after_seq=after_seq))

    async def announce(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish on core NATS: only present subscribers receive the message."""
        with self.reachable(f"announce {subject}"):
            await self.client.publish(subject, data, reply=reply)

    async def follow(
        self, stream: str, subject: str, on_message: OnMessage, *, after_seq: int = 0, created: str = ""
    ) -> Reading:
        """Call `on_message` with every message of the stream after `after_seq` that it still has, in order, once.

        If the stream was not created at `created`, or ends before `after_seq`, `on_message` gets all messages. It gets
        one at a time: the server sends no faster than they are processed. `run` must be running. The returned reading
        has the progress.
        """
        deliver = self._guarded(on_message)
        reading = Reading(self, stream, subject, deliver, self._due.set, after_seq=after_seq, created=created)
        await reading.begin()
        self._readings.append(reading)
        return reading

    async def leave(self, reading: Reading) -> None:
        """End a reading."""
        self._readings.remove(reading)
        with mapped("leave"):
            await reading.end()

    async def listen(self, subject: str, on_message: OnMessage) -> None:
        """Call `on_message` with core NATS messages on `subject` from now on, one at a time.

        All listeners of a subject share one subscription; each gets a message after the listener before it. Beyond
        `LISTEN_MESSAGES_MAX` or `LISTEN_BYTES_MAX` pending, further messages are dropped and counted.
        """
        if subject in self._listening:
            self._listening[subject].append(self._guarded(on_message))
            return
        readers = [self._guarded(on_message)]

        async def received(message: Msg) -> None:
            heard = LogMessage(message.subject, message.data, reply=message.reply, headers=message.headers)
            for deliver in readers:
                await deliver(heard)

        with mapped(f"listen {subject}"):
            subscription = await self.client.subscribe(
                subject,
                cb=received,
                pending_msgs_limit=LISTEN_MESSAGES_MAX,
                pending_bytes_limit=LISTEN_BYTES_MAX,
            )
            self._unsubscribes.append(subscription.unsubscribe)
            self._listening[subject] = readers
            # nats-py 2.12 and later writes a `PING` at once, and other commands with its next flush: the first answer
            # proves that the subscription is written, the second that the server has read it.
            await self.client.flush()
            await self.client.flush()

    def _guarded(self, on_message: OnMessage) -> OnMessage:
        async def deliver(message: LogMessage) -> None:
            try:
                await on_message(message)
            except Exception as error:  # noqa: BLE001 - the client would swallow it; `run` raises it
                error.add_note(f"taking a message of {message.subject}")
                self._fail(error)

        return deliver

    def new_inbox(self) -> str:
        """Return a new unique subject for answers."""
        return self.client.new_inbox()

    async def close(self) -> None:
        """Close the connection and end all subscriptions; flush published messages if possible."""
        self._closing = True
        with suppress(NatsError, TimeoutError, OSError):
            for reading in self._readings:
                await reading.end()
            for unsubscribe in self._unsubscribes:
                await unsubscribe()
            if self.is_connected:
                await self.client.flush(timeout=1)
        with suppress(RuntimeError, OSError):  # `close` writes pending bytes, also to a closed transport
            await self.client.close()
        self._window.fail("the connection was closed")


@asynccontextmanager
async def connected_log(
    nats: NatsClientSection, name: str, *, confirm_s: float = CONFIRM_S, awaited_until: asyncio.Event | None = None
) -> AsyncIterator[EventLog]:
    """Be connected to the settings' log within the block; arguments and errors are those of `EventLog.connect`."""
    token = nats.credentials.get_secret_value()
    log = await EventLog.connect(
        nats.url, name=name, user=nats.user, token=token, confirm_s=confirm_s, awaited_until=awaited_until
    )
    try:
        yield log
    finally:
        await log.close()


def log_families(statistics: LogStatistics) -> Iterator[Family]:
    """Yield the families of the process's only connection."""
    yield gauge("log_connected", "1 while the connection to NATS is up", (), [((), statistics.connected)])
    meaning = "Publications of this process that NATS has not confirmed yet; 256 at most"
    yield gauge("log_unconfirmed_messages", meaning, (), [((), statistics.unconfirmed)])
    for name, meaning, count in (
        ("log_reconnects", "Times that the connection to NATS was lost and restored", statistics.reconnects_total),
        ("log_publish_failures", "Publications that NATS did not confirm", statistics.publish_failures_total),
        (
            "log_dropped_messages",
            "Messages dropped because 65,536 of their subscription were waiting",
            statistics.dropped_total,
        ),
        (
            "log_read_anew",
            "Times that a stream was replaced or had lost its end, and was read again from its beginning",
            statistics.read_anew_total,
        ),
    ):
        yield counter(name, meaning, (), [((), count)])
