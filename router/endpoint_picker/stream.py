"""One request of a gateway, in the place of a client's connection.

    request    head, body ... ─> the router reads and decides
    placing    `place` ─> header lines, destination, body                        the gateway sends the request
               `reply` ─> an immediate answer                                    no worker gets it
    sent       the answer's head ─> judged ─> header lines                       the gateway passes the answer on
    answer     its body ... ─> the call's handler, to the end
    over       what still comes is passed on unread

| the gateway sends bodies | request | answer |
|---|---|---|
| buffered | the head is passed on at once; header lines and the destination in the reply to the body | one message |
| full_duplex_streamed | nothing is passed on before the decision; then the body, in chunks | each chunk is sent back |
| streamed | refused: by then a worker has the head | each chunk is acknowledged |
| none | refused, unless the request has no body | the answer ends, for the router, with its head |

Source: `envoy/service/ext_proc/v3/external_processor.proto` of Envoy 1.40; docs/SOURCES.md, D11.
"""

import asyncio
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, cast

from kv_protocol.openai.endpoints import PATHS
from router.endpoint_picker import wire
from router.endpoint_picker.addresses import alternatives, endpoint_of
from router.endpoint_picker.wire import AnswerHead, BodyMode, MessageRefused, RequestHead
from router.http import refusals
from router.http.exchange import Exchange, HeaderLines, OutboundCall, ResponseHandler, header_lines
from router.http.heads import UNTIL_CLOSE, AnswerBody
from router.http.refusals import Refusal
from router.http.relay import DONE
from router.metrics import Outcome
from router.request.destination import Gateway

if TYPE_CHECKING:
    from router.endpoint_picker.service import EndpointPicker
    from router.http.upstreams import Upstreams
    from router.request.serving import FleetRequest

CHUNK_BYTES_MAX = 64 << 10
"""Largest part in which a request's body is sent back."""
_STREAM = b"text/event-stream"
_PATHS = frozenset(PATHS.values())
_NOT_OURS = ("authorization", "x-dp-rank", "x-kv-continuable")
"""Headers that a worker gets from the router alone, or not at all."""
_CLIENT_ERROR = 400
_JSON = (b"content-type", b"application/json")
_READ: tuple[BodyMode, ...] = ("buffered", "full_duplex_streamed")
_TOO_SLOW = Refusal(408, "request: not complete in time", "body", "timeout")
_TOO_MUCH = refusals.unavailable("data.bodies_bytes_max: no room for the body; try again", "overloaded")


