"""The endpoint picker's state machine, its encoding, and the endpoints that it names."""

from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from router.config import DataSection
from router.endpoint_picker.addresses import addresses_of, endpoint_of
from router.endpoint_picker.messages import (
    AnswerBody,
    AnswerCame,
    AnswerTrailers,
    BodyChunk,
    BodyReply,
    HeadersReply,
    Immediate,
    Modes,
    RequestBody,
    RequestCame,
    RequestTrailers,
    TrailersReply,
)
from router.endpoint_picker.schema import MESSAGES
from router.endpoint_picker.stream import (
    CHUNK_BYTES_MAX,
    Accepted,
    Answered,
    AnswerGoesOn,
    AnswerOver,
    Begin,
    GatewayStream,
    JudgeHead,
    OutOfOrder,
    Placed,
)
from router.endpoint_picker.wire import UnknownMessage, decode, encode
from tests.unit.router.samples import registered

BODY = b'{"model": "m"}'
PLACED = Placed("10.0.0.1:80", ((b"x-dp-rank", b"0"),), ("authorization",), BODY)
HEAD = PLACED.lines, PLACED.removed, PLACED.destination
STREAM = {b"content-type": b"text/event-stream; charset=utf-8"}


def came(modes: Modes | None, *, is_last: bool = False) -> RequestCame:
    return RequestCame("POST", "/v1/chat/completions", "", {}, is_last, modes)


def placed(modes: Modes | None) -> GatewayStream:
    """Return a stream whose request is with a worker."""
    stream = GatewayStream(1 << 20)
    stream.receive(came(modes))
    stream.receive(RequestBody(BODY, is_last=True))
    stream.receive(PLACED)
    return stream


def test_a_buffered_request_is_passed_on_with_its_body() -> None:
    stream = GatewayStream(1 << 20)
    head = came(Modes("buffered", "none"))
    assert stream.receive(head) == (HeadersReply("request"),)
    assert (stream.reads_request, stream.awaits_router) == (True, False)
    assert stream.receive(RequestBody(BODY, is_last=True)) == (Begin(head, BODY),)
    assert (stream.reads_request, stream.awaits_router) == (False, True)
    assert stream.receive(PLACED) == (BodyReply("request", *HEAD, None),)
    assert not stream.awaits_router


def test_a_changed_body_replaces_a_buffered_one() -> None:
    stream = GatewayStream(1 << 20)
    stream.receive(came(None))
    stream.receive(RequestBody(b"{}", is_last=False))
    (reply,) = stream.receive(PLACED)
    assert reply == BodyReply("request", *HEAD, BODY)


@pytest.mark.parametrize(("mode", "is_whole"), [("buffered", True), ("full_duplex", False)])
def test_a_buffered_body_comes_as_one_message(mode: str, is_whole: bool) -> None:
    stream = GatewayStream(1 << 20)
    assert not stream.body_comes_whole, "the head did not come"
    stream.receive(came(Modes(mode, "none")))  # type: ignore[arg-type]
    assert stream.body_comes_whole == is_whole


@pytest.mark.parametrize("has_trailers", [False, True])
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1, 3 * CHUNK_BYTES_MAX])
def test_nothing_of_a_full_duplex_request_is_passed_on_before_the_decision(size: int, has_trailers: bool) -> None:
    stream = GatewayStream(1 << 20)
    head, body = came(Modes("full_duplex", "full_duplex")), bytes(size)
    assert stream.receive(head) == ()
    if has_trailers:
        assert stream.receive(RequestBody(body, is_last=False)) == ()
        assert stream.receive(RequestTrailers()) == (Begin(head, body),)
    else:
        assert stream.receive(RequestBody(body[:1], is_last=False)) == ()
        assert stream.receive(RequestBody(body[1:], is_last=True)) == (Begin(head, body),)
    first, *rest = stream.receive(Placed(PLACED.destination, PLACED.lines, PLACED.removed, body))
    assert first == HeadersReply("request", *HEAD)
    chunks = [each for each in rest if isinstance(each, BodyChunk)]
    assert b"".join(bytes(each.data) for each in chunks) == body
    assert max(len(each.data) for each in chunks) <= CHUNK_BYTES_MAX
    assert [each.is_last for each in chunks] == [False] * (len(chunks) - 1) + [not has_trailers]
    assert rest[len(chunks) :] == ([TrailersReply("request")] if has_trailers else [])


