"""Streams: their settings, creating and updating them, their state, and single messages of them.

no stream of the name                           created
a stream that differs in a `_FIXED` setting     `StreamUnfit`: it was made by another owner, or for another use
a stream that differs in a `_TENDED` setting    updated
any other setting                               unchanged
"""

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js.api import DEFAULT_PREFIX, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, NotFoundError
from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION

from kv_runtime.event_log.errors import BrokerUnavailable, StreamUnfit, mapped

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
_NO_SUCH_STREAM = 10059
_NO_MESSAGE = 10037
"""The server's code for a stream without the message; a missing stream has another code."""
_NAME_IN_USE = 10058
"""The server's code for a stream of the name that was created meanwhile, with other settings."""


class StreamSpec(NamedTuple):
    """The limits of a stream; `per_subject` bounds the messages of one subject (-1: no bound).

    `replicas` is the number of a cluster's servers that store it: 1, 3 or 5; 1 for a single server. A stream that is
    full drops its oldest messages; the stream of a bucket refuses new ones.
    """

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int
    per_subject: int = -1
    duplicate_window_s: float = 30.0
    replicas: int = 1
    is_bucket: bool = False

    def config(self) -> StreamConfig:
        """Return the settings of the stream: on disk, no mirror or sources."""
        return StreamConfig(
            name=self.name,
            subjects=list(self.subjects),
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW if self.is_bucket else DiscardPolicy.OLD,
            max_age=self.max_age_s,
            max_bytes=self.max_bytes,
            max_msgs_per_subject=self.per_subject,
            duplicate_window=min(self.duplicate_window_s, self.max_age_s or self.duplicate_window_s),
            num_replicas=self.replicas,
            allow_rollup_hdrs=self.is_bucket,
            allow_direct=True,
        )


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


def _check(wanted: StreamConfig, present: StreamConfig) -> None:
    for field in _FIXED:
        found, allowed = (getattr(config, field) or None for config in (present, wanted))
        if found != allowed:
            raise StreamUnfit(f"stream {wanted.name}: {field}: found {_shown(found)}, allowed {_shown(allowed)}")


def _shown(value: object) -> object:
    return getattr(value, "value", value) or "none"


class _Failed(msgspec.Struct, frozen=True):
    error: dict[str, object] | None = None


class LastingClient(Client):
    """Connects again also after the server ended the connection by an error.

    A server does so when its credentials or limits were changed, or too many clients are connected. The library's
    client would then stay closed, and the process end. Errors before the first connection are raised as by the library.
    """

    ended_by = ""
    """The server's error that ended the last connection; empty: no error did."""

    async def _process_err(self, err_msg: str) -> None:
        if not self.is_connected or PERMISSIONS_ERR in err_msg or STALE_CONNECTION in err_msg:
            await super()._process_err(err_msg)
        else:
            self.ended_by = err_msg.strip("'")
            await self._process_op_err(NatsError(f"nats: {self.ended_by}"))


