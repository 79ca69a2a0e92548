"""Streams: their settings, creating and updating them, and their state.

no stream of the name                           created
a stream with another setting of `_FIXED`       `StreamUnfit`: it was made by another owner, or for another use
a stream with another setting of `_TENDED`      updated
any other setting                               unchanged
"""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeVar

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import DEFAULT_PREFIX, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, NotFoundError

from kv_runtime.event_log.errors import StreamUnfit

_FIXED = (
    "sealed",
    "storage",
    "retention",
    "discard",
    "mirror",
    "sources",
    "subject_transform",
    "no_ack",
    "deny_purge",
    "allow_rollup_hdrs",
)
"""With other values the log would not store what we rely on, or would deliver something else."""
_TENDED = ("subjects", "max_age", "max_bytes", "max_msgs_per_subject", "duplicate_window", "num_replicas")
_T = TypeVar("_T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAME_IN_USE = 10058
"""The server's code for a stream of the name that was created meanwhile, with other settings."""


class StreamSpec(NamedTuple):
    """The limits of a stream; `per_subject` bounds the messages of one subject (-1: no bound).

    `replicas` is the number of a cluster's servers that store it: 1, 3 or 5; 1 for a single server.
    """

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int
    per_subject: int = -1
    duplicate_window_s: float = 30.0
    replicas: int = 1

    def config(self) -> StreamConfig:
        """Return the settings of the stream: on disk, the oldest messages are dropped first, no mirror or sources."""
        return StreamConfig(
            name=self.name,
            subjects=list(self.subjects),
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD,
            max_age=self.max_age_s,
            max_bytes=self.max_bytes,
            max_msgs_per_subject=self.per_subject,
            duplicate_window=min(self.duplicate_window_s, self.max_age_s or self.duplicate_window_s),
            num_replicas=self.replicas,
            allow_direct=True,
        )


class LogStreamState(NamedTuple):
    """The state of a stream; without messages `first_seq` is above `last_seq`, and the time is 0.

    `created` is the creation time in the server's text: a stream of the same name with another time is another stream.
    `first_time_ns`, the first message's time, is the server's, since 1970.
    """

    created: str
    first_seq: int
    last_seq: int
    bytes: int
    first_time_ns: int


async def ensure(context: JetStreamContext, wanted: StreamConfig) -> None:
    """Create or update a stream; other processes may do the same meanwhile.

    Raises:
        StreamUnfit: the existing stream cannot be ours.
        NatsError: the server refuses it, for instance for want of space.
    """
    assert wanted.name is not None
    present = await _config(context, wanted.name)
    if present is None:
        try:
            await context.add_stream(wanted)
        except BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
        present = (await context.stream_info(wanted.name)).config
    _check(wanted, present)
    changes = {field: getattr(wanted, field) for field in _TENDED}
    if any(getattr(present, field) != value for field, value in changes.items()):
        await context.update_stream(present, **changes)


async def _config(context: JetStreamContext, name: str) -> StreamConfig | None:
    try:
        return (await context.stream_info(name)).config
    except NotFoundError:
        return None


def _check(wanted: StreamConfig, present: StreamConfig) -> None:
    for field in _FIXED:
        found, allowed = (getattr(config, field) or None for config in (present, wanted))
        if found != allowed:
            raise StreamUnfit(str(wanted.name), field, _shown(found), _shown(allowed))


def _shown(value: object) -> object:
    return getattr(value, "value", value) or "none"


class _State(msgspec.Struct, frozen=True):
    messages: int
    first_seq: int
    last_seq: int
    bytes: int
    first_ts: str


class _Info(msgspec.Struct, frozen=True):
    created: str
    state: _State


async def state_of(client: Client, name: str, timeout_s: float) -> LogStreamState:
    """Return the state of a stream; the client's own parser of this answer omits the times.

    Raises:
        NatsError: there is no such stream, or no answer.
    """
    info = await answer_of(client, f"STREAM.INFO.{name}", _Info, timeout_s)
    state = info.state
    if not state.messages:
        return LogStreamState(info.created, state.last_seq + 1, state.last_seq, state.bytes, 0)
    first_time_ns = ns_of(state.first_ts)
    return LogStreamState(info.created, state.first_seq, state.last_seq, state.bytes, first_time_ns)


class _Failed(msgspec.Struct, frozen=True):
    error: dict[str, object] | None = None


async def answer_of(client: Client, what: str, kind: type[_T], timeout_s: float, body: bytes = b"") -> _T:
    """Return JetStream's answer to an API request.

    Raises:
        APIError: the server's error; `NotFoundError` for a missing stream or message.
        NatsError: any other failure: no answer, or one that cannot be read.
    """
    try:
        answer = await client.request(f"{DEFAULT_PREFIX}.{what}", body, timeout=timeout_s)
    except NoRespondersError as error:
        raise NatsError("the server has no JetStream") from error
    try:
        if (failure := msgspec.json.decode(answer.data, type=_Failed).error) is not None:
            APIError.from_error(failure)
        return msgspec.json.decode(answer.data, type=kind)
    except msgspec.MsgspecError as error:
        raise NatsError(f"an answer that cannot be read: {error}") from error


def ns_of(time: str) -> int:
    """Return the nanoseconds since 1970 of a UTC time as servers write it, with up to nine digits of a second."""
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    since = datetime.fromisoformat(seconds).replace(tzinfo=UTC) - _EPOCH
    return since // timedelta(seconds=1) * 10**9 + int(fraction.ljust(9, "0"))
