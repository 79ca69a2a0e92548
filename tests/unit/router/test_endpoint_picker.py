"""The endpoint picker: one stream of a gateway, its messages, and the endpoints that it names."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from router.endpoint_picker import wire
from router.endpoint_picker.addresses import FleetAddresses, addresses_of, endpoint_of
from router.endpoint_picker.stream import CHUNK_BYTES_MAX, GatewayStream
from router.http.exchange import CallLimits, Exchange, OutboundCall
from router.http.limits import HttpLimits
from router.metrics import PickerStatistics
from tests.unit.router.samples import registered

BODY = b'{"model": "m"}'
HEAD = ((b"x-dp-rank", b"0"),), ("authorization", "x-kv-continuable"), "10.0.0.1:80"
STREAM = "text/event-stream; charset=utf-8"
MODES = ("none", "streamed", "buffered", "buffered_partial", "full_duplex_streamed", "grpc")


class Heard:
    """A call's handler that notes what it hears; `lines` are added to an answer's head."""

    def __init__(self, *, lines: bytes | None = b"x-a: b\r\n") -> None:
        self.told: list[Any] = []
        self.lines = lines

    def on_head(self, status: int, _headers: object, _is_stream: bool) -> bytes | None:
        self.told.append(status)
        return self.lines

    def on_dropped(self) -> None:
        self.told.append("dropped")

    def on_first_byte(self) -> None:
        self.told.append("first")

    def on_bytes(self) -> None:
        self.told.append("more")

    def on_end(self, tail: bytes, later_events: int) -> None:
        self.told.append((tail, later_events))


class Dialogue:
    """A stream with a router that does `serve` with each complete request; by default it chooses a worker."""

    def __init__(self, serve: Callable[[Exchange], None] | None = None, *, bytes_max: int = 1 << 20) -> None:
        self.heard = Heard()
        self.begun: list[Exchange] = []
        self.statistics = PickerStatistics()
        self._serve = serve or self.place
        self.picker = SimpleNamespace(
            limits=HttpLimits(body_bytes_max=bytes_max, body_s=5.0),
            addresses=lambda: FleetAddresses({}, is_complete=True),
            settings=SimpleNamespace(fallbacks=0),
            serving=SimpleNamespace(serve=self._begin),
            account=lambda _more: True,
            statistics=self.statistics,
        )
        self.stream = GatewayStream(self.picker)  # type: ignore[arg-type]

    def _begin(self, exchange: Exchange, gateway: object) -> None:  # noqa: ARG002 - as of `Serving`
        self.begun.append(exchange)
        self._serve(exchange)

    def place(self, exchange: Exchange, body: bytes | None = None) -> None:
        sent = bytes(exchange.body) if body is None else body
        limits = CallLimits(1.0, 1.0, 1.0)
        exchange.forward(OutboundCall("http://10.0.0.1:80", "", b"x-dp-rank: 0\r\n", sent, limits), self.heard)  # type: ignore[arg-type]

    async def say(self, **fields: Any) -> list[Any]:
        """Return the replies to a message with these fields."""
        return await self.stream.replies(*wire.decode(wire.MESSAGES["ProcessingRequest"](**fields).SerializeToString()))

    async def request(self, modes: tuple[str, str] | None, *, is_last: bool = False) -> list[Any]:
        pairs = ((":method", b"POST"), (":path", b"/v1/chat/completions"))
        headers = {"headers": [{"key": name, "raw_value": value} for name, value in pairs]}
        request, answer = map(MODES.index, modes or ("none", "none"))
        config = {"protocol_config": {"request_body_mode": request, "response_body_mode": answer}} if modes else {}
        return await self.say(request_headers={"headers": headers, "end_of_stream": is_last}, **config)

    async def body(self, data: bytes, *, is_last: bool) -> list[Any]:
        return await self.say(request_body={"body": data, "end_of_stream": is_last})

    async def answer(self, status: int = 200, content_type: str = "") -> list[Any]:
        pairs = ((":status", str(status)), ("content-type", content_type))
        headers = {"headers": [{"key": name, "raw_value": value.encode()} for name, value in pairs]}
        return await self.say(response_headers={"headers": headers})

    async def chunks(self, *chunks: bytes, is_last: bool = True) -> list[Any]:
        """Return what the router hears of an answer's body in these chunks."""
        before = len(self.heard.told)
        for at, chunk in enumerate(chunks):
            await self.say(response_body={"body": chunk, "end_of_stream": is_last and at == len(chunks) - 1})
        return self.heard.told[before:]


async def placed(modes: tuple[str, str] | None) -> Dialogue:
    """Return a dialogue whose request is with a worker."""
    found = Dialogue()
    await found.request(modes)
    await found.body(BODY, is_last=True)
    return found


