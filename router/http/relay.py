"""Relays a worker's answer to the client.

| answer | what the client gets, and when | after the worker's death |
|---|---|---|
| event stream | chunks; complete events as they come | nothing was passed on: `on_failed`; else another worker's |
| | | answer, if `on_cut` of a call with a `replay_buffer` says so; else an error event, `[DONE]` |
| up to `call.buffered_bytes_max` | its length; once it is complete | `on_failed` |
| longer | its length or chunks; as it comes | what was passed on is cut off |

A response's stream (`call.token_mark`) ends with an error event of its own kind, without `[DONE]`; the watcher's
`on_first_byte` follows its first event with a token.

Reads of complete chunks that end an event are passed on unchanged. Other reads are decoded, cut after the last complete
event, and put into a new chunk. A stream whose worker fails behind `[DONE]` is complete. A client of HTTP/1.0 gets
bytes until its connection ends. Only the last 4 KB of the body are kept, unless the call has a `replay_buffer`. A
stream with one that ends without `[DONE]` may be resumed, too; so may one in which an attached engine reports its
failure, and that event is not passed on. The buffer decides what of the others is passed on.
"""

import re
from typing import TYPE_CHECKING

from kv_runtime.http.answers import error_body
from router.http.exchange import Exchange, OutboundCall, ResponseHandler, UpstreamStage
from router.http.framing import LAST_CHUNK, TAIL_BYTES, BodyReader
from router.http.heads import CHUNKED, UNTIL_CLOSE, AnswerHead, AnswerReader, Malformed
from router.http.stream_replay import FAILURE, failure_in

if TYPE_CHECKING:
    import asyncio

    from router.http.worker import WorkerConnection

DONE = b"[DONE]"
_END_MARK = re.compile(rb"(?:\A|[\r\n])data: ?\[DONE\]")
"""The event of the mark; in an event's text JSON escapes the line's end before it."""
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
_MARK_BYTES = 2
"""How much of a mark can precede new bytes."""
_HEAD, _EVENTS, _GATHER, _PASS_THROUGH, _DESERTED, _OVER = range(6)
_OK = 200
_CUT_SHORT = "the connection closed before the answer's end"


