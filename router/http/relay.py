"""Relays a worker's answer to the client.

| answer | what the client gets, and when | after the worker's death |
|---|---|---|
| event stream | chunks; complete events as they come | nothing was passed on: `on_failed`; else another worker's |
| | | answer, if `on_cut` of a call with a `replay_buffer` says so; else an error event, `[DONE]` |
| up to `call.buffered_bytes_max` | its length; once it is complete | `on_failed` |
| longer | its length or chunks; as it comes | what was passed on is cut off |

A response's stream (`call.token_mark`) ends with an error event of its own kind, without `[DONE]`; the watcher's
`on_first_byte` follows its first event with a token.

The complete events of each read of a stream go on as one chunk; the beginning of another event waits. A stream whose
worker fails behind `[DONE]` is complete. A client of HTTP/1.0 gets bytes until its connection ends. Only the last 4 KB
of the body are kept, unless the call has a `replay_buffer`. A stream with one that ends without `[DONE]` may be
resumed, too; so may one in which an attached engine reports its failure, and that event is not passed on. The buffer
decides what of the others is passed on.
"""

from typing import TYPE_CHECKING

import msgspec

from kv_runtime.http.answers import error_body
from router.http.exchange import Exchange, OutboundCall, ResponseHandler, UpstreamStage
from router.http.framing import LAST_CHUNK, TAIL_BYTES, AnswerBody, BodyReader
from router.http.heads import CHUNKED, UNTIL_CLOSE, AnswerHead, AnswerReader, Malformed
from router.http.stream_replay import FAILURE, failure_in

if TYPE_CHECKING:
    import asyncio

    from router.http.worker import WorkerConnection

DONE = b"[DONE]"
HEAD, _EVENTS, _GATHER, _PASS_THROUGH, _DESERTED, _OVER = range(6)
_BODYLESS = frozenset({204, 304})
_CUT_SHORT = "the connection closed before the answer's end"


def has_end_mark(end: bytes) -> bool:
    """Return whether a stream's last bytes have its event `data: [DONE]`.

    No text within another event looks like that: JSON escapes the line's end before it.
    """
    at = end.rfind(DONE)  # for every stream: a regular expression takes 50 times as long
    while at >= 0 and not (b"\n" + end[:at]).removesuffix(b" ").endswith((b"\ndata:", b"\rdata:")):
        at = end.rfind(DONE, 0, at)
    return at >= 0


