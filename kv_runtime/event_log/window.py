"""Unconfirmed publications: sent in order, confirmed later, at most `limit` at a time.

    send                     waits for capacity, sends the message, returns the future of its seq in the stream
    the server confirms      the future ends with the seq
    the server refuses,      the future ends with `BrokerUnavailable`; the server may have stored the message: it is
    or no answer comes for   safe to repeat it with the same message id
    `timeout_s`, or `fail`

A future that ends, in any way, frees its capacity and is forgotten. The client's own asynchronous
publishing leaves its futures pending for ever when an answer is lost with the connection.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header

from kv_runtime.event_log.errors import BrokerUnavailable, LastSequenceDiffers, mapped

_NO_STREAM = "503"
_WRONG_LAST_SEQUENCE = (10071, 10164)
"""Source: `JSStreamWrongLastSequenceErrF`, `JSStreamWrongLastSequenceConstantErr` in nats-server's errors.json."""


class _Refusal(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct, frozen=True):
    seq: int = 0
    error: _Refusal | None = None


class SendWindow:
    """The unconfirmed publications of one connection."""

    def __init__(self, client: Client, limit: int, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._capacity = asyncio.Semaphore(limit)
        self._unconfirmed: dict[str, _Publication] = {}
        self._numbers = itertools.count(1)
        self._inbox = ""
        self.failures_total = 0
        """Publications that were sent and not confirmed."""

    def __len__(self) -> int:
        return len(self._unconfirmed)

    async def open(self) -> None:
        """Subscribe to confirmations; the client is connected."""
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(f"{self._inbox}.*", cb=self._on_answer)

    async def send(
        self,
        subject: str,
        data: bytes,
        message_id: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        after_seq: int | None = None,
    ) -> asyncio.Future[int]:
        """Send a message once there is capacity; return the future of its seq in the stream.

        Messages of one caller are sent in the order of its calls. The future ends with `LastSequenceDiffers` if the
        newest message of the subject is not at `after_seq`, and with `BrokerUnavailable` when the server refuses, is
        lost, or does not confirm in time; the stream may then have the message or not.

        Raises:
            BrokerUnavailable: the server is away, or the message is too large for it.
        """
        self._require_connection(subject)
        await self._capacity.acquire()
        number = str(next(self._numbers))
        publication = _Publication(subject, self._timeout_s, lambda: self._forget(number))
        self._unconfirmed[number] = publication
        try:
            self._require_connection(subject)  # the wait may have taken long
            wanted = _headers(message_id, headers, after_seq)
            with mapped(f"publish {subject}"):
                await self._client.publish(subject, data, reply=f"{self._inbox}.{number}", headers=wanted)
        except BaseException:
            publication.future.cancel()
            raise
        return publication.future

    def _require_connection(self, subject: str) -> None:
        if not self._client.is_connected:
            raise BrokerUnavailable(f"publish {subject}: not connected")

    def _forget(self, number: str) -> None:
        future = self._unconfirmed.pop(number).future
        self.failures_total += not future.cancelled() and future.exception() is not None
        self._capacity.release()

    def fail(self, why: str) -> None:
        """End all unconfirmed publications with `BrokerUnavailable`."""
        for publication in list(self._unconfirmed.values()):
            publication.fail(why)

    async def _on_answer(self, message: Msg) -> None:
        publication = self._unconfirmed.get(message.subject.rpartition(".")[2])
        if publication is None:
            return
        if message.headers and message.headers.get(Header.STATUS) == _NO_STREAM:
            publication.fail("no stream takes this subject")
            return
        try:
            ack = msgspec.json.decode(message.data, type=_Ack)
        except msgspec.DecodeError as error:
            publication.fail(f"unreadable answer: {error}")
            return
        if ack.error is not None:
            kind = LastSequenceDiffers if ack.error.err_code in _WRONG_LAST_SEQUENCE else BrokerUnavailable
            publication.fail(f"{ack.error.description} (code {ack.error.code}, {ack.error.err_code})", kind)
        else:
            publication.confirm(ack.seq)


def _headers(message_id: str, more: Mapping[str, str] | None, after_seq: int | None) -> dict[str, str] | None:
    headers = dict(more or {})
    if message_id:
        headers[Header.MSG_ID.value] = message_id
    if after_seq is not None:
        headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = str(after_seq)
    return headers or None


class _Publication:
    """One unconfirmed message, and its timeout."""

    __slots__ = ("_on_end", "_subject", "_timer", "future")

    def __init__(self, subject: str, timeout_s: float, on_end: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._subject = subject
        self._timer = loop.call_later(timeout_s, self.fail, f"not confirmed within {timeout_s:g} s")
        self._on_end = on_end
        self.future: asyncio.Future[int] = loop.create_future()
        self.future.add_done_callback(self._ended)

    def confirm(self, seq: int) -> None:
        if not self.future.done():
            self.future.set_result(seq)

    def fail(self, why: str, kind: type[BrokerUnavailable] = BrokerUnavailable) -> None:
        if not self.future.done():
            self.future.set_exception(kind(f"publish {self._subject}: {why}"))

    def _ended(self, _: asyncio.Future[int]) -> None:
        self._timer.cancel()
        self._on_end()