async def test_a_buffered_request_is_passed_on_with_its_body() -> None:
    found = Dialogue()
    assert await found.request(("buffered", "none")) == [wire.head_reply("request")]
    assert await found.body(BODY, is_last=True) == [wire.body_reply("request", *HEAD)]
    assert [(each.method, each.path, each.body) for each in found.begun] == [("POST", "/v1/chat/completions", BODY)]
    assert (found.statistics.outcomes, found.stream.pause_max_s()) == ({"placed": 1}, None)


async def test_a_changed_body_replaces_a_buffered_one() -> None:
    found = Dialogue(lambda exchange: found.place(exchange, BODY))
    await found.request(None)
    assert await found.body(b"{}", is_last=False) == [wire.body_reply("request", *HEAD, BODY)]


async def test_a_buffered_body_comes_as_one_message() -> None:
    for mode, is_whole in (("buffered", True), ("full_duplex_streamed", False)):
        found = Dialogue()
        assert (found.stream.pause_max_s() or 0.0) <= 5.0, "the head did not come"
        await found.request((mode, "none"))
        assert ((found.stream.pause_max_s() or 0.0) > 5.0) == is_whole, mode


@pytest.mark.parametrize("has_trailers", [False, True])
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1, 3 * CHUNK_BYTES_MAX])
async def test_nothing_of_a_full_duplex_request_is_passed_on_before_the_decision(size: int, has_trailers: bool) -> None:
    found, body = Dialogue(), bytes(size)
    assert await found.request(("full_duplex_streamed", "full_duplex_streamed")) == []
    assert await found.body(body[:1], is_last=False) == []
    replies = await found.body(body[1:], is_last=not has_trailers)
    if has_trailers:
        assert replies == []
        replies = await found.say(request_trailers={})
    first, *rest = replies
    assert first == wire.head_reply("request", *HEAD)
    chunks = [each.request_body.response.body_mutation.streamed_response for each in rest[: len(rest) - has_trailers]]
    assert b"".join(each.body for each in chunks) == body
    assert max(len(each.body) for each in chunks) <= CHUNK_BYTES_MAX
    assert [each.end_of_stream for each in chunks] == [False] * (len(chunks) - 1) + [not has_trailers]
    assert rest[len(chunks) :] == [wire.trailers_reply("request")] * has_trailers


async def test_a_request_without_a_body_is_decided_by_its_head() -> None:
    found = Dialogue(bytes_max=1)
    assert await found.request(("none", "none"), is_last=True) == [wire.head_reply("request", *HEAD)]


@pytest.mark.parametrize("mode", ["none", "streamed", "buffered_partial", "grpc"])
async def test_a_body_that_comes_in_another_mode_is_refused_by_its_name(mode: str) -> None:
    found = Dialogue()
    (reply,) = await found.request((mode, "none"))
    assert reply.immediate_response.status.code == 500
    assert f"found {mode.upper()}, allowed BUFFERED or FULL".encode() in reply.immediate_response.body
    assert (found.statistics.outcomes, found.stream.is_answered) == ({"refused": 1}, True)


async def test_a_body_beyond_the_bound_is_refused_once_and_nothing_more_is_said() -> None:
    found = Dialogue(bytes_max=10)
    await found.request(("full_duplex_streamed", "none"))
    assert await found.body(bytes(10), is_last=False) == []
    (reply,) = await found.body(b"x", is_last=False)
    answer = reply.immediate_response
    assert (answer.status.code, b"body_too_large" in answer.body) == (413, True)
    assert await found.body(b"x", is_last=True) == []
    found.stream.close()
    assert (found.begun, found.statistics.outcomes) == ([], {"refused": 1})


@pytest.mark.parametrize("first", [{"request_body": {"body": BODY, "end_of_stream": True}}, {"request_trailers": {}}])
async def test_a_request_without_a_head_is_refused(first: dict[str, Any]) -> None:
    with pytest.raises(wire.MessageRefused, match="allowed request_headers"):
        await Dialogue().say(**first)


async def test_the_routers_own_answer_takes_the_place_of_a_workers() -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.answer(503, b"{}", headers=((b"retry-after", b"1"),))

    own = wire.immediate_reply(503, ((b"content-type", b"application/json"), (b"retry-after", b"1")), b"{}")
    found = Dialogue(refuse)
    assert await found.request(None, is_last=True) == [own]
    assert (found.statistics.outcomes, found.stream.is_answered) == ({"refused": 1}, True)
    judged = await placed(("buffered", "streamed"))
    judged.heard.lines = None
    judged.heard.on_dropped = lambda: refuse(judged.begun[0])  # type: ignore[method-assign]
    assert await judged.answer(503) == [own]