class ResponseRelay(msgspec.Struct, eq=False):
    """One forwarded call: takes the worker's bytes, writes to the client, and calls the watcher."""

    exchange: Exchange
    call: OutboundCall
    watcher: ResponseHandler
    heads: AnswerReader
    since_s: float
    """Since when it is forwarded, by the loop's clock; `received_s`: when bytes were last seen to have come, or 0."""
    received_s: float = 0.0
    connection: "WorkerConnection | None" = None
    dial: "asyncio.Task[None] | None" = None
    state: int = HEAD
    received: bool = False
    """Whether bytes came since the last check of timeouts."""
    paused: bool = False
    part: bytes = b""
    """Of the head, before the rest came; `has_part`: whether a byte came, if only of an interim answer."""
    has_part: bool = False
    lines: bytes = b""
    """Head of the client's answer, where its body follows as it comes, without the connection's lines."""
    body: AnswerBody = AnswerBody(0, b"")
    """Once its head came. What was taken of it was passed on."""
    reusable: bool = False
    """Whether the worker's connection is kept when the answer is complete."""
    until_close: bool = False
    is_chunked: bool = False
    """Whether the client gets chunks."""
    is_deserted: bool = False
    """Whether the client has left, and the worker's connection is closed once its answer has begun."""
    silent: bool = True
    is_told: bool = False
    """Whether `watcher.on_first_byte` was called."""
    later_events: int = 0

    # ------------------------------------------------------------ what the worker sends

    def feed_head(self, data: bytes) -> None:
        """Take the next bytes of the answer while its head is not complete."""
        if self.part:
            data = self.part + data
        try:
            head: AnswerHead | None = self.heads.answer(data)
            while head is not None and head.status < 200:  # noqa: PLR2004 - the first that is no interim answer
                self.has_part, data = True, head.rest
                head = self.heads.answer(data)
        except Malformed as error:
            self.fail("first_byte", str(error))
            return
        if head is None:
            self.part, self.received, self.has_part = data, True, True
            return
        status, headers, body_bytes, self.reusable, lines, body = head
        exchange, is_whole = self.exchange, body_bytes == len(body)
        if self.is_deserted:
            self.state = _DESERTED
            if body or is_whole:
                self._detach(reusable=is_whole and self.reusable)
            return
        added = self.watcher.on_head(status, headers)
        if added is None:
            self._drop(body_bytes, body)
        elif is_whole and not exchange.has_begun:  # most answers
            client = exchange.client
            if client is not None:
                exchange.has_begun = True
                length = b"content-length: %d\r\n" % len(body) if body or status not in _BODYLESS else b""
                client.write(b"%b%b%b%b\r\n%b" % (lines, added, client.connection_line, length, body))
            self._over(body[-TAIL_BYTES:], reusable=self.reusable)
        else:
            self._begin(head, lines + added, body)

    def _begin(self, head: AnswerHead, lines: bytes, body: bytes) -> None:
        """A body follows as it comes."""
        exchange, body_bytes = self.exchange, head.body_bytes
        self.body, self.lines, self.received = AnswerBody(body_bytes, self.call.token_mark), lines, True
        self.until_close = body_bytes == UNTIL_CLOSE
        if head.headers.get(b"content-type", b"")[:17].lower() == b"text/event-stream":
            self.state = _EVENTS
            exchange.is_stream = True
            self._frame(b"" if b"cache-control" in head.headers else b"cache-control: no-cache\r\n", CHUNKED)
        elif exchange.has_begun:
            self.fail("first_byte", "the answer that was to go on is no event stream")
            return
        elif body_bytes > self.call.buffered_bytes_max:
            self.state = _PASS_THROUGH
            self._frame(b"", body_bytes)
        else:
            self.state = _GATHER
        if body or body_bytes == 0:
            self.feed(body)

    def _frame(self, added: bytes, body_bytes: int) -> None:
        """Complete the head's lines: the client gets a body of this length, or of an unknown one."""
        client = self.exchange.client
        self.is_chunked = body_bytes < 0 and client is not None and client.http_1_1
        framing = b"content-length: %d\r\n" % body_bytes if body_bytes >= 0 else b""
        self.lines += added + (b"transfer-encoding: chunked\r\n" if self.is_chunked else framing)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the answer's body."""
        self.received = True
        if self.state == _DESERTED:
            self._detach(reusable=False)
            return
        body, replay_buffer = self.body, self.call.replay_buffer
        try:
            end = body.feed(data)
        except Malformed as error:
            self.fail("body", str(error))
            return
        if replay_buffer is not None and replay_buffer.is_engines and self._reported_failure():
            return
        if end < 0 and (payload := self._ripe()):
            self._write_payload(payload)
        if self.silent and body.has_begun and self.state != _OVER:
            self._tell_first()
        if end >= 0:
            self._end(extra=end < len(data))

    def _reported_failure(self) -> bool:
        """Return whether an attached engine reports its failure: the events before are passed on, the call is over."""
        body = self.body
        if self.state != _EVENTS or not body.has(FAILURE):
            return False
        at, reason = failure_in(body.pending)
        if at < 0:
            return False
        if at:
            self.exchange.is_mid_event = False
            self._tell_first()
            self._write_payload(body.take(at))
        body.drop()
        self.fail("first_byte" if self.silent else "body", reason)
        return True

    def _ripe(self) -> bytes:
        """Take what may be passed on."""
        body = self.body
        if self.state == _EVENTS and (events := body.take_events()):
            self.exchange.is_mid_event = False
            return events
        if self.state != _PASS_THROUGH:
            if body.size <= self.call.buffered_bytes_max:
                return b""
            self.exchange.is_mid_event = True
            if self.state == _GATHER:
                self.state = _PASS_THROUGH
                self._frame(b"", CHUNKED)
        return body.take(body.size)

    def _write_payload(self, payload: bytes, *, is_last: bool = False) -> None:
        """Pass on what was taken of the body, if anything; the client may get another form of it."""
        exchange, call = self.exchange, self.call
        if self.state == _EVENTS and payload:
            if call.token_mark:
                self._count_tokens(self.body.marks)
            elif exchange.has_begun:
                self.later_events += self.body.marks
            if call.replay_buffer is not None:
                payload = call.replay_buffer.add(payload)
        if self.is_chunked:
            if payload:
                payload = b"%x\r\n%b\r\n" % (len(payload), payload)
            if is_last:
                payload += LAST_CHUNK
        client = exchange.client
        if client is None:
            return
        if not exchange.has_begun:
            exchange.has_begun = True
            payload = b"%b%b\r\n%b" % (self.lines, client.connection_line, payload)
        client.write(payload)

    def _tell_first(self) -> None:
        """The body has begun."""
        is_first, self.silent = self.silent, False
        if is_first and not (self.exchange.is_stream and self.call.token_mark):  # else `_count_tokens` tells
            self.is_told = True
            self.watcher.on_first_byte()

    def _count_tokens(self, count: int) -> None:
        """Count events with tokens: the first ones are the answer's first bytes to the watcher."""
        if self.is_told:
            self.later_events += count
        elif count:
            self.is_told = True
            self.watcher.on_first_byte()

    # ------------------------------------------------------------ how it ends

    def _end(self, *, extra: bool) -> None:
        """The body is complete. `extra`: bytes followed that belong to no answer."""
        if self.state == _EVENTS and self.silent:
            self.fail("first_byte", "no bytes")
            return
        if self.state == _EVENTS and self.call.replay_buffer is not None and self._went_on():
            return
        rest = self.body.take(self.body.size)
        if self.state == _GATHER:
            self._frame(b"", len(rest))
        self._write_payload(rest, is_last=True)
        if self.state != _OVER:  # else it was too long for who gets it, and given up
            self._over(self.body.tail, reusable=self.reusable and not extra)

    def _went_on(self) -> bool:
        """Return whether a stream that ended without its mark is resumed; otherwise it ends as the worker ended it."""
        if has_end_mark((self.body.tail + self.body.pending)[-TAIL_BYTES:]):
            return False
        if payload := self._ripe():
            self._write_payload(payload)
        if not self.exchange.has_begun or self.exchange.is_mid_event:
            return False
        self._detach(reusable=False)
        goes_on = self._goes_on("body", "the stream ended without [DONE]")
        self.state = _OVER if goes_on else _EVENTS
        return goes_on

    def _over(self, tail: bytes, *, reusable: bool) -> None:
        """All of the answer was passed on."""
        self.state = _OVER
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.release(reusable=reusable)
        later_events = self.later_events
        if later_events and not self.call.token_mark:
            later_events -= tail.rstrip().endswith(DONE)
        self.watcher.on_end(tail, later_events)
        exchange = self.exchange
        client = exchange.client
        exchange.client = exchange.when_gone = exchange.relay = None
        if client is not None:
            client.finish()

    def _drop(self, body_bytes: int, body: bytes) -> None:
        """Drop an unwanted answer; keep its connection if the answer is complete."""
        is_complete = body_bytes == len(body)
        if body_bytes == CHUNKED:
            try:
                is_complete = BodyReader(CHUNKED).feed(body, bytearray()) == len(body)
            except Malformed:
                is_complete = False
        self._detach(reusable=is_complete and self.reusable)
        self.exchange.relay = None
        self.watcher.on_dropped()

    def closed(self, *, clean: bool) -> None:
        """The worker's connection ended: closed by the worker (`clean`), or by a failure."""
        self.connection = None
        if self.state != _OVER:
            if clean and self.until_close:
                self._end(extra=True)
            else:
                self.fail("first_byte" if self.silent else "body", _CUT_SHORT)

    def abandon(self) -> None:
        """End the call after a fault of the router: answer the client, or cut it off."""
        known = self.state == _OVER or self.is_deserted
        self._detach(reusable=False)
        exchange = self.exchange
        exchange.relay = None
        if exchange.has_begun:
            exchange.cut()
        else:
            exchange.answer(500, error_body("our fault; see the log", "server_error"))
        if not known:
            self.watcher.on_gone(self.later_events)

    def fail(self, phase: UpstreamStage, reason: str) -> None:
        """The worker failed: the attempt is over, unless the client has the stream with its end mark already."""
        exchange = self.exchange
        if self.state == _EVENTS and self._is_complete():
            self._write_payload(b"", is_last=True)
            self._over(self.body.tail, reusable=False)
            return
        self._detach(reusable=False)
        if self.is_deserted:
            return
        if exchange.has_begun:
            if self.call.replay_buffer is not None and not exchange.is_mid_event and self._goes_on(phase, reason):
                return
            self.watcher.on_failed(phase, reason, begun=True)
            self._cut_short(f"the worker failed in its answer: {phase}: {reason}", "upstream_failed")
        else:
            exchange.relay = None
            self.watcher.on_failed(phase, reason, begun=False)

    def _is_complete(self) -> bool:
        """Return whether the client has all of the stream but its framing."""
        if not self.exchange.has_begun or self.body.size or self.call.token_mark:
            return False
        return self.body.tail.rstrip().endswith(DONE)

    def _goes_on(self, phase: UpstreamStage, reason: str) -> bool:
        """Return whether the stream is resumed by another worker, or is complete without this one."""
        exchange = self.exchange
        exchange.relay = None
        more = self.watcher.on_cut(phase, reason)
        if more:
            exchange.end_stream(more)
        return more is not None

    def leave(self) -> None:
        """The client left: close the worker's connection, now, or for an `is_once` call once its answer has begun."""
        if self.call.is_once and self.silent and self.state != _OVER:
            self.is_deserted = True
            if self.state != HEAD:
                self.state = _DESERTED
        else:
            self._detach(reusable=False)
        self.watcher.on_gone(self.later_events)

    def expire(self) -> None:
        """The plane stops and ends this answer; the watcher is called as if the client left."""
        exchange = self.exchange
        self._detach(reusable=False)
        exchange.relay = None
        self.watcher.on_gone(self.later_events)
        message = "the router stops; the answer was not complete in time"
        if exchange.has_begun:
            self._cut_short(message, "shutting_down")
        else:
            body = error_body(message, "server_error", code="shutting_down")
            exchange.answer(503, body, headers=((b"retry-after", b"1"),))

    def _cut_short(self, message: str, code: str) -> None:
        """End the client's part of an answer that is not complete."""
        self.exchange.end_with_error(message, code, passed_on=self.body.tail if self.call.token_mark else None)

    def _detach(self, *, reusable: bool) -> None:
        self.state = _OVER
        connection, self.connection = self.connection, None
        dial, self.dial = self.dial, None
        if connection is not None:
            connection.release(reusable=reusable)
        if dial is not None:
            dial.cancel()

    # ------------------------------------------------------------ time, and the client's pace

    def pause(self) -> None:
        """The client reads too slowly: stop reading from the worker until `resume`."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause_reading()

    def resume(self) -> None:
        """The client has read the pending bytes."""
        self.paused, self.received = False, True
        if self.connection is not None:
            self.connection.resume_reading()

    def check_timeouts(self, now_s: float) -> None:
        """Fail the attempt if a limit of the call is exceeded at `now_s`, or the watcher awaits no more of it."""
        call = self.call
        if self.received:
            self.received, self.received_s = False, now_s
            if self.is_told:
                self.watcher.on_bytes()
        quiet_s, reason = now_s - (self.received_s or self.since_s), ""
        if now_s - self.since_s > call.limits.total_s:
            reason = f"TimeoutError: not whole within {call.limits.total_s:g} s"
        elif self.silent and now_s - self.since_s > call.limits.first_byte_s:
            reason = f"TimeoutError: no byte within {call.limits.first_byte_s:g} s"
        elif not (self.silent or self.paused) and quiet_s > call.limits.between_bytes_s:
            reason = f"TimeoutError: no byte for {call.limits.between_bytes_s:g} s"
        elif not (self.paused or self.exchange.is_mid_event or self.is_deserted):
            reason = self.watcher.lost(quiet_s, begun=self.exchange.has_begun)
        if reason:
            self.fail("first_byte" if self.silent else "body", reason)