class StreamClient:
    """Asks a server about streams, and creates them; the base of an `EventLog`.

    Every method raises `BrokerUnavailable` if the server is away, refuses, or has no such stream.
    """

    def __init__(self, timeout_s: float) -> None:
        self.client = LastingClient()
        self.context = self.client.jetstream(timeout=timeout_s)
        self._timeout_s = timeout_s

    @contextmanager
    def reachable(self, what: str) -> Iterator[None]:
        """Map errors (`mapped`); refuse at once while the server is away: a delayed message would look new."""
        if not self.client.is_connected:
            raise BrokerUnavailable(f"{what}: not connected")
        with mapped(what):
            yield

    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create or update the stream with these limits; other settings stay. Other processes may do so meanwhile.

        Raises:
            StreamUnfit: the existing stream cannot be ours.
            BrokerUnavailable: also if the server refuses the limits; it has the server's reason, such as lack of space.
        """
        wanted = spec.config()
        with self.reachable(f"stream {spec.name}"):
            try:
                present = (await self.context.stream_info(spec.name)).config
            except NotFoundError:
                try:
                    await self.context.add_stream(wanted)
                except BadRequestError as error:
                    if error.err_code != _NAME_IN_USE:
                        raise
                present = (await self.context.stream_info(spec.name)).config
            _check(wanted, present)
            changes = {field: getattr(wanted, field) for field in _TENDED}
            if any(getattr(present, field) != value for field, value in changes.items()):
                await self.context.update_stream(present, **changes)

    async def stream_state(self, name: str) -> LogStreamState:
        """Return the state of a stream, parsed here because the client's own parser omits the times."""
        with self.reachable(f"stream {name}"):
            info = await self._answer(f"STREAM.INFO.{name}", dict[str, Any])
        state = info["state"]
        last_seq, has_messages = state["last_seq"], bool(state["messages"])
        first_seq, time_ns = (state["first_seq"], ns_of(state["first_ts"])) if has_messages else (last_seq + 1, 0)
        return LogStreamState(info["created"], first_seq, last_seq, state["bytes"], time_ns)

    async def message_from(self, stream: str, seq: int, subject: str = ">") -> LogMessage | None:
        """Return the message at `seq` or the first after it, of `subject` (a pattern); None: there is none.

        Its time, the server's, is read in nanoseconds, so that messages of one microsecond stay apart: the client's own
        `get_msg` cuts it to microseconds.
        """
        question = msgspec.json.encode({"seq": max(seq, 1), "next_by_subj": subject})
        with self.reachable(f"message {seq} of {stream}"):
            try:
                found = (await self._answer(f"STREAM.MSG.GET.{stream}", dict[str, Any], question))["message"]
            except NotFoundError as error:
                if error.err_code != _NO_MESSAGE:
                    raise
                return None
        headers, data = _headers(base64.b64decode(found.get("hdrs", ""))), base64.b64decode(found.get("data", ""))
        return LogMessage(found["subject"], data, found["seq"], time_ns=ns_of(found["time"]), headers=headers)

    async def seq_at(self, stream: str, time_ns: int) -> int:
        """Return the seq of the last message of that time or earlier; if all are later, the first message's seq less 1.

        It needs ascending times: wrong if the server's clock is set back, or another server of a cluster takes over.
        """
        state = await self.stream_state(stream)
        low, high = state.first_seq - 1, state.last_seq
        while low < high:  # the message at `low` is not later, those after `high` are
            middle = (low + high + 1) // 2
            found = await self.message_from(stream, middle)
            if found is None or found.time_ns > time_ns:
                high = middle - 1
            else:
                low = found.stream_seq
        return low

    async def answer_of(self, what: str, kind: type[_T]) -> _T | None:
        """Return JetStream's answer to an API request such as `INFO`; None if it names a stream that does not exist."""
        with self.reachable(f"JetStream {what}"):
            try:
                return await self._answer(what, kind)
            except NotFoundError as error:
                if error.err_code != _NO_SUCH_STREAM:
                    raise
                return None

    async def purge(self, stream: str, up_to_seq: int) -> None:
        """Delete the stream's messages up to `up_to_seq`, which is deleted too."""
        with self.reachable(f"purge {stream}"):
            await self.context.purge_stream(stream, seq=up_to_seq + 1)

    async def _answer(self, what: str, kind: type[_T], body: bytes = b"") -> _T:
        try:
            answer = await self.client.request(f"{DEFAULT_PREFIX}.{what}", body, timeout=self._timeout_s)
        except NoRespondersError as error:
            raise NatsError("the server has no JetStream") from error
        try:
            if (failure := msgspec.json.decode(answer.data, type=_Failed).error) is not None:
                APIError.from_error(failure)
            return msgspec.json.decode(answer.data, type=kind)
        except msgspec.MsgspecError as error:
            raise NatsError(f"an answer that cannot be read: {error}") from error


def _headers(block: bytes) -> Mapping[str, str] | None:
    """Parse a block of headers: a line with the version, then `name: value`, each line ended by CRLF."""
    lines = block.decode(errors="replace").split("\r\n")[1:]
    fields = (line.partition(":") for line in lines if line)
    return {name: value.strip() for name, _, value in fields} or None


def ns_of(time: str) -> int:
    """Return the nanoseconds since 1970 of a UTC time as servers write it, with up to nine digits of a second."""
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    since = datetime.fromisoformat(seconds).replace(tzinfo=UTC) - _EPOCH
    return since // timedelta(seconds=1) * 10**9 + int(fraction.ljust(9, "0"))