def test_a_request_without_a_body_is_decided_by_its_head() -> None:
    stream, head = GatewayStream(1), came(Modes("none", "none"), is_last=True)
    assert stream.receive(head) == (Begin(head, b""),)
    assert stream.receive(PLACED) == (HeadersReply("request", *HEAD),)


@pytest.mark.parametrize("mode", ["none", "streamed", "buffered_partial", "grpc"])
def test_a_body_that_comes_in_another_mode_is_refused_by_its_name(mode: str) -> None:
    (reply,) = GatewayStream(1).receive(came(Modes(mode, "none")))  # type: ignore[arg-type]
    assert isinstance(reply, Immediate)
    assert reply.status == 500
    named = {"none": "NONE", "streamed": "STREAMED", "buffered_partial": "BUFFERED_PARTIAL", "grpc": "GRPC"}[mode]
    assert f"found {named}, allowed BUFFERED or FULL_DUPLEX_STREAMED".encode() in reply.body


def test_a_body_beyond_the_bound_is_refused_once_and_nothing_more_is_said() -> None:
    stream = GatewayStream(10)
    stream.receive(came(Modes("full_duplex", "none")))
    assert stream.receive(RequestBody(bytes(10), is_last=False)) == ()
    (reply,) = stream.receive(RequestBody(b"x", is_last=False))
    assert isinstance(reply, Immediate)
    assert (reply.status, b"body_too_large" in reply.body) == (413, True)
    assert stream.receive(RequestBody(b"x", is_last=True)) == ()
    assert (stream.closed(), stream.body_bytes) == ((), 10)


@pytest.mark.parametrize("first", [RequestBody(BODY, is_last=True), RequestTrailers()])
def test_a_request_without_a_head_is_refused(first: RequestBody | RequestTrailers) -> None:
    with pytest.raises(OutOfOrder, match="allowed request_headers"):
        GatewayStream(1 << 20).receive(first)


def test_the_routers_own_answer_takes_the_place_of_a_workers() -> None:
    own = Answered(503, ((b"retry-after", b"1"),), b"{}")
    stream = GatewayStream(1)
    stream.receive(came(None, is_last=True))
    assert stream.receive(own) == (Immediate(503, own.headers, own.body),)
    assert stream.closed() == ()
    judged = placed(Modes("buffered", "streamed"))
    judged.receive(AnswerCame(503, {}))
    assert judged.receive(own) == (Immediate(503, own.headers, own.body),)


def heard(stream: GatewayStream, *chunks: bytes, is_last: bool = True) -> Sequence[object]:
    """Return what the router hears of an answer with these chunks."""
    told = [*stream.receive(Accepted(((b"x-a", b"b"),)))[1:]]
    for at, chunk in enumerate(chunks):
        _, *more = stream.receive(AnswerBody(chunk, is_last=is_last and at == len(chunks) - 1))
        told += more
    return told


def test_a_streams_events_are_counted_behind_the_first_bytes_however_they_are_cut() -> None:
    text = b"data: 1\n\n" + b"data: 2\n\n" * 3 + b"data: [DONE]\n\n"
    for cut in range(10, len(text)):
        stream = placed(Modes("buffered", "full_duplex"))
        head = AnswerCame(200, STREAM)
        assert stream.receive(head) == (JudgeHead(head),)
        told = heard(stream, text[:9], text[9:cut], text[cut:])
        goes_on = [AnswerGoesOn(is_first=True), *[AnswerGoesOn(is_first=False)] * (2 if cut > 9 else 1)]
        assert told == [*goes_on, AnswerOver(text, 3)], cut
        assert stream.closed() == ()


def test_an_answer_that_is_no_stream_is_told_at_its_end() -> None:
    stream = placed(Modes("buffered", "streamed"))
    stream.receive(AnswerCame(200, {}))
    assert heard(stream, b'{"usage": ', b"{}}") == [AnswerOver(b'{"usage": {}}', 0)]


def test_trailers_end_an_answer() -> None:
    stream = placed(Modes("buffered", "full_duplex"))
    stream.receive(AnswerCame(200, {}))
    assert heard(stream, b"x", is_last=False) == []
    assert stream.receive(AnswerTrailers()) == (TrailersReply("answer"), AnswerOver(b"x", 0))


@pytest.mark.parametrize("modes", [None, Modes("buffered", "none")])
def test_an_answer_whose_body_is_not_shown_ends_with_its_head(modes: Modes | None) -> None:
    stream = placed(modes)
    stream.receive(AnswerCame(200, STREAM))
    assert heard(stream) == [AnswerGoesOn(is_first=True), AnswerOver(b"", 0)]
    assert stream.receive(AnswerBody(b"x", is_last=True)) == (BodyReply("answer"),)
    assert stream.closed() == ()