class GatewayStream:
    """One stream. `replies` takes each message; `close` is called once, at the end."""

    http_1_1 = True
    writing_paused = False

    def __init__(self, picker: "EndpointPicker") -> None:
        self._picker = picker
        self._state: Literal["request", "placing", "sent", "judging", "answer", "over"] = "request"
        self._request_mode: BodyMode = "buffered"
        self._answer_mode: BodyMode | None = None
        self._head: RequestHead | None = None
        self._body: bytearray | bytes = bytearray()
        """The request's body, as far as it has come; once it is complete, the same bytes as the exchange has."""
        self._trailers = False
        self._is_stream = False
        self._token_mark = b""
        self._answer: AnswerBody
        self._exchange: Exchange | None = None
        self._request: FleetRequest | None = None
        """The call's handler, until the answer is over."""
        self._replies: list[Any] = []
        self._spoke = asyncio.Event()
        """Set once the router has decided where the request goes, or has answered it."""
        self.is_answered = False
        """Whether the gateway got an answer for its client: it sends nothing more, and the stream ends."""
        self._is_moving = self._is_counted = False
        self._began_s = perf_counter()

    async def replies(self, kind: str, message: Any) -> list[Any]:  # noqa: ANN401 - its class is one of `MESSAGES`
        """Take a message; return the replies to it, after the router's decision if they need it.

        Raises:
            MessageRefused: the request's head is missing, or is the second one.
        """
        self._spoke.clear()
        match kind:
            case "request_headers":
                self._take_request_head(wire.request_head(message))
            case "request_body":
                self._request_body(message.request_body.body, is_last=message.request_body.end_of_stream)
            case "request_trailers":
                self._request_trailers()
            case "response_headers":
                self._take_answer_head(wire.answer_head(message))
            case "response_body":
                self._answer_body(message.response_body.body, is_last=message.response_body.end_of_stream)
            case _:
                self._replies.append(wire.trailers_reply("response"))
                self._end()
        if self._state == "placing":
            await self._spoke.wait()
        return self._taken()

    def too_slow(self) -> list[Any]:
        """Return the replies if the gateway's next message did not come within `pause_max_s`."""
        self._refuse(_TOO_SLOW)
        return self._taken()

    def _taken(self) -> list[Any]:
        replies, self._replies = self._replies, []
        return replies

    def pause_max_s(self) -> float | None:
        """Return how long the gateway's next message may take; None: no more of the request is expected."""
        limits = self._picker.limits
        if self._state != "request":
            return None
        left_s = self._began_s + limits.body_total_s - perf_counter()
        comes_whole = self._head is not None and self._request_mode == "buffered"
        return max(0.0, left_s if comes_whole else min(limits.body_s, left_s))

    def close(self) -> None:
        """The gateway closed the stream, or gave it up: its client left, or a worker failed within its answer."""
        state, self._state = self._state, "over"
        if self._exchange is not None and state != "over":
            self._exchange.leave()
        self._picker.account(-len(self._body))
        self._count("left")

    def _count(self, outcome: Outcome) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._picker.statistics.outcomes[outcome] += 1

    def _answer_client(self, status: int, headers: HeaderLines, body: bytes) -> None:
        """Have the gateway answer its client with this."""
        self._state, self.is_answered = "over", True
        self._replies.append(wire.immediate_reply(status, headers, body))
        self._count("refused" if status >= _CLIENT_ERROR else "answered")

    def _refuse(self, refusal: Refusal) -> None:
        self._answer_client(refusal.status, (_JSON,), refusal.body)

    # ------------------------------------------------------------------------------------------- the request

    def _take_request_head(self, head: RequestHead) -> None:
        if self._head is not None:
            raise MessageRefused("request_headers: found a second message, allowed one a stream")
        self._head = head
        if head.modes is not None:
            self._request_mode, self._answer_mode = head.modes
        if head.is_last:
            self._begin()
        elif self._request_mode not in _READ:
            found = self._request_mode.upper()
            message = f"the gateway's request_body_mode: found {found}, allowed BUFFERED or FULL_DUPLEX_STREAMED"
            self._refuse(Refusal(500, message, code="gateway_body_mode", outcome="failed"))
        elif self._request_mode == "buffered":
            self._replies.append(wire.head_reply("request"))

    def _request_body(self, data: bytes, *, is_last: bool) -> None:
        if self._state != "request":
            return
        most = self._picker.limits.body_bytes_max
        if len(self._body) + len(data) > most:
            message = f"body: found more than {most} bytes, allowed data.body_bytes_max"
            self._refuse(Refusal(413, message, "body", "body_too_large"))
            return
        self._body += data
        if not self._picker.account(len(data)):
            self._refuse(_TOO_MUCH)
        elif is_last or self._request_mode == "buffered":
            self._begin()

    def _request_trailers(self) -> None:
        if self._state == "request":
            self._trailers = True
            self._begin()
        else:
            self._replies.append(wire.trailers_reply("request"))

    def _begin(self) -> None:
        """The request is complete: the router reads it and decides."""
        head, picker = self._head, self._picker
        if head is None:
            raise MessageRefused(
                "request_body or request_trailers: found as the first message, allowed request_headers"
            )
        self._state = "placing"
        self._body = bytes(self._body)
        parts = head.method, head.path, head.query, head.headers, self._body
        exchange = self._exchange = _GatewayExchange(self, *parts, self._began_s)
        if head.path not in _PATHS or head.method != "POST":
            picker.replies(exchange)
            return
        allowed = picker.addresses().allowed(head.subset)
        gateway = Gateway(allowed, partial(alternatives, count=picker.settings.fallbacks))
        picker.serving.serve(exchange, gateway=gateway)

    def place(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """The router chose a worker: tell the gateway, unless it has sent the request already, to another worker."""
        self._request = cast("FleetRequest", watcher)
        self._count("placed")
        if self._state != "placing":
            return
        self._state = "sent"
        self._token_mark = call.token_mark
        urls = (call.base_url, *call.alternatives)
        destination = ",".join(endpoint for each in urls if (endpoint := endpoint_of(each)) is not None)
        lines = header_lines(call.headers)
        named = {name.decode("latin-1").lower() for name, _ in lines}
        head = lines, tuple(name for name in _NOT_OURS if name not in named), destination
        body = b"".join(call.body) if isinstance(call.body, tuple) else bytes(call.body)
        if self._head is not None and self._head.is_last:
            self._replies.append(wire.head_reply("request", *head))
        elif self._request_mode == "buffered":
            self._replies.append(wire.body_reply("request", *head, None if body == self._body else body))
        else:
            self._replies += [wire.head_reply("request", *head), *self._chunks(body)]
            self._replies += [wire.trailers_reply("request")] * self._trailers
        self._spoke.set()

    def _chunks(self, body: bytes) -> list[Any]:
        starts = range(0, len(body), CHUNK_BYTES_MAX) or (0,)
        last = starts[-1]
        return [
            wire.chunk_reply("request", body[at : at + CHUNK_BYTES_MAX], is_last=at == last and not self._trailers)
            for at in starts
        ]

    def reply(self, status: int, body: bytes, content_type: bytes, headers: HeaderLines) -> None:
        """The router answers itself: tell the gateway."""
        self._request = None
        if self._is_moving:  # the worker that answered is no longer eligible: its answer is passed on nevertheless
            return
        if self._state not in ("answer", "over"):  # in these it has some of an answer, or has left
            self._answer_client(status, ((b"content-type", content_type), *headers), body)
        self._spoke.set()

    @property
    def outward(self) -> "Upstreams":
        """Never used: the gateway sends the calls."""
        raise AssertionError("the gateway sends the requests")

    def write(self, data: bytes) -> None:
        """Never called: no stream is resumed."""
        raise AssertionError(f"{len(data)} bytes for a gateway's client")

    def finish(self) -> None:
        """Never called: the gateway ends the answer of its client."""

    cut = finish

    # ------------------------------------------------------------------------------------------- the answer

    def _take_answer_head(self, head: AnswerHead) -> None:
        if self._state != "sent":
            self._replies.append(wire.head_reply("response"))
            return
        self._state = "judging"
        self._is_stream = head.headers.get(b"content-type", b"")[: len(_STREAM)].lower() == _STREAM
        self._answer = AnswerBody(UNTIL_CLOSE, self._token_mark)
        if self._is_stream:
            self._answer.pass_on(False, 0, None, ())  # noqa: FBT003 - as it is, without chunks
        request = self._request
        if head.served and request is not None:
            self._is_moving = True
            worker_id = self._picker.addresses().workers.get(head.served)
            if worker_id is not None and request.served_elsewhere(worker_id):
                self._picker.statistics.moved += 1
            self._is_moving = False
        if (handler := self._request) is None:
            self._accept(b"", head)
        elif head.failure:
            handler.on_failed("connect", head.failure, False)  # noqa: FBT003 - a callback's fact
        elif (lines := handler.on_head(head.status, head.headers, self._is_stream)) is None:
            handler.on_dropped()
        else:
            self._accept(lines, head)

    def _accept(self, lines: bytes, head: AnswerHead) -> None:
        """Have the gateway pass the answer's head on, with these header lines."""
        self._state = "answer"
        self._replies.append(wire.head_reply("response", header_lines(lines)))
        if head.is_last or self._answer_mode in (None, "none"):
            if self._is_stream and self._request is not None:
                self._request.on_first_byte()
            self._end()

    def _answer_body(self, data: bytes, *, is_last: bool) -> None:
        is_duplex = self._answer_mode == "full_duplex_streamed"
        self._replies.append(
            wire.chunk_reply("response", data, is_last=is_last) if is_duplex else wire.body_reply("response")
        )
        if self._state != "answer":
            return
        handler, answer = self._request, self._answer
        if data:
            is_first = not answer.has_begun
            answer.feed(data)
            if self._is_stream:
                answer.take_events()
                if handler is not None:
                    (handler.on_first_byte if is_first else handler.on_bytes)()
            if not self._is_stream or answer.size > CHUNK_BYTES_MAX:
                answer.take(answer.size)
        if is_last or self._answer_mode == "buffered":
            self._end()

    def _end(self) -> None:
        """The answer is complete, as far as the gateway shows it."""
        if self._state != "answer":
            return
        self._state = "over"
        handler, self._request = self._request, None
        if handler is not None:
            self._answer.take(self._answer.size)
            later_events = self._answer.later
            if later_events and not self._token_mark:
                later_events -= self._answer.tail.rstrip().endswith(DONE)
            handler.on_end(self._answer.tail, later_events)
            if self._exchange is not None:
                self._exchange.close()


class _GatewayExchange(Exchange, eq=False):
    """A request of the endpoint picker: the gateway, not the router, calls the worker."""

    def forward(self, call: OutboundCall, watcher: ResponseHandler) -> None:
        """Tell the gateway where to send the call. Do nothing if the stream is closed."""
        if isinstance(self.client, GatewayStream):
            self.client.place(call, watcher)
