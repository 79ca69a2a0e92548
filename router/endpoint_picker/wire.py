"""The protobuf messages of Envoy's external processing and of gRPC's health check, as far as they are used.

They are built from the field numbers below when this module is imported; fields that are not named are skipped. A
reply has the picked endpoints twice, as header `DESTINATION` and as dynamic metadata, with the same value.
Sources: Envoy 1.40, `api/envoy/service/ext_proc/v3/external_processor.proto`, `api/envoy/config/core/v3/base.proto`,
`api/envoy/type/v3/http_status.proto`; gRPC, `doc/health-checking.md`; the endpoint picker protocol 1.0.0 of the Gateway
API inference extension (proposal 004); docs/SOURCES.md, D11.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec
from google.protobuf import descriptor_pool, message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import DecodeError

from router.http.exchange import HeaderLines
from router.http.heads import Headers

BodyMode = Literal["none", "streamed", "buffered", "buffered_partial", "full_duplex_streamed", "grpc"]
"""How the gateway sends a body. Source: Envoy's API, `ProcessingMode.BodySendMode`."""
Side = Literal["request", "response"]
_MODES: tuple[BodyMode, ...] = get_args(BodyMode)
PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"
_PACKAGE = "kv_router.gateway"
_STRUCT = ".google.protobuf.Struct"

# Fields by name: number and type, which is a scalar or a message; `*`: repeated; `{}`: a map from strings to Structs.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "HeaderValue*")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int")},
    "HeaderMutation": {"set_headers": (1, "HeaderValueOption*"), "remove_headers": (2, "string*")},
    "Metadata": {"filter_metadata": (1, "{}")},
    "HttpStatus": {"code": (1, "int")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int"), "response_body_mode": (2, "int")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, "{}"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"body": (1, "bytes"), "streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "ImmediateResponse": {"status": (1, "HttpStatus"), "headers": (2, "HeaderMutation"), "body": (3, "bytes")},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int")},
}
_SCALARS = {
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int": FieldDescriptorProto.TYPE_INT32,
}
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


class MessageRefused(Exception):
    """A gateway sent bytes that are no message, or a message of a kind that is unknown, or may not come now."""


class RequestHead(msgspec.Struct, frozen=True):
    """The head of a client's request."""

    method: str
    path: str
    query: str
    headers: Headers
    is_last: bool = False
    """The request has no body."""
    modes: tuple[BodyMode, BodyMode] | None = None
    """How the bodies of request and answer are sent; None: the gateway is too old to state it."""
    subset: tuple[str, ...] | None = None
    """The endpoints from which one is to be picked; None: any."""


class AnswerHead(msgspec.Struct, frozen=True):
    """The head of the answer, which a worker or the gateway itself gave."""

    status: int
    headers: Headers
    is_last: bool = False
    served: str = ""
    """The endpoint that answered; empty: the gateway does not say so."""
    failure: str = ""
    """Why the gateway itself answered, in its words; empty: a worker answered, or the gateway does not say so."""


def _add_field(message: DescriptorProto, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if kind == "{}":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, _STRUCT)
        kind = f".{_PACKAGE}.{message.name}.{entry.name}*"
    if kind.endswith("*"):
        field.label, kind = FieldDescriptorProto.LABEL_REPEATED, kind[:-1]
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = kind if kind.startswith(".") else f".{_PACKAGE}.{kind}"


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="kv_router/gateway.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


MESSAGES = _classes()
"""The message classes by name."""
_Request: Any = MESSAGES["ProcessingRequest"]
_Response: Any = MESSAGES["ProcessingResponse"]
_KINDS = (
    "request_headers", "request_body", "request_trailers", "response_headers", "response_body", "response_trailers",
)  # fmt: skip
_NONE = f"message: found none of {', '.join(_KINDS)}"


def decode(data: bytes) -> tuple[str, Any]:
    """Return the kind of a gateway's message, one of `_KINDS`, and the message.

    Raises:
        MessageRefused: the bytes are no message, or one of another kind.
    """
    try:
        message = _Request.FromString(data)
    except DecodeError as error:
        raise MessageRefused(f"{_NONE}: {error}") from error
    kind = next((name for name in _KINDS if message.HasField(name)), None)
    if kind is None:
        raise MessageRefused(_NONE)
    return kind, message


