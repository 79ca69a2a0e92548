"""Decodes and encodes the messages between a gateway and the picker: protobuf on one side, `messages.py` on the other.

The picked endpoints are in the header and in the dynamic metadata, with the same value. Source: the endpoint picker
protocol 1.0.0 of the Gateway API inference extension (proposal 004); docs/SOURCES.md, D11.
"""

from collections.abc import Iterable
from typing import Any, get_args

from google.protobuf.message import DecodeError

from router.endpoint_picker.messages import (
    AnswerBody,
    AnswerCame,
    AnswerTrailers,
    BodyChunk,
    BodyMode,
    BodyReply,
    FromGateway,
    HeadersReply,
    Immediate,
    Lines,
    Modes,
    RequestBody,
    RequestCame,
    RequestTrailers,
    ToGateway,
    TrailersReply,
)
from router.endpoint_picker.schema import MESSAGES
from router.http.heads import Headers

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of the metadata, of the picked endpoints."""
METADATA = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_METADATA, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
ATTRIBUTES, DETAILS = "envoy.filters.http.ext_proc", "response.code_details"
_BY_WORKER = "via_upstream"
"""The details of an answer that a worker gave."""
_OVERWRITE = 2
"""`OVERWRITE_IF_EXISTS_OR_ADD`."""
_MODES: tuple[BodyMode, ...] = get_args(BodyMode)
_SIDES = {"request": "request", "answer": "response"}
_Request: Any = MESSAGES["ProcessingRequest"]
_Response: Any = MESSAGES["ProcessingResponse"]
_KINDS = (
    "request_headers", "request_body", "request_trailers", "response_headers", "response_body", "response_trailers",
)  # fmt: skip
_NONE = f"message: found none of {', '.join(_KINDS)}"


class UnknownMessage(Exception):
    """A gateway sent no message, or one of a kind that the picker does not know."""


def decode(data: bytes) -> FromGateway:
    """Return a message of a gateway.

    Raises:
        UnknownMessage: it is none.
    """
    try:
        message = _Request.FromString(data)
    except DecodeError as error:
        raise UnknownMessage(f"{_NONE}: {error}") from error
    kind = next((name for name in _KINDS if message.HasField(name)), None)
    if kind == "request_headers":
        return _request_came(message)
    if kind == "response_headers":
        return _answer_came(message)
    if kind == "request_trailers":
        return RequestTrailers()
    if kind == "response_trailers":
        return AnswerTrailers()
    if kind is None:
        raise UnknownMessage(_NONE)
    body = getattr(message, kind)
    return (RequestBody if kind == "request_body" else AnswerBody)(body.body, body.end_of_stream)


def _request_came(message: Any) -> RequestCame:  # noqa: ANN401 - a class made from numbers
    headers = _headers(message.request_headers.headers.headers)
    path, _, query = headers.pop(b":path", b"/").decode("latin-1").partition("?")
    method = headers.pop(b":method", b"").decode("latin-1")
    authority = headers.pop(b":authority", b"")
    headers = {name: value for name, value in headers.items() if not name.startswith(b":")}
    if authority:
        headers.setdefault(b"host", authority)
    modes = None
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = Modes(_mode(config.request_body_mode), _mode(config.response_body_mode))
    return RequestCame(
        method, path, query, headers, message.request_headers.end_of_stream, modes, _subset(message.metadata_context)
    )


def _answer_came(message: Any) -> AnswerCame:  # noqa: ANN401
    headers = _headers(message.response_headers.headers.headers)
    status = headers.pop(b":status", b"")
    served = _entry(message.metadata_context.filter_metadata, METADATA, SERVED)
    details = _entry(message.attributes, ATTRIBUTES, DETAILS)
    return AnswerCame(
        int(status) if status.isdigit() else 0,
        headers,
        message.response_headers.end_of_stream,
        served if isinstance(served, str) else "",
        details if isinstance(details, str) and details != _BY_WORKER else "",
    )


def _mode(number: int) -> BodyMode:
    return _MODES[number] if 0 <= number < len(_MODES) else "grpc"


def _headers(values: Iterable[Any]) -> Headers:
    """Return headers by name; values of a repeated name are joined by commas."""
    headers: Headers = {}
    for each in values:
        name, value = each.key.lower().encode(), each.raw_value or each.value.encode()
        headers[name] = headers[name] + b", " + value if name in headers else value
    return headers


def _entry(metadata: Any, outer: str, key: str) -> object:  # noqa: ANN401
    """Return what the entry holds; None: there is none."""
    if outer not in metadata or key not in metadata[outer].fields:
        return None
    value = metadata[outer].fields[key]
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return tuple(each.string_value for each in value.list_value.values)
    return value.string_value if kind == "string_value" else ()


def _subset(metadata: Any) -> tuple[str, ...] | None:  # noqa: ANN401
    """Return the offered endpoints, a list or a text with commas. What is neither offers none."""
    found = _entry(metadata.filter_metadata, SUBSET_METADATA, SUBSET)
    if isinstance(found, str):
        return tuple(each.strip() for each in found.split(",") if each.strip())
    return found if isinstance(found, tuple) else None


def encode(reply: ToGateway) -> bytes:
    """Return the bytes of a message to a gateway."""
    message = _Response()
    if isinstance(reply, Immediate):
        message.immediate_response.status.code = reply.status
        message.immediate_response.body = reply.body
        _set(message.immediate_response.headers, reply.headers, ())
        return bytes(message.SerializeToString())
    side = _SIDES[reply.side]
    if isinstance(reply, TrailersReply):
        getattr(message, f"{side}_trailers").SetInParent()
    elif isinstance(reply, BodyChunk):
        chunk = getattr(message, f"{side}_body").response.body_mutation.streamed_response
        chunk.body, chunk.end_of_stream = bytes(reply.data), reply.is_last
    else:
        _changed(message, side, reply)
    return bytes(message.SerializeToString())


def _changed(message: Any, side: str, reply: HeadersReply | BodyReply) -> None:  # noqa: ANN401
    common = getattr(message, f"{side}_headers" if isinstance(reply, HeadersReply) else f"{side}_body").response
    common.SetInParent()
    lines = reply.lines
    if reply.destination:
        lines = (*lines, (DESTINATION.encode(), reply.destination.encode()))
        message.dynamic_metadata.get_or_create_struct(METADATA)[DESTINATION] = reply.destination
    if isinstance(reply, BodyReply) and reply.body is not None:
        common.body_mutation.body = reply.body
        lines = (*lines, (b"content-length", b"%d" % len(reply.body)))
    _set(common.header_mutation, lines, reply.removed)


def _set(mutation: Any, lines: Lines, removed: tuple[str, ...]) -> None:  # noqa: ANN401
    for name, value in lines:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
    mutation.remove_headers.extend(removed)