# ------------------------------------------------------------------------------------------- the encoding


def test_a_head_is_decoded_with_what_the_gateway_offers() -> None:
    request = MESSAGES["ProcessingRequest"]()
    pairs = (
        (":method", "POST"),
        (":path", "/v1/route?a=b"),
        (":authority", "h"),
        ("x-a", "1"),
        ("X-A", "2"),
        ("x-text", "日本"),
        ("raw", ""),
    )
    for name, value in pairs:
        request.request_headers.headers.headers.add(key=name, value=value)
    request.request_headers.headers.headers[-1].raw_value = b"\xff"
    request.protocol_config.request_body_mode, request.protocol_config.response_body_mode = 4, 99
    subset = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    subset["x-gateway-destination-endpoint-subset"] = ["1.1.1.1:1", "2.2.2.2:2"]
    headers = {b"x-a": b"1, 2", b"x-text": "日本".encode(), b"raw": b"\xff", b"host": b"h"}
    offered = ("1.1.1.1:1", "2.2.2.2:2")
    expected = RequestCame("POST", "/v1/route", "a=b", headers, False, Modes("full_duplex", "grpc"), offered)
    assert decode(request.SerializeToString()) == expected
    subset["x-gateway-destination-endpoint-subset"] = "1.1.1.1:1, 2.2.2.2:2"
    assert decode(request.SerializeToString()) == expected
    subset["x-gateway-destination-endpoint-subset"] = 7
    found = decode(request.SerializeToString())
    assert isinstance(found, RequestCame)
    assert found.subset == ()


def test_an_answers_head_says_who_answered() -> None:
    request = MESSAGES["ProcessingRequest"]()
    request.response_headers.headers.headers.add(key=":status", raw_value=b"503")
    request.metadata_context.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] = "1.1.1.1:1"
    details = request.attributes["envoy.filters.http.ext_proc"]
    for said, failure in (("via_upstream", ""), ("no_healthy_upstream", "no_healthy_upstream")):
        details["response.code_details"] = said
        found = decode(request.SerializeToString())
        assert found == AnswerCame(503, {}, served="1.1.1.1:1", failure=failure)


def test_a_message_of_no_known_kind_is_refused() -> None:
    with pytest.raises(UnknownMessage, match="found none of request_headers"):
        decode(b"")


def test_the_destination_is_in_the_header_and_in_the_metadata() -> None:
    for reply in (HeadersReply("request", *HEAD), BodyReply("request", *HEAD, b"abc")):
        response = MESSAGES["ProcessingResponse"].FromString(encode(reply))
        common = (response.request_headers if isinstance(reply, HeadersReply) else response.request_body).response
        options = common.header_mutation.set_headers
        found = {each.header.key: each.header.raw_value for each in options}
        assert found["x-gateway-destination-endpoint"] == b"10.0.0.1:80"
        assert response.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "10.0.0.1:80"
        assert {each.append_action for each in options} == {2}
        assert [*common.header_mutation.remove_headers] == ["authorization"]
        assert found.get("content-length") == (None if isinstance(reply, HeadersReply) else b"3")


# ------------------------------------------------------------------------------------------- endpoints, settings


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.1:9000", "10.0.0.1:9000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://10.0.0.1/prefix", "10.0.0.1:443"),
        ("http://[2001:db8::1]:9000", "[2001:db8::1]:9000"),
        ("http://worker.default.svc:9000", None),
        ("http://localhost:9000", None),
    ],
)
def test_an_endpoint_is_an_address_and_a_port(url: str, endpoint: str | None) -> None:
    assert endpoint_of(url) == endpoint


def test_workers_without_an_address_are_not_eligible() -> None:
    workers = [registered("a", base_url="http://10.0.0.1:1"), registered("b", base_url="http://10.0.0.2:1")]
    assert addresses_of(workers).allowed(None) is None
    some = addresses_of([*workers, registered("c", base_url="http://name:1")])
    assert some.allowed(None) == frozenset({"a", "b"})
    assert some.allowed(("10.0.0.2:1", "10.9.9.9:1")) == frozenset({"b"})
    assert some.allowed(()) == frozenset()


@pytest.mark.parametrize("name", ["tls_certificate", "tls_key"])
def test_a_certificate_without_its_key_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"found {name}, allowed tls_certificate with tls_key"):
        DataSection.model_validate({name: "file.pem"})