def request_head(message: Any) -> RequestHead:  # noqa: ANN401 - its class is one of `MESSAGES`
    """Return the head of a client's request."""
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
        modes = _mode(config.request_body_mode), _mode(config.response_body_mode)
    return RequestHead(
        method, path, query, headers, message.request_headers.end_of_stream, modes, _subset(message.metadata_context)
    )


def answer_head(message: Any) -> AnswerHead:  # noqa: ANN401
    """Return the head of an answer."""
    headers = _headers(message.response_headers.headers.headers)
    status = headers.pop(b":status", b"")
    served = _entry(message.metadata_context.filter_metadata, METADATA, SERVED)
    details = _entry(message.attributes, ATTRIBUTES, DETAILS)
    return AnswerHead(
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
    """Return the entry's text, or a list's texts; () for any other value, None without an entry."""
    if outer not in metadata or key not in metadata[outer].fields:
        return None
    value = metadata[outer].fields[key]
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return tuple(each.string_value for each in value.list_value.values)
    return value.string_value if kind == "string_value" else ()


def _subset(metadata: Any) -> tuple[str, ...] | None:  # noqa: ANN401
    """Return the offered endpoints, a list or a text with commas. Another value offers none; None: any is offered."""
    found = _entry(metadata.filter_metadata, SUBSET_METADATA, SUBSET)
    if isinstance(found, str):
        return tuple(each.strip() for each in found.split(",") if each.strip())
    return found if isinstance(found, tuple) else None


def head_reply(side: Side, lines: HeaderLines = (), removed: tuple[str, ...] = (), destination: str = "") -> Any:  # noqa: ANN401
    """Return a reply that passes a head on; `lines` replace the lines of the same names.

    `destination`: the picked endpoints, `ip:port` between commas; empty: nothing was picked.
    """
    return _reply(f"{side}_headers", lines, removed, destination)


def body_reply(
    side: Side, lines: HeaderLines = (), removed: tuple[str, ...] = (), destination: str = "", body: bytes | None = None
) -> Any:  # noqa: ANN401
    """Return a reply that passes on a body, or a part; `body` replaces it. `lines` change a buffered body's head."""
    if body is None:
        return _reply(f"{side}_body", lines, removed, destination)
    lines = (*lines, (b"content-length", b"%d" % len(body)))
    return _reply(f"{side}_body", lines, removed, destination, body_mutation={"body": body})


def chunk_reply(side: Side, data: bytes, *, is_last: bool) -> Any:  # noqa: ANN401
    """Return a reply that passes on a part of a body of mode full_duplex_streamed."""
    message = _Response()  # made for each event of a stream: keyword arguments would take four times as long
    chunk = getattr(message, f"{side}_body").response.body_mutation.streamed_response
    chunk.body, chunk.end_of_stream = data, is_last
    return message


def trailers_reply(side: Side) -> Any:  # noqa: ANN401
    """Return a reply that passes trailers on."""
    return _Response(**{f"{side}_trailers": {}})


def immediate_reply(status: int, headers: HeaderLines, body: bytes) -> Any:  # noqa: ANN401
    """Return a reply by which the gateway gives the client this answer, and sends the request nowhere."""
    return _Response(immediate_response={"status": {"code": status}, "headers": _set(headers), "body": body})


def _reply(kind: str, lines: HeaderLines, removed: tuple[str, ...], destination: str, **changes: object) -> Any:  # noqa: ANN401
    if destination:
        lines = (*lines, (DESTINATION.encode(), destination.encode()))
    mutation = {**_set(lines), "remove_headers": removed}
    message = _Response(**{kind: {"response": {"header_mutation": mutation, **changes}}})
    if destination:
        message.dynamic_metadata.get_or_create_struct(METADATA)[DESTINATION] = destination
    return message


def _set(lines: HeaderLines) -> dict[str, Any]:
    headers = ({"key": name.decode("latin-1"), "raw_value": value} for name, value in lines)
    return {"set_headers": [{"header": each, "append_action": _OVERWRITE} for each in headers]}
