"""Drives a request's machine: turns what happens into events, and carries out the commands that come back.

A subclass says how a request is queued, how a worker is chosen, what it is sent, and what is recorded: `served.py` for
requests at workers, `router/pools/served.py` at pools, `router/drain/warming.py` for prompts that are computed
only for the cache.

A request runs in callbacks, not in a task: one that needs neither another thread nor the queue is forwarded in the same
turn of the event loop in which it came.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import cast

from kv_protocol.continuation import Progress
from router.request.attempt import CLIENT_FAULT
from router.request.bodies import BodyParser
from router.request.events import (
    AnswerDropped,
    AnswerEnded,
    CallFailed,
    ClientLeft,
    Command,
    Decide,
    Drop,
    Event,
    FinishStream,
    FirstByteCame,
    GiveUp,
    HeadCame,
    MakeRoute,
    Queue,
    Record,
    Refuse,
    Refused,
    Relay,
    Reply,
    ResumeFailed,
    Retry,
    Send,
    StreamCut,
)
from router.request.machine import RequestMachine
from router.request.reader import RequestReader
from router.request.refusals import Refusal
from router.request.resumption import CannotResume
from router.server.buffered_response import ASIDE_BYTES_MAX, BufferedResponse
from router.server.exchange import Exchange, OutboundCall, UpstreamStage
from router.server.heads import Headers
from router.server.stream_replay import StreamReplayBuffer

_RARELY = frozenset({MakeRoute, Drop, FinishStream, Retry, Refuse, Reply, GiveUp})
"""Commands that most requests do without; the others that `_perform` does not name are facts."""


class RequestDriver(RequestReader):
    """One request on its way; the handler of its own calls."""

    __slots__ = ("_aside", "_lines", "_machine", "_replay_buffer", "_stream_end")

    def __init__(self, exchange: Exchange, bodies: BodyParser) -> None:
        super().__init__(exchange, bodies)
        self._machine = RequestMachine()
        self._aside: BufferedResponse | None = None
        self._replay_buffer: StreamReplayBuffer | None = None
        self._lines: bytes | None = None
        self._stream_end: bytes | None = None

    def begin(self) -> None:
        """Read and serve the client's request."""
        self.exchange.on_gone(self._left)
        self.read()

    # ------------------------------------------------------------------------------------------- of the subclass

    @abstractmethod
    def _queue(self) -> Event | None:
        """Wait for room: return what came of it, or feed it later."""

    @abstractmethod
    def _make_route(self) -> None:
        """Make the routing fields for the plan's present phase."""

    @abstractmethod
    def _decide(self) -> Event:
        """Choose a worker for the present phase, and book the work there: `Chosen` or `NotChosen`."""

    @abstractmethod
    def _call(self, send: Send, buffer: StreamReplayBuffer | None) -> OutboundCall | None:
        """Return the call to the chosen worker; None: the worker left.

        `buffer` gets the events of its stream.

        Raises:
            CannotResume: the worker cannot continue the stream.
        """

    @abstractmethod
    def _new_replay_buffer(self) -> StreamReplayBuffer:
        """Return a buffer for a stream that may resume on another worker."""

    @abstractmethod
    def _answer_lines(self, relay: Relay) -> bytes:
        """Return the header lines that say how the request was routed, each ended by CRLF.

        `relay.is_aside`: of a prefill worker's answer that the client gets.
        """

    @abstractmethod
    def _record(self, fact: Record) -> None:
        """Count the fact, and enter it in the ledgers."""

    @abstractmethod
    def _after_pause(self, retry: int, again: Callable[[], None]) -> None:
        """Call `again` after the pause before this retry."""

    @abstractmethod
    def _refusal_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Return headers for an error of the router."""

    def _has_other(self) -> bool:
        """Return whether the request may be tried again, by another worker."""
        return True

    def _let_fetch(self, command: GiveUp, aside: BufferedResponse) -> None:
        """Have a decode worker fetch the KV that a prefill worker holds for it; that answer is not read."""

    @abstractmethod
    def on_bytes(self) -> None:
        """The answer goes on."""

    # ------------------------------------------------------------------------------------------- the machine

    def _feed(self, event: Event) -> None:
        """Give the machine an event, and those that follow from its commands."""
        following: Event | None = event
        while following is not None:
            commands, following = self._machine.receive(following), None
            for command in commands:
                following = self._perform(command)

    def _feed_or_refuse(self, event: Event) -> None:
        """The same; on an exception the client gets an error."""
        self._refusing(lambda: self._feed(event))

    def _refuse(self, refusal: Refusal) -> None:
        self._feed(Refused(refusal))

    def _perform(self, command: Command) -> Event | None:
        if type(command) is Queue:  # `isinstance` that is false takes 0.2 us for a Struct
            return self._queue()
        if type(command) is Decide:
            return self._decide()
        if type(command) is Send:
            return self._send(command)
        if type(command) is Relay:
            self._lines = b"" if command.is_aside else self._answer_lines(command)
        elif type(command) in _RARELY:
            self._perform_rarely(command)
        else:
            self._record(cast("Record", command))
        return None

    def _send(self, send: Send) -> Event | None:
        self._replay_buffer = self._new_replay_buffer() if send.keeps_events else None
        try:
            call = self._call(send, self._replay_buffer)
        except CannotResume as error:
            return ResumeFailed(error.elsewhere)
        if call is None:
            return CallFailed("connect", "the worker left", has_begun=False)
        if send.is_aside:
            aside = self._aside = BufferedResponse(self.exchange.outward, ASIDE_BYTES_MAX)
            aside.ask(call, self)
        else:
            self.exchange.forward(call, self)
        return None

    def _perform_rarely(self, command: Command) -> None:
        if isinstance(command, MakeRoute):
            self._make_route()
        elif isinstance(command, Drop):
            self._lines = None
        elif isinstance(command, FinishStream):
            self._stream_end = command.events
        elif isinstance(command, Retry):
            self._after_pause(command.number, self._retry)
        elif isinstance(command, Refuse):
            refusal = command.refusal
            headers = (*refusal.headers, *self._refusal_headers())
            self.exchange.answer(refusal.status, refusal.body, headers=headers)
        elif isinstance(command, Reply):
            self._reply(command)
        else:
            assert isinstance(command, GiveUp)
            self._give_up(command)

    def _retry(self) -> None:
        if not self._machine.is_over:
            self._refusing(self._decide_again)

    def _decide_again(self) -> None:
        self._feed(self._decide())

    def _reply(self, reply: Reply) -> None:
        lines = self._answer_lines(Relay(reply.attempt, None, is_aside=True))
        named = [line.partition(b": ") for line in lines.split(b"\r\n") if line]
        headers = [(name, value) for name, _, value in named]
        exchange, events = self.exchange, reply.events
        if not events:
            exchange.answer(reply.attempt.status, reply.body, headers=headers)
        elif exchange.is_begun:
            exchange.end_stream(events)
        else:
            exchange.answer(200, events, content_type=b"text/event-stream", headers=headers)

    def _give_up(self, command: GiveUp) -> None:
        aside = self._aside
        if aside is not None:
            aside.give_up()
            if command.handoff is not None:
                self._let_fetch(command, aside.another())

    # ------------------------------------------------------------------------------------------- as a call's handler

    def on_head(self, status: int, headers: Headers) -> bytes | None:
        """Return the header lines to add to the answer; None: it is not passed on."""
        self._feed(HeadCame(status, headers, is_last=status >= CLIENT_FAULT and not self._has_other()))
        return self._lines

    def on_dropped(self) -> None:
        """The unwanted answer is dropped."""
        self._feed(AnswerDropped())

    def on_first_byte(self) -> None:
        """The answer has begun."""
        self._feed(FirstByteCame())

    def on_end(self, tail: bytes, later_events: int) -> None:
        """The answer is complete, at the client, or in the router for a prefill worker's."""
        buffer = self._replay_buffer
        if buffer is not None:
            later_events = buffer.later_tokens or later_events
        if self._machine.is_collecting and self._aside is not None:
            self._feed_or_refuse(AnswerEnded(self._aside.body, later_events))
        else:
            self._feed(AnswerEnded(tail, later_events))

    def on_failed(self, phase: UpstreamStage, reason: str, begun: bool) -> None:  # noqa: FBT001 - a callback's fact
        """The worker failed."""
        self._feed(CallFailed(phase, reason, begun))

    def lost(self, quiet_s: float, begun: bool) -> str:  # noqa: ARG002, FBT001 - the call's own limits hold
        """Return nothing: whatever becomes of the worker, its answer is awaited."""
        return ""

    def on_cut(self, phase: UpstreamStage, reason: str) -> bytes | None:
        """Return how the stream of a failed worker continues: from another worker, with its end, or with an error."""
        self._feed(StreamCut(phase, reason, *self._replayed()))
        return self._taken_stream_end()

    def _replayed(self) -> tuple[bytes | None, Progress | None]:
        """Return the events of the stream, None if they are not kept, and where it continued another's."""
        buffer = self._replay_buffer
        if buffer is None:
            return None, None
        return None if buffer.is_overfull else buffer.events(), buffer.before

    def _taken_stream_end(self) -> bytes | None:
        end, self._stream_end = self._stream_end, None
        return end

    def on_gone(self) -> None:
        """The client left and the worker's connection was closed; or a prefill worker's answer is too long."""
        if self._machine.is_collecting:
            self._feed(CallFailed("body", f"an answer of more than {ASIDE_BYTES_MAX} bytes", has_begun=False))
        else:
            self._left()

    def _left(self) -> None:
        self._feed(ClientLeft())
