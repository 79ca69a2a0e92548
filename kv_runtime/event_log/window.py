"""Unconfirmed publications: sent in order, confirmed later, at most `limit` at a time.

    send                     waits for capacity, sends the message, returns the future of its seq in the stream
    the server confirms      the future ends with the seq
    the server refuses,      the future ends with `BrokerUnavailable`; the server may have stored the message: it is
    or no answer comes for   safe to repeat it with the same message id
    `timeout_s`, or `fail`

A future that ends, in any way, frees its capacity and is forgotten. The client's own asynchronous
publishing is not used: it leaves its futures pending for ever when an answer is lost with the connection.
"""

import asyncio
import itertools
from collections.abc import Mapping
from functools import partial

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
        self._unconfirmed: dict[str, tuple[str, asyncio.Future[int]]] = {}
        """By the number in the reply subject of a publication: its subject and future."""
        self._numbers = itertools.count(1)
        self._inbox = ""
        self.failures_total = 0
        """Publications that were sent and never confirmed."""

    def __len__(self) -> int:
        return len(self._unconfirmed)

    async def open(self) -> None:
        """Subscribe to confirmations; the client must be connected."""
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
        number, loop = str(next(self._numbers)), asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        timer = loop.call_later(self._timeout_s, self._fail, number, f"not confirmed within {self._timeout_s:g} s")
        self._unconfirmed[number] = subject, future
        future.add_done_callback(partial(self._ended, number, timer))
        try:
            self._require_connection(subject)  # the wait may have taken long
            with mapped(f"publish {subject}"):
                wanted = _headers(message_id, headers, after_seq)
                await self._client.publish(subject, data, reply=f"{self._inbox}.{number}", headers=wanted)
        except BaseException:
            future.cancel()
            raise
        return future

    def _require_connection(self, subject: str) -> None:
        if not self._client.is_connected:
            raise BrokerUnavailable(f"publish {subject}: not connected")

    def _ended(self, number: str, timer: asyncio.TimerHandle, future: asyncio.Future[int]) -> None:
        timer.cancel()
        del self._unconfirmed[number]
        self.failures_total += not future.cancelled() and future.exception() is not None
        self._capacity.release()

    def fail(self, why: str) -> None:
        """End all unconfirmed publications with `BrokerUnavailable`."""
        for number in list(self._unconfirmed):
            self._fail(number, why)

    def _fail(self, number: str, why: str, kind: type[BrokerUnavailable] = BrokerUnavailable) -> None:
        subject, future = self._unconfirmed[number]
        if not future.done():
            future.set_exception(kind(f"publish {subject}: {why}"))

    async def _on_answer(self, message: Msg) -> None:
        number = message.subject.rpartition(".")[2]
        if number not in self._unconfirmed:
            return
        if message.headers and message.headers.get(Header.STATUS) == _NO_STREAM:
            self._fail(number, "no stream takes this subject")
            return
        ack = msgspec.json.decode(message.data, type=_Ack)
        if ack.error is not None:
            kind = LastSequenceDiffers if ack.error.err_code in _WRONG_LAST_SEQUENCE else BrokerUnavailable
            self._fail(number, f"{ack.error.description} (code {ack.error.code}, {ack.error.err_code})", kind)
        elif not (future := self._unconfirmed[number][1]).done():
            future.set_result(ack.seq)


def _headers(message_id: str, more: Mapping[str, str] | None, after_seq: int | None) -> dict[str, str] | None:
    headers = dict(more or {})
    if message_id:
        headers[Header.MSG_ID.value] = message_id
    if after_seq is not None:
        headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = str(after_seq)
    return headers or None