class ResponseRelay:
    """One forwarded call: takes the worker's bytes, writes to the client, and calls the watcher."""

    connection: "WorkerConnection | None" = None
    dial: "asyncio.Task[None] | None" = None
    received = paused = _until_close = False
    _is_deserted = False
    """Whether the client has left, and the worker's connection is closed once its answer has begun."""
    _silent = True
    _has_token = False
    """Whether an event with the call's `token_mark` came."""
    _later_events = 0
    _state = _HEAD
    _buffer: bytearray | None = None
    """Received bytes of the head, or of the body's payload, that were not passed on yet."""
    _reader = BodyReader(0)
    """Of the body, once its head came. Its tail is the end of what was passed on."""

    def __init__(
        self, exchange: Exchange, call: OutboundCall, watcher: ResponseHandler, heads: AnswerReader, now_s: float
    ) -> None:
        self._exchange, self._watcher, self._heads, self.call = exchange, watcher, heads, call
        self._since_s = self._received_s = now_s

    # ------------------------------------------------------------ what the worker sends

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the answer."""
        self.received = True
        if self._state == _EVENTS:
            if self._buffer or not self._forwarded_unchanged(data):
                self._feed_body(data)
        elif self._state == _HEAD:
            self._feed_head(data)
        elif self._state == _DESERTED:
            self._detach(reusable=False)
        else:
            self._feed_body(data)

    def _feed_head(self, data: bytes) -> None:
        if self._buffer is not None:
            self._buffer += data
            data = bytes(self._buffer)
        try:
            while (head := self._heads.answer(data)) is not None and head.status < 200:  # noqa: PLR2004 - interim
                data = data[head.end :]
        except Malformed as error:
            self.fail("first_byte", str(error))
            return
        if head is None:
            self._buffer = bytearray(data)
        else:
            self._buffer = None
            self._begin(head, data[head.end :])

    def _begin(self, head: AnswerHead, body: bytes) -> None:
        exchange, body_bytes = self._exchange, head.body_bytes
        is_whole = body_bytes == len(body)
        if self._is_deserted:
            self._state = _DESERTED
            if body or is_whole:
                self._detach(reusable=is_whole and head.reusable)
            return
        self._reusable = head.reusable
        lines = self._watcher.on_head(head.status, head.headers)
        if lines is None:
            self._drop(head, body)
            return
        lines = head.lines + lines
        if is_whole and not exchange.has_begun:  # most answers
            exchange.send_whole(head.status, lines, body)
            self._over(extra=False, tail=body[-TAIL_BYTES:])
            return
        self._reader = BodyReader(body_bytes)
        self._until_close = body_bytes == UNTIL_CLOSE
        self._buffer = bytearray()
        if head.headers.get(b"content-type", b"")[:17].lower() == b"text/event-stream":
            self._state = _EVENTS
            exchange.is_stream = True
            exchange.begin(lines if b"cache-control" in head.headers else lines + b"cache-control: no-cache\r\n")
        elif exchange.has_begun:
            self.fail("first_byte", "the answer that was to go on is no event stream")
            return
        elif body_bytes > self.call.buffered_bytes_max:
            self._state = _PASS_THROUGH
            exchange.begin(lines, body_bytes)
        else:
            self._state, self._lines = _GATHER, lines
        if body or is_whole:
            self.feed(body)

    def _forwarded_unchanged(self, data: bytes) -> bool:
        """Pass `data` on if it is complete chunks, the last of which ends an event; return whether it was."""
        replay_buffer = self.call.replay_buffer
        if not self._exchange.takes_chunks or (replay_buffer is not None and FAILURE in data):
            return False
        size = self._reader.whole_events(data)
        if size < 0:
            return False
        is_over = size < len(data)
        ends = is_over and (replay_buffer is None or _END_MARK.search(self._reader.tail) is not None)
        shown = self._shown(data[:size] if is_over else data, framed=True)
        self._exchange.write_framed(shown + LAST_CHUNK if ends else shown)
        self._tell()
        if ends:
            self._over(extra=False, tail=self._reader.tail)
        elif is_over:
            self._end(extra=False)
        return True

    def _feed_body(self, data: bytes) -> None:
        buffer = self._buffer
        assert buffer is not None
        before = len(buffer)
        try:
            end = self._reader.feed(data, buffer)
        except Malformed as error:
            self.fail("body", str(error))
            return
        if self._reported_failure(buffer):
            return
        if len(buffer) > before:
            self._tell()
        if end >= 0:
            self._end(extra=end < len(data))
        elif ripe := self._ripe(buffer, max(0, before - _MARK_BYTES)):
            self._forward(buffer, ripe)

    def _reported_failure(self, buffer: bytearray) -> bool:
        """Return whether an attached engine reports its failure: the events before are passed on, the call is over."""
        replay_buffer = self.call.replay_buffer
        if self._state != _EVENTS or replay_buffer is None or not replay_buffer.is_engines:
            return False
        at, reason = failure_in(buffer)
        if at < 0:
            return False
        if at:
            self._exchange.is_mid_event = False
            self._tell()
            self._forward(buffer, at)
        buffer.clear()
        self.fail("first_byte" if self._silent else "body", reason)
        return True

    def _forward(self, buffer: bytearray, ripe: int) -> None:
        """Pass on the first `ripe` bytes of the buffer."""
        payload = bytes(buffer[:ripe])
        del buffer[:ripe]
        self._exchange.write(self._shown_of(payload))
        self._reader.remember(payload)

    def _ripe(self, buffer: bytearray, searched_from: int) -> int:
        """Return how many of the buffered bytes may be passed on."""
        if self._state == _EVENTS:
            ends = [at + len(mark) for mark in _EVENT_ENDS if (at := buffer.rfind(mark, searched_from)) >= 0]
            if ends:
                self._exchange.is_mid_event = False
                return max(ends)
        elif self._state == _PASS_THROUGH:
            return len(buffer)
        if len(buffer) <= self.call.buffered_bytes_max:
            return 0
        self._exchange.is_mid_event = True
        if self._state == _GATHER:
            self._state = _PASS_THROUGH
            self._exchange.begin(self._lines)
        return len(buffer)

    def _shown_of(self, payload: bytes) -> bytes:
        """Return what the client gets of a part of the body."""
        return self._shown(payload, framed=False) if self._state == _EVENTS else payload

    def _shown(self, events: bytes, *, framed: bool) -> bytes:
        """Return what the client gets of events, or of a long event's beginning; `framed`: both are complete chunks."""
        if self.call.token_mark:
            self._count_tokens(events.count(self.call.token_mark))
        elif self._exchange.has_begun:
            self._later_events += events.count(b"\n\n") or events.count(b"\n\r\n")
        replay_buffer = self.call.replay_buffer
        return events if replay_buffer is None else replay_buffer.add(events, framed=framed)

    def _tell(self) -> None:
        is_first, self._silent = self._silent, False
        if self._exchange.is_stream and self.call.token_mark:
            return  # `_count_tokens` tells
        if is_first:
            self._watcher.on_first_byte()
        else:
            self._watcher.on_bytes()

    def _count_tokens(self, count: int) -> None:
        """Count events with tokens: the first ones are the answer's first bytes to the watcher."""
        if not count:
            return
        if self._has_token:
            self._later_events += count
            self._watcher.on_bytes()
        else:
            self._has_token = True
            self._watcher.on_first_byte()

    # ------------------------------------------------------------ how it ends

    def _end(self, *, extra: bool) -> None:
        """The body is complete. `extra`: bytes followed that belong to no answer."""
        if self._state == _EVENTS and self._silent:
            self.fail("first_byte", "no bytes")
            return
        if self._state == _EVENTS and self.call.replay_buffer is not None and self._went_on():
            return
        rest = bytes(self._buffer or b"")
        if self._state == _GATHER:
            self._exchange.send_whole(_OK, self._lines, rest)
        else:
            self._exchange.write(self._shown_of(rest), is_last=True)
        self._reader.remember(rest)
        self._over(extra=extra, tail=self._reader.tail)

    def _went_on(self) -> bool:
        """Return whether a stream that ended without its mark is resumed; otherwise it ends as the worker ended it."""
        buffer = self._buffer
        assert buffer is not None
        if _END_MARK.search((self._reader.tail + buffer)[-TAIL_BYTES:]):
            return False
        if ripe := self._ripe(buffer, 0):
            self._forward(buffer, ripe)
        if not self._exchange.has_begun or self._exchange.is_mid_event:
            return False
        self._detach(reusable=False)
        goes_on = self._goes_on("body", "the stream ended without [DONE]")
        self._state = _OVER if goes_on else _EVENTS
        return goes_on

    def _over(self, *, extra: bool, tail: bytes) -> None:
        self._detach(reusable=self._reusable and not extra)
        has_mark = not self.call.token_mark and self._later_events > 0 and tail.rstrip().endswith(DONE)
        self._watcher.on_end(tail, self._later_events - has_mark)
        self._exchange.finish()

    def _drop(self, head: AnswerHead, body: bytes) -> None:
        """Drop an unwanted answer; keep its connection if the answer is complete."""
        is_complete = head.body_bytes == len(body)
        if head.body_bytes == CHUNKED:
            try:
                is_complete = BodyReader(CHUNKED).feed(body, bytearray()) == len(body)
            except Malformed:
                is_complete = False
        self._detach(reusable=is_complete and head.reusable)
        self._exchange.relay = None
        self._watcher.on_dropped()

    def closed(self, *, clean: bool) -> None:
        """The worker's connection ended: closed by the worker (`clean`), or by a failure."""
        self.connection = None
        if self._state != _OVER:
            if clean and self._until_close:
                self._end(extra=True)
            else:
                self.fail("first_byte" if self._silent else "body", _CUT_SHORT)

    @property
    def unanswered(self) -> bool:
        """Whether no byte of an answer was received."""
        return self._state == _HEAD and self._buffer is None

    def abandon(self) -> None:
        """End the call after a fault of the router: answer the client, or cut it off."""
        known = self._state == _OVER or self._is_deserted
        self._detach(reusable=False)
        exchange = self._exchange
        exchange.relay = None
        if exchange.has_begun:
            exchange.cut()
        else:
            exchange.answer(500, error_body("our fault; see the log", "server_error"))
        if not known:
            self._watcher.on_gone(self._later_events)

    def fail(self, phase: UpstreamStage, reason: str) -> None:
        """The worker failed: the attempt is over, unless the client has the stream with its end mark already."""
        exchange = self._exchange
        if self._state == _EVENTS and self._is_complete():
            exchange.write(b"", is_last=True)
            self._over(extra=True, tail=self._reader.tail)
            return
        self._detach(reusable=False)
        if self._is_deserted:
            return
        if exchange.has_begun:
            if self.call.replay_buffer is not None and not exchange.is_mid_event and self._goes_on(phase, reason):
                return
            self._watcher.on_failed(phase, reason, begun=True)
            self._cut_short(f"the worker failed in its answer: {phase}: {reason}", "upstream_failed")
        else:
            exchange.relay = None
            self._watcher.on_failed(phase, reason, begun=False)

    def _is_complete(self) -> bool:
        """Return whether the client has all of the stream but its framing."""
        if not self._exchange.has_begun or self._buffer or self.call.token_mark:
            return False
        return self._reader.tail.rstrip().endswith(DONE)

    def _goes_on(self, phase: UpstreamStage, reason: str) -> bool:
        """Return whether the stream is resumed by another worker, or is complete without this one."""
        exchange = self._exchange
        exchange.relay = None
        more = self._watcher.on_cut(phase, reason)
        if more:
            exchange.end_stream(more)
        return more is not None

    def leave(self) -> None:
        """The client left: close the worker's connection, now, or for an `is_once` call once its answer has begun."""
        if self.call.is_once and self._silent and self._state != _OVER:
            self._is_deserted = True
            if self._state != _HEAD:
                self._state = _DESERTED
        else:
            self._detach(reusable=False)
        self._watcher.on_gone(self._later_events)

    def expire(self) -> None:
        """The plane stops and ends this answer; the watcher is called as if the client left."""
        exchange = self._exchange
        self._detach(reusable=False)
        exchange.relay = None
        self._watcher.on_gone(self._later_events)
        message = "the router stops; the answer was not complete in time"
        if exchange.has_begun:
            self._cut_short(message, "shutting_down")
        else:
            body = error_body(message, "server_error", code="shutting_down")
            exchange.answer(503, body, headers=((b"retry-after", b"1"),))

    def _cut_short(self, message: str, code: str) -> None:
        """End the client's part of an answer that is not complete."""
        self._exchange.end_with_error(message, code, passed_on=self._reader.tail if self.call.token_mark else None)

    def _detach(self, *, reusable: bool) -> None:
        self._state = _OVER
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
            self.received, self._received_s = False, now_s
        quiet_s, reason = now_s - self._received_s, ""
        if now_s - self._since_s > call.limits.total_s:
            reason = f"TimeoutError: not whole within {call.limits.total_s:g} s"
        elif self._silent and now_s - self._since_s > call.limits.first_byte_s:
            reason = f"TimeoutError: no byte within {call.limits.first_byte_s:g} s"
        elif not (self._silent or self.paused) and quiet_s > call.limits.between_bytes_s:
            reason = f"TimeoutError: no byte for {call.limits.between_bytes_s:g} s"
        elif not (self.paused or self._exchange.is_mid_event or self._is_deserted):
            reason = self._watcher.lost(quiet_s, begun=self._exchange.has_begun)
        if reason:
            self.fail("first_byte" if self._silent else "body", reason)
