"""The event log's client: streams, confirmed publishing, ordered reading, and core NATS beside it.

Everything foreign ends here: callers see `BrokerUnavailable` and `LogMessage`. A lost connection is found again by
itself, for as long as it takes; what was followed goes on where it was.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, DeliverPolicy, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

_CONNECT_S = 5
_RECONNECT_WAIT_S = 1
_PUBLISH_S = 5.0
_HEARTBEAT_S = 5.0

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
    """One connection. Made by `connect`; `close` ends it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stream = client.jetstream(timeout=_PUBLISH_S)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        token: str = "",
        on_lost: Callable[[], None] = lambda: None,
        on_found: Callable[[], None] = lambda: None,
    ) -> "EventLog":
        """Return a connected client; `on_lost` and `on_found` tell of the connection from then on.

        Raises:
            BrokerUnavailable: there is no server at `url`, or it refuses us.
        """

        async def lost() -> None:
            _log.warning("log_lost", url=url)
            on_lost()

        async def found() -> None:
            _log.info("log_found", url=url)
            on_found()

        async def failed(error: Exception) -> None:
            _log.debug("log_error", error=str(error) or type(error).__name__)

        client = Client()
        with _mapped(f"nats.url {url}"):
            await client.connect(
                servers=[url],
                name=name,
                token=token or None,
                connect_timeout=_CONNECT_S,
                reconnect_time_wait=_RECONNECT_WAIT_S,
                max_reconnect_attempts=1,
                disconnected_cb=lost,
                reconnected_cb=found,
                error_cb=failed,
            )
        client.options["max_reconnect_attempts"] = -1
        return cls(client)

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached at this moment."""
        return self._client.is_connected

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """The stream exists with these limits."""
        config = StreamConfig(
            name=spec.name,
            subjects=list(spec.subjects),
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_age=spec.max_age_s,
            max_bytes=spec.max_bytes,
            max_msgs_per_subject=spec.per_subject,
            duplicate_window=min(spec.duplicate_window_s, spec.max_age_s or spec.duplicate_window_s),
            allow_direct=True,
        )
        with _mapped(f"stream {spec.name}"):
            try:
                await self._stream.stream_info(spec.name)
                await self._stream.update_stream(config)
            except NotFoundError:
                await self._stream.add_stream(config)

    async def publish(self, subject: str, data: bytes, message_id: str = "") -> int:
        """Return the message's place in its stream, where it now is, once for each `message_id`."""
        if not self._client.is_connected:
            raise BrokerUnavailable(f"publish {subject}: not connected")
        headers = {"Nats-Msg-Id": message_id} if message_id else None
        with _mapped(f"publish {subject}"):
            ack = await self._stream.publish(subject, data, headers=headers)
        return ack.seq

    async def announce(self, subject: str, data: bytes, reply: str = "") -> None:
        """The message was handed to core NATS: whoever listens now hears it, nobody else ever does."""
        with _mapped(f"announce {subject}"):
            await self._client.publish(subject, data, reply=reply)

    async def follow(self, stream: str, subject: str, on_message: OnMessage) -> None:
        """`on_message` gets every message of the stream, from the first that it still has, in order, once."""

        async def received(message: Msg) -> None:
            await on_message(LogMessage(message.subject, message.data, message.metadata.sequence.stream))

        with _mapped(f"follow {stream}"):
            await self._stream.subscribe(
                subject,
                stream=stream,
                cb=received,
                ordered_consumer=True,
                idle_heartbeat=_HEARTBEAT_S,
                config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL),
            )

    async def listen(self, subject: str, on_message: OnMessage) -> None:
        """`on_message` gets what is announced on `subject` from now on."""

        async def received(message: Msg) -> None:
            await on_message(LogMessage(message.subject, message.data, reply=message.reply))

        with _mapped(f"listen {subject}"):
            await self._client.subscribe(subject, cb=received)
            await self._client.flush()

    def new_inbox(self) -> str:
        """Return a subject that nobody else uses, for answers."""
        return self._client.new_inbox()

    async def close(self) -> None:
        """The connection is gone; what was announced before has left, if it could."""
        if self._client.is_connected:
            with suppress(NatsError, TimeoutError, OSError):
                await self._client.flush(timeout=1)
        with suppress(RuntimeError):  # it writes what is pending, also to a transport that is closed already
            await self._client.close()
