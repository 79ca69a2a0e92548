"""The messages of one stream between a gateway and the endpoint picker, free of their encoding (`wire.py`).

from the gateway   `RequestCame`, `RequestBody`, `RequestTrailers`, `AnswerCame`, `AnswerBody`, `AnswerTrailers`
to the gateway     `HeadersReply`, `BodyReply`, `BodyChunk`, `TrailersReply`, `Immediate`
"""

from typing import Literal

import msgspec

from kv_protocol.body_limits import Bytes
from router.http.heads import Headers

BodyMode = Literal["none", "streamed", "buffered", "buffered_partial", "full_duplex", "grpc"]
"""How the gateway sends a body. Source: Envoy's API, `ProcessingMode.BodySendMode`."""
Side = Literal["request", "answer"]
Lines = tuple[tuple[bytes, bytes], ...]


_STREAM = b"text/event-stream"


class Modes(msgspec.Struct, frozen=True):
    """How the gateway sends bodies in this stream."""

    request: BodyMode
    answer: BodyMode


class RequestCame(msgspec.Struct, frozen=True):
    """The head of a client's request."""

    method: str
    path: str
    query: str
    headers: Headers
    is_last: bool = False
    """The request has no body."""
    modes: Modes | None = None
    """None: the gateway is too old to say so."""
    subset: tuple[str, ...] | None = None
    """The endpoints from which one is to be picked; None: any."""


class RequestBody(msgspec.Struct, frozen=True):
    """A part of the request's body, or all of it."""

    data: bytes
    is_last: bool


class RequestTrailers(msgspec.Struct, frozen=True):
    """The request's trailers: its body is complete."""


class AnswerCame(msgspec.Struct, frozen=True):
    """The head of the answer, which a worker or the gateway itself gave."""

    status: int
    headers: Headers
    is_last: bool = False
    served: str = ""
    """The endpoint that answered; empty: the gateway does not say so."""
    failure: str = ""
    """Why the gateway itself answered, in its words; empty: a worker answered, or the gateway does not say so."""

    @property
    def is_stream(self) -> bool:
        """Whether its body has events."""
        return self.headers.get(b"content-type", b"")[: len(_STREAM)].lower() == _STREAM


class AnswerBody(msgspec.Struct, frozen=True):
    """A part of the answer's body, or all of it."""

    data: bytes
    is_last: bool


class AnswerTrailers(msgspec.Struct, frozen=True):
    """The answer's trailers: its body is complete."""


FromGateway = RequestCame | RequestBody | RequestTrailers | AnswerCame | AnswerBody | AnswerTrailers


class HeadersReply(msgspec.Struct, frozen=True):
    """Pass a head on, with these header lines in place of those of the same names."""

    side: Side
    lines: Lines = ()
    removed: tuple[str, ...] = ()
    destination: str = ""
    """The picked endpoints, `ip:port` between commas; empty: nothing was picked."""


class BodyReply(msgspec.Struct, frozen=True):
    """Pass a body or a part of it on; of a buffered request with changes of its head."""

    side: Side
    lines: Lines = ()
    removed: tuple[str, ...] = ()
    destination: str = ""
    body: bytes | None = None
    """What takes its place; None: it stays as it is."""


class BodyChunk(msgspec.Struct, frozen=True):
    """A part of a body of mode full_duplex."""

    side: Side
    data: Bytes | memoryview
    is_last: bool


class TrailersReply(msgspec.Struct, frozen=True):
    """Pass trailers on."""

    side: Side


class Immediate(msgspec.Struct, frozen=True):
    """Answer the client with this, and send the request nowhere."""

    status: int
    headers: Lines
    body: bytes


ToGateway = HeadersReply | BodyReply | BodyChunk | TrailersReply | Immediate