async def test_a_stream_that_is_closed_once_its_answer_is_over_gives_no_request_up() -> None:
    found, gone = await placed(("buffered", "streamed")), list[bool]()
    found.begun[0].when_gone = lambda _: gone.append(True)
    await found.answer()
    await found.chunks(b"{}")
    found.stream.close()
    assert not gone


async def test_a_streams_events_are_counted_behind_the_first_bytes_however_they_are_cut() -> None:
    text = b"data: 1\n\n" + b"data: 2\n\n" * 3 + b"data: [DONE]\n\n"
    for cut in range(10, len(text)):
        found = await placed(("buffered", "full_duplex_streamed"))
        assert await found.answer(200, STREAM) == [wire.head_reply("response", ((b"x-a", b"b"),))]
        assert await found.chunks(text[:9], text[9:cut], text[cut:]) == ["first", "more", "more", (text, 3)], cut


async def test_an_answer_that_is_no_stream_is_told_at_its_end_or_at_its_trailers() -> None:
    found = await placed(("buffered", "streamed"))
    await found.answer()
    assert await found.chunks(b'{"usage": ', b"{}}") == [(b'{"usage": {}}', 0)]
    found = await placed(("buffered", "full_duplex_streamed"))
    await found.answer()
    assert await found.chunks(b"x", is_last=False) == []
    assert await found.say(response_trailers={}) == [wire.trailers_reply("response")]
    assert found.heard.told == [200, (b"x", 0)]


@pytest.mark.parametrize("modes", [None, ("buffered", "none")])
async def test_an_answer_whose_body_is_not_shown_ends_with_its_head(modes: tuple[str, str] | None) -> None:
    found = await placed(modes)
    await found.answer(200, STREAM)
    assert found.heard.told == [200, "first", (b"", 0)]
    assert await found.say(response_body={"body": b"x", "end_of_stream": True}) == [wire.body_reply("response")]
    assert found.heard.told == [200, "first", (b"", 0)]


# ------------------------------------------------------------------------------------------- the encoding


def test_a_head_is_decoded_with_what_the_gateway_offers() -> None:
    request = wire.MESSAGES["ProcessingRequest"]()
    pairs = {":method": "POST", ":path": "/v1/route?a=b", ":authority": "h", "x-a": "1", "X-A": "2", "x-text": "日本"}
    for name, value in (pairs | {"raw": ""}).items():
        request.request_headers.headers.headers.add(key=name, value=value)
    request.request_headers.headers.headers[-1].raw_value = b"\xff"
    request.protocol_config.request_body_mode, request.protocol_config.response_body_mode = 4, 99
    subset = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    subset["x-gateway-destination-endpoint-subset"] = ["1.1.1.1:1", "2.2.2.2:2"]
    headers = {b"x-a": b"1, 2", b"x-text": "日本".encode(), b"raw": b"\xff", b"host": b"h"}
    offered = ("1.1.1.1:1", "2.2.2.2:2")
    expected = wire.RequestHead("POST", "/v1/route", "a=b", headers, False, ("full_duplex_streamed", "grpc"), offered)
    assert wire.request_head(request) == expected
    subset["x-gateway-destination-endpoint-subset"] = "1.1.1.1:1, 2.2.2.2:2"
    assert wire.request_head(request) == expected
    subset["x-gateway-destination-endpoint-subset"] = 7
    assert wire.request_head(request).subset == ()


def test_an_answers_head_says_who_answered() -> None:
    request = wire.MESSAGES["ProcessingRequest"]()
    request.response_headers.headers.headers.add(key=":status", raw_value=b"503")
    request.metadata_context.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] = "1.1.1.1:1"
    details = request.attributes["envoy.filters.http.ext_proc"]
    for said, failure in (("via_upstream", ""), ("no_healthy_upstream", "no_healthy_upstream")):
        details["response.code_details"] = said
        assert wire.answer_head(request) == wire.AnswerHead(503, {}, served="1.1.1.1:1", failure=failure)


def test_a_message_of_no_known_kind_is_refused() -> None:
    with pytest.raises(wire.MessageRefused, match="found none of request_headers"):
        wire.decode(b"")


def test_the_destination_is_in_the_header_and_in_the_metadata() -> None:
    for response in (wire.head_reply("request", *HEAD), wire.body_reply("request", *HEAD, b"abc")):
        is_head = response.HasField("request_headers")
        common = (response.request_headers if is_head else response.request_body).response
        options = common.header_mutation.set_headers
        found = {each.header.key: each.header.raw_value for each in options}
        assert found["x-gateway-destination-endpoint"] == b"10.0.0.1:80"
        assert response.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "10.0.0.1:80"
        assert {each.append_action for each in options} == {2}
        assert tuple(common.header_mutation.remove_headers) == HEAD[1]
        assert found.get("content-length") == (None if is_head else b"3")


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
