"""Relays a worker's answer to the client.

| answer | what the client gets, and when | after the worker's death |
|---|---|---|
| event stream | chunks of complete events, as they come | nothing was passed on: `on_failed`; else another worker's |
| | | answer, if `on_cut` of a call with a `replay_buffer` says so; else an error event, `[DONE]` |
| up to `call.buffered_bytes_max` | all of it with its length, once it is complete | `on_failed` |
| longer | a body with its length, or chunks, as it comes | what was passed on is cut off |

In a stream of `/v1/responses` (its call has a `token_mark`) the error event has another form, and no `[DONE]` follows;
the watcher's `on_first_byte` is called at the first event with a token.

The complete events of each read of a stream are sent as one chunk; the beginning of another event waits. If a worker
fails after `[DONE]`, the stream is complete. A client of HTTP/1.0 gets bytes until its connection ends. Only the last
4 KB of the body are kept, unless the call has a `replay_buffer`. A stream with a buffer may also be resumed if it ends
without `[DONE]`, or if an attached engine reports its failure in an event, which the client does not get. The buffer
says what the client gets of all other events.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from router.http.exchange import Exchange, OutboundCall, ResponseHandler, UpstreamStage
from router.http.heads import CHUNKED, LAST_CHUNK, AnswerBody, AnswerHead, chunk
from router.http.refusals import Refusal
from router.http.stream_replay import FAILURE, failure_in
from router.native import built

if TYPE_CHECKING:
    from router.http.upstreams import UpstreamOrigin, Upstreams

DONE = b"[DONE]"
_EVENTS, _GATHER, _PASS_THROUGH = range(3)
"""Forms of a body."""
NONE: Any = None
"""Stands for the call and the watcher of a relay that is over."""

_log = structlog.get_logger("http")


class AnswerRelay(built.AnswerReceiver):
    """Relays the answer of one call after the other: takes the worker's bytes, writes to the client, calls watchers.

    It is the `relay` of its call's exchange until the call is over. Its base (`router/native/relay.cpp`) does what most
    answers need: `receive` passes on answers that come whole, and streams that flow, and calls `begin`, `take` and
    `drop` for the others; `release(reusable)` keeps the connection of a complete answer as idle, or closes it.
    """

    __slots__ = (
        "body", "call", "dial", "due_s", "exchange", "form", "has_part", "is_chunked", "is_fresh", "is_odd", "is_open",
        "is_told", "lines", "origin", "part", "paused", "received", "received_s", "reusable", "silent", "since_s",
        "transport", "upstreams", "watcher",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(
        self,
        upstreams: "Upstreams",
        origin: "UpstreamOrigin",
        exchange: Exchange,
        call: OutboundCall,
        watcher: ResponseHandler,
        since_s: float,
    ) -> None:
        """The connection is to be opened for this call, which was forwarded at `since_s`."""
        super().__init__(upstreams.answers)
        self.upstreams, self.origin = upstreams, origin
        self.exchange: Exchange | None = exchange
        """None: there is no call."""
        self.call, self.watcher, self.since_s = call, watcher, since_s
        """When the call was forwarded, by the loop's clock; over a lent connection, set by the first check."""
        self.due_s = since_s
        """No check of timeouts is needed before this time; 0: it was lent, or became idle, since the last check."""
        self.lines = b""
        """Head of the client's answer, without the connection's lines."""
        self.reusable = self.is_chunked = False
        """Whether the worker's connection is kept when the answer is complete; whether the client gets chunks."""
        self.dial: asyncio.Task[None] | None = None
        """The task that opens the connection."""
        self.is_open = False
        """Whether the connection was opened."""
        self.paused = False
        self.reset()
        self.is_fresh = self.is_odd = True
        self.paused = exchange.client is not None and exchange.client.writing_paused

    def reset(self) -> None:
        """Forget the former answer."""
        if self.paused:
            self.resume()
        self.is_fresh = False
        """Whether the present call is the first one over the connection."""
        self.is_odd = False
        """Whether the next call needs a `reset`: not after an answer that came whole in one read."""
        self.part, self.has_part = b"", False
        """Bytes of a head, until its rest comes; whether a byte came, if only of an interim answer."""
        self.received, self.received_s = False, 0.0
        """Whether bytes came since the last check of timeouts; when a check last saw new bytes, or 0."""
        self.body: AnswerBody | None = None
        """The body, unless it came whole with its head. What was taken of it was passed on."""
        self.form = _GATHER
        self.paused = self.is_told = False
        """`is_told`: `watcher.on_first_byte` was called."""
        self.silent = True
        """Whether no byte of the body came."""

    def give_up(self) -> None:
        """The call is over: close the connection, also one that is being opened."""
        self.exchange = self.call = self.watcher = NONE
        if self.is_open:
            self.transport.abort()
        elif self.dial is not None:
            self.dial.cancel()
            self.dial = None

    def pause(self) -> None:
        """The client reads too slowly: stop reading from the worker until `resume`."""
        self.paused = self.is_odd = True
        if self.is_open and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read from the worker again: the client has read the pending bytes."""
        self.paused, self.received = False, True
        if self.is_open and not self.transport.is_closing():
            self.transport.resume_reading()

    @property
    def stage(self) -> UpstreamStage:
        """The step at which the call is, once its request is sent."""
        return "first_byte" if self.silent else "body"

    @property
    def later_events(self) -> int:
        """Events of a stream after its first bytes."""
        return 0 if self.body is None else self.body.later

    @property
    def tail(self) -> bytes:
        """The end of what the client has of the body."""
        return b"" if self.body is None else self.body.tail

    # ------------------------------------------------------------ what the worker sends

    def begin(self, exchange: Exchange, head: AnswerHead | None, data: bytes) -> None:
        """Take a head that came without its whole body; None: `data` does not complete it."""
        self.is_odd = self.received = self.has_part = True
        if head is None:
            self.part += data
            return
        is_idle = head.reusable and head.body_bytes == len(head.rest)
        if head.status < 200:  # noqa: PLR2004 - an interim answer, and the beginning of a head
            self.part = head.rest
        elif exchange.client is None:
            self.body = AnswerBody(head.body_bytes, b"")
            if head.rest or head.body_bytes == 0:
                self.release(is_idle)
        elif (added := self.watcher.on_head(head.status, head.headers, head.is_stream)) is None:
            self.drop(exchange, is_idle)
        else:
            self._begin_body(exchange, head, added)

    def drop(self, exchange: Exchange, reusable: bool) -> None:  # noqa: FBT001 - as the base calls it
        """Drop an unwanted answer; its connection is `reusable` if the answer is complete."""
        self._over(exchange, reusable=reusable).on_dropped()

    def _begin_body(self, exchange: Exchange, head: AnswerHead, added: bytes) -> None:
        """Begin to relay a body that did not come whole with its head."""
        body_bytes, call, self.reusable = head.body_bytes, self.call, head.reusable
        body = self.body = AnswerBody(body_bytes, call.token_mark, exchange.has_begun)
        self.lines, self.form, self.is_chunked = head.lines + added, _GATHER, False
        if head.is_stream:
            self.form = _EVENTS
            exchange.is_stream = True
            self._frame(exchange, b"" if b"cache-control" in head.headers else b"cache-control: no-cache\r\n", CHUNKED)
            buffer = call.replay_buffer
            kept, alarms = (None, ()) if buffer is None else (buffer.kept, buffer.alarms)
            body.pass_on(self.is_chunked, call.buffered_bytes_max, kept, alarms)
        elif exchange.has_begun:
            self.fail("first_byte", "the answer that was to go on is no event stream")
            return
        elif body_bytes > call.buffered_bytes_max:
            self.form = _PASS_THROUGH
            self._frame(exchange, b"", body_bytes)
        if head.rest or body_bytes == 0:
            body.feed(head.rest)
            self.take(exchange, body, len(head.rest))

    def _frame(self, exchange: Exchange, added: bytes, body_bytes: int) -> None:
        """Complete the head's lines: the client gets a body of this length, or of an unknown one."""
        client = exchange.client
        self.is_chunked = body_bytes < 0 and client is not None and client.http_1_1
        framing = b"content-length: %d\r\n" % body_bytes if body_bytes >= 0 else b""
        self.lines += added + (b"transfer-encoding: chunked\r\n" if self.is_chunked else framing)

    def take(self, exchange: Exchange, body: AnswerBody, size: int) -> None:
        """Pass on what `body.feed` has read, the last `size` bytes included, and has not passed on itself."""
        if exchange.client is None:
            self.give_up()
            return
        end, replay_buffer = body.end, self.call.replay_buffer
        if replay_buffer is not None and replay_buffer.is_engines and self._reported_failure(exchange, body):
            return
        if end < 0 and (payload := self._passable(exchange, body)):
            self._write_payload(exchange, body, payload)
        if self.silent and body.has_begun and self.exchange is exchange:
            self._tell_first(exchange)
        if self.exchange is not exchange:  # the answer was too long for its reader, which gave it up
            return
        if end >= 0:
            self.end(exchange, body, extra=end < size)
        else:
            body.flows = exchange.has_begun and self.is_told and not exchange.is_mid_event

    def _reported_failure(self, exchange: Exchange, body: AnswerBody) -> bool:
        """Return whether an attached engine reports its failure; if so, pass on the events before and fail the call."""
        if self.form != _EVENTS or not body.has(FAILURE):
            return False
        at, reason = failure_in(body.pending)
        if at < 0:
            return False
        if at:
            exchange.is_mid_event = False
            if self.silent:
                self._tell_first(exchange)
            self._write_payload(exchange, body, body.take(at))
        body.drop()
        self.fail(self.stage, reason)
        return True

    def _passable(self, exchange: Exchange, body: AnswerBody) -> bytes:
        """Take and return what may be passed on; empty: nothing yet."""
        if self.form == _EVENTS and (events := body.take_events()):
            exchange.is_mid_event = False
            return events
        if self.form != _PASS_THROUGH:
            if body.size <= self.call.buffered_bytes_max:
                return b""
            exchange.is_mid_event = True
            if self.form == _GATHER:
                self.form = _PASS_THROUGH
                self._frame(exchange, b"", CHUNKED)
        return body.take(body.size)

    def _write_payload(self, exchange: Exchange, body: AnswerBody, payload: bytes, *, is_last: bool = False) -> None:
        """Pass on what was taken of the body, if anything; the client may get another form of it."""
        call = self.call
        if self.form == _EVENTS and payload:
            if call.token_mark and body.marks and not self.is_told:
                self.is_told = True
                self.watcher.on_first_byte()
            if call.replay_buffer is not None:
                payload = call.replay_buffer.add(payload)
        if self.is_chunked:
            if payload:
                payload = chunk(payload)
            if is_last:
                payload += LAST_CHUNK
        client = exchange.client
        if client is None:
            return
        if not exchange.has_begun:
            exchange.has_begun = True
            payload = b"%b%b\r\n%b" % (self.lines, exchange.connection_line, payload)
        client.write(payload)

    def _tell_first(self, exchange: Exchange) -> None:
        """The body has begun: tell the watcher, unless it awaits a token mark."""
        self.silent = False
        if not (exchange.is_stream and self.call.token_mark):  # else `_write_payload` does it
            self.is_told = True
            self.watcher.on_first_byte()

    # ------------------------------------------------------------ how it ends

    def _over(self, exchange: Exchange, *, reusable: bool = False) -> ResponseHandler:
        """The call is over: return its watcher, which gets one more call at most."""
        watcher, exchange.relay = self.watcher, None
        self.release(reusable)
        return watcher

    def end(self, exchange: Exchange, body: AnswerBody, *, extra: bool) -> None:
        """The body is complete. `extra`: bytes followed that belong to no answer."""
        if self.form == _EVENTS:
            if self.silent:
                self.fail("first_byte", "no bytes")
                return
            if self.call.replay_buffer is not None and self._is_resumed_at_end(exchange, body):
                return
        rest = body.take(body.size)
        if self.form == _GATHER:
            self._frame(exchange, b"", len(rest))
        self._write_payload(exchange, body, rest, is_last=True)
        if self.exchange is not exchange:  # the answer was too long for its reader, which gave it up
            return
        tail, later_events = body.tail, body.later
        if later_events and not self.call.token_mark:
            later_events -= tail.rstrip().endswith(DONE)
        self._over(exchange, reusable=self.reusable and not extra).on_end(tail, later_events)
        client, exchange.client = exchange.client, None
        exchange.when_gone = None
        if client is not None:
            client.finish()

    def _is_resumed_at_end(self, exchange: Exchange, body: AnswerBody) -> bool:
        """Return whether another worker resumes a stream that ended without `[DONE]`; if not, the client's ends so."""
        if body.has_end_mark:
            return False
        if payload := self._passable(exchange, body):
            self._write_payload(exchange, body, payload)
        if not exchange.has_begun or exchange.is_mid_event:
            return False
        self.reusable = False
        if not self._is_resumed(exchange, self.watcher, "body", "the stream ended without [DONE]"):
            return False
        self.give_up()
        return True

    def abandon(self, exchange: Exchange) -> None:
        """Log a fault of the router, and end the call, so that no client waits forever. Called within an `except`."""
        _log.exception("relay_failed")
        callback, later_events = exchange.when_gone, self.later_events
        if self.exchange is exchange:
            self._over(exchange)
        exchange.relay = None
        if exchange.has_begun:
            exchange.cut()
        else:
            exchange.refuse(Refusal(500, "our fault; see the log"))
        if callback is not None:
            callback(later_events)

    def fail(self, stage: UpstreamStage, reason: str) -> None:
        """End the call: the worker failed. If the client has the stream's end mark already, the answer is complete."""
        exchange, call, body, tail = self.exchange, self.call, self.body, self.tail
        assert exchange is not None, "there is a call"
        marked = body if self.form == _EVENTS and exchange.has_begun and not call.token_mark else None
        if marked is not None and marked.has_end_mark and not (marked.size or exchange.is_mid_event):
            self.end(exchange, marked, extra=True)
            return
        watcher = self._over(exchange)
        if exchange.client is None:
            return
        if exchange.has_begun:
            keeps = call.replay_buffer is not None and not exchange.is_mid_event
            if keeps and self._is_resumed(exchange, watcher, stage, reason):
                return
            watcher.on_failed(stage, reason, begun=True)
            message = f"the worker failed in its answer: {stage}: {reason}"
            exchange.end_with_error(message, "upstream_failed", call, tail)
        else:
            watcher.on_failed(stage, reason, begun=False)

    @staticmethod
    def _is_resumed(exchange: Exchange, watcher: ResponseHandler, stage: UpstreamStage, reason: str) -> bool:
        """Return whether another worker resumes the stream, or the stream is complete without this worker."""
        exchange.relay = None
        more = watcher.on_cut(stage, reason)
        if more:
            exchange.end_stream(more)
        return more is not None

    def leave(self, exchange: Exchange, *, at_once: bool = False) -> int:
        """The client left: end the call, and return its `later_events`.

        The worker's connection is closed now; for an `is_once` call, unless `at_once`, when the body of its answer
        begins. Until then the exchange has no client, and no method of the watcher is called.
        """
        later_events = self.later_events
        if at_once or not (self.call.is_once and self.silent):
            self._over(exchange)
        return later_events

    def check_call(self, exchange: Exchange, now_s: float) -> None:
        """Fail the attempt if a limit of the call is exceeded at `now_s`, or if the watcher gives the answer up."""
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
        elif not (self.paused or exchange.is_mid_event or exchange.client is None):
            reason = self.watcher.reason_to_stop(quiet_s, begun=exchange.has_begun)
        if reason:
            self.fail(self.stage, reason)
