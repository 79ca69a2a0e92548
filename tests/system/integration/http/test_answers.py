"""Workers of the HTTP plane over real sockets: what the client gets of their answers, also when they fail."""

import asyncio
import json
import socket
import ssl

import pytest
from structlog.testing import capture_logs

from router.http.exchange import ASIDE_BYTES_MAX, BUFFERED_BYTES_MAX, BufferedResponse, CallLimits, OutboundCall
from router.http.exchange import Exchange as ClientExchange
from tests.system.integration.http.serving import (
    LIMITS,
    Recorded,
    answered,
    dialing,
    in_two,
    post,
    running,
    until,
    with_worker,
)
from tests.unit.router.upstream import (
    DONE,
    STREAM_HEAD,
    WHOLE_HEAD,
    Exchange,
    Script,
    answers,
    chunked,
    completion,
    event,
    says,
    says_and_waits,
    streams,
)

GOOD = answers(200, completion())
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
LONG = b"x" * (BUFFERED_BYTES_MAX + 1000)
NEVER_S = 3600.0
"""No test waits until an idle connection is closed for its age."""


async def test_an_answer_comes_as_the_worker_gave_it_with_the_services_headers() -> None:
    async with with_worker(answers(200, completion(), x_worker="w0", x_decision_id="false")) as (http, worker):
        answer = await http.ask(post(b'{"a":1}'))
        (received,) = worker.received
        assert received.headers == {
            "host": worker.base_url.removeprefix("http://"),
            "accept-encoding": "identity",
            "content-length": "7",
            "content-type": "application/json",
        }
    assert (answer.status, answer.body) == (200, completion())
    assert (answer.headers["x-worker"], answer.headers["x-decision-id"]) == ("w0", "d1")
    assert (received.path, received.body) == ("/v1/completions", b'{"a":1}')
    assert http.watcher.heard == ["head 200", "end"]
    assert http.watcher.tail == completion()


async def test_an_answer_in_one_piece_without_a_body_has_no_length() -> None:
    async with with_worker(says(b"HTTP/1.1 204 No Content\r\nx-worker: w0\r\n\r\n")) as (http, _):
        reader, _ = await http.dial(post())
        answer = await answered(reader, bodyless=True)
    assert (answer.status, answer.headers["x-worker"]) == (204, "w0")
    assert "content-length" not in answer.headers


async def test_of_an_answer_in_one_piece_the_handler_gets_the_end() -> None:
    body = b"a" + b"x" * 4999
    async with with_worker(says(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n" + body)) as (http, _):
        answer = await http.ask(post())
    assert answer.body == body
    assert http.watcher.tail == b"x" * 4096


async def test_a_stream_is_passed_on_event_by_event_as_it_comes() -> None:
    more = asyncio.Event()

    rest = chunked(b" an event\n\n") + b"0\r\n\r\n"
    async with with_worker(in_two(more, STREAM_HEAD + chunked(event("first") + b"data: half"), rest)) as (http, _):
        reader, _ = await http.dial(post())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert await reader.readuntil(b"\n\n\r\n") == chunked(event("first"))
        more.set()
        assert await reader.readuntil(b"0\r\n\r\n") == chunked(b"data: half an event\n\n") + b"0\r\n\r\n"


ENDS = {"lf": b"\n\n", "crlf": b"\r\n\r\n", "cr": b"\r\r", "none": b""}


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("piece", [1, 3, 7, 50, 10_000])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_a_stream_in_any_pieces_and_framing_comes_whole(framing: str, piece: int, end: bytes) -> None:
    whole = b"".join([event("a"), event("b"), USAGE, DONE]).replace(b"\n\n", end)
    pieces = [whole[at : at + piece] for at in range(0, len(whole), piece)]

    async def script(exchange: Exchange) -> None:
        if framing == "chunked":
            await exchange.head(transfer_encoding="chunked")
        elif framing == "length":
            await exchange.head(content_length=str(len(whole)))
        else:
            await exchange.head()
        for each in pieces:
            await (exchange.chunk(each) if framing == "chunked" else exchange.send(each))
            await asyncio.sleep(0)
        if framing == "chunked":
            await exchange.chunk(b"")
        else:
            await exchange.cut()

    async with with_worker(script) as (http, _):
        reader, _ = await http.dial(post() + post())
        first, second = await answered(reader), await answered(reader)
    assert first.body == second.body == whole
    assert {watcher.tail for watcher in http.watchers} == {whole}


@pytest.mark.parametrize("size", [0, 1, 5000, len(LONG)])
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("http_1_1", [True, False])
async def test_an_answer_of_any_length_and_framing_comes_whole(framing: str, size: int, http_1_1: bool) -> None:
    body = LONG[:size]

    async def script(exchange: Exchange) -> None:
        if framing == "chunked":
            await exchange.head(content_type="application/json", transfer_encoding="chunked")
            for at in range(0, size, 3000):
                await exchange.chunk(body[at : at + 3000])
            await exchange.chunk(b"")
        elif framing == "length":
            await exchange.answer(200, body)
        else:
            await exchange.head(content_type="application/json")
            await exchange.send(body)
            await exchange.cut()

    async with with_worker(script) as (http, _):
        request = post() if http_1_1 else post().replace(b"HTTP/1.1", b"HTTP/1.0")
        reader, _ = await http.dial(request)
        answer = await answered(reader)
        if not http_1_1:
            assert await reader.read() == b""
            assert "transfer-encoding" not in answer.headers
    assert answer.body == body
    assert http.watcher.tail == body[-4096:]
    assert http.watcher.heard[-1] == "end"


async def test_empty_lines_of_an_answer_that_is_no_stream_are_no_events() -> None:
    parts = [b"\n\n" * BUFFERED_BYTES_MAX, b"\n\n" * 1000]

    async def script(exchange: Exchange) -> None:
        await exchange.head(content_type="application/octet-stream", transfer_encoding="chunked")
        for part in parts:
            await exchange.chunk(part)
        await exchange.chunk(b"")

    async with with_worker(script) as (http, _):
        assert (await http.ask(post())).body == b"".join(parts)
        assert (http.watcher.heard[-1], http.watcher.later_events) == ("end", 0)


async def test_headers_of_the_workers_connection_are_not_passed_on() -> None:
    hop = {"connection": "x-mine", "x_mine": "1", "keep_alive": "timeout=5", "te": "trailers", "upgrade": "h2c"}
    async with with_worker(answers(200, b"{}", **hop, x_other="2")) as (http, _):
        answer = await http.ask(post())
    assert set(answer.headers) == {"content-type", "x-other", "x-decision-id", "content-length"}


async def test_interim_answers_are_not_passed_on() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * 1500 + b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"

    async def script(exchange: Exchange) -> None:
        await exchange.send(interim[:30])
        await exchange.send(interim[30:])
        await exchange.answer(200, completion())

    async with with_worker(script) as (http, _):
        assert (await http.ask(post())).body == completion()
    assert http.watcher.heard[0] == "head 200"


# ---------------------------------------------------------------- the worker fails

NO_SWITCH = "status: found 101, allowed none that changes the protocol"
SHORT = "the connection closed before the answer's end"
FAILING: dict[str, tuple[Script, list[str]]] = {
    "nothing": (says(b""), [f"failed first_byte: {SHORT}"]),
    "half a head": (says(b"HTTP/1.1 200 OK\r\ncontent-"), [f"failed first_byte: {SHORT}"]),
    "no http": (
        says(b"SSH-2.0-OpenSSH\r\n\r\n"),
        ["failed first_byte: status line: found 'SSH-2.0-OpenSSH', allowed HTTP/1.1 and a status of 100 to 599"],
    ),
    "a long head": (
        says(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 9000),
        ["failed first_byte: head: found more than 32768 bytes, allowed 32768"],
    ),
    "another protocol": (says(b"HTTP/1.1 101 Switching\r\n\r\n"), [f"failed first_byte: {NO_SWITCH}"]),
    "a stream's head": (says(STREAM_HEAD), ["head 200", f"failed first_byte: {SHORT}"]),
    "an empty stream": (streams(), ["head 200", "failed first_byte: no bytes"]),
    "an answer's head": (says(WHOLE_HEAD), ["head 200", f"failed first_byte: {SHORT}"]),
    "half an answer": (says(WHOLE_HEAD + b"{"), ["head 200", "first byte", f"failed body: {SHORT}"]),
    "half an event": (says(STREAM_HEAD + chunked(b"data: ")), ["head 200", "first byte", f"failed body: {SHORT}"]),
    "no chunks": (
        says(STREAM_HEAD + b"data: x\n\n"),
        ["head 200", r"failed body: chunk: found size 'data: x\n', allowed hexadecimal digits"],
    ),
}


@pytest.mark.parametrize(("script", "heard"), FAILING.values(), ids=FAILING)
async def test_of_a_worker_that_fails_before_anything_was_passed_on_the_client_sees_nothing(
    script: Script, heard: list[str]
) -> None:
    async with with_worker(script) as (http, worker):
        http.tries = 1
        answer = await http.ask(post())
        assert len(worker.received) == 2
    assert (answer.status, answer.body) == (502, b"{}")
    assert [watcher.heard for watcher in http.watchers] == [heard, heard]


async def test_a_worker_that_cannot_be_reached_fails_in_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    async with running() as http:
        for http.worker in (address, "http://no-such-host.invalid:80", "ftp://127.0.0.1:1", "http://"):
            assert (await http.ask(post())).status == 502
    assert [watcher.heard[0].split(":")[0] for watcher in http.watchers] == ["failed connect"] * 4


CUT: dict[str, bytes] = {
    "between events": b"",
    "within a chunk": b"40\r\ndata: second",
    "within a chunk's size": b"4",
    "within an event": chunked(b"data: sec"),
    "within an event and a chunk": chunked(b"data: ") + b"5\r\nse",
}


@pytest.mark.parametrize("rest", CUT.values(), ids=CUT)
async def test_a_stream_that_is_cut_ends_with_an_error_event_and_the_connection_goes_on(rest: bytes) -> None:
    async with with_worker(says(STREAM_HEAD + chunked(event("first")) + rest)) as (http, _):
        reader, writer = await http.dial(post())
        answer = await answered(reader)
        writer.write(post())
        assert (await answered(reader)).body == answer.body
    first, error, done, nothing = answer.body.split(b"\n\n")
    assert (first, done, nothing) == (event("first").strip(), b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: ")) == {
        "error": {
            "message": f"the worker failed in its answer: body: {SHORT}",
            "type": "server_error",
            "param": None,
            "code": "upstream_failed",
        }
    }
    assert http.watchers[0].heard[-1] == f"failed body begun: {SHORT}"


async def test_a_long_answer_that_is_cut_is_cut_for_the_client_too() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (len(LONG) + 1)
    async with with_worker(says(head + LONG)) as (http, _):
        reader, _ = await http.dial(post())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answered(reader)
    assert http.watcher.heard[-1] == f"failed body begun: {SHORT}"


async def test_an_event_without_end_is_passed_on_and_a_cut_of_it_is_told() -> None:
    async with with_worker(says(STREAM_HEAD + chunked(b"data: " + LONG))) as (http, _):
        answer = await http.ask(post())
    begin, error, done, nothing = answer.body.split(b"\n\n")
    assert (begin, done, nothing) == (b"data: " + LONG, b"data: [DONE]", b"")
    assert b"upstream_failed" in error


TIMES: dict[str, tuple[bytes, CallLimits, str]] = {
    "no head": (b"", LIMITS._replace(first_byte_s=0.05), "failed first_byte: TimeoutError: no byte within 0.05 s"),
    "no body": (
        STREAM_HEAD,
        LIMITS._replace(first_byte_s=0.05),
        "failed first_byte: TimeoutError: no byte within 0.05 s",
    ),
    "a pause": (
        STREAM_HEAD + chunked(event("a")),
        LIMITS._replace(between_bytes_s=0.05),
        "failed body begun: TimeoutError: no byte for 0.05 s",
    ),
    "in all": (
        STREAM_HEAD + chunked(event("a")),
        LIMITS._replace(total_s=0.05),
        "failed body begun: TimeoutError: not whole within 0.05 s",
    ),
}


@pytest.mark.parametrize(("sent", "limits", "heard"), TIMES.values(), ids=TIMES)
async def test_a_worker_that_is_too_slow_has_failed(sent: bytes, limits: CallLimits, heard: str) -> None:
    async with with_worker(says_and_waits(sent)) as (http, worker):
        http.call_limits = limits
        await http.ask(post())
        await worker.gone.wait()
    assert http.watcher.heard[-1] == heard


# ---------------------------------------------------------------- connections to workers


async def test_a_connection_serves_many_requests() -> None:
    async with with_worker(GOOD) as (http, _):
        reader, writer = await http.dial()
        for _ in range(5):
            writer.write(post())
            assert (await answered(reader)).status == 200
        upstreams = http.plane.upstreams
        assert (len(upstreams.connections), upstreams.idle, dialing(http.plane)) == (1, 1, 0)
        assert upstreams.opened == 1


@pytest.mark.parametrize("reset", [True, False])
async def test_a_request_over_a_connection_that_the_worker_had_closed_is_sent_again(reset: bool) -> None:
    served = 0

    async def script(exchange: Exchange) -> None:
        nonlocal served
        served += 1
        if served == 2:  # it comes over the first connection, which ends instead of answering
            exchange.writer.transport.abort() if reset else exchange.writer.close()
            exchange.open = False
        else:
            await exchange.answer(200, completion())

    async with with_worker(script) as (http, _):
        reader, writer = await http.dial()
        for _ in range(2):
            writer.write(post())
            assert (await answered(reader)).status == 200
    assert (http.plane.upstreams.opened, served) == (2, 3)
    assert [watcher.heard for watcher in http.watchers] == [["head 200", "end"]] * 2


UNUSABLE: dict[str, bytes] = {
    "it says so": b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "more than its length": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{}",
    "more than its chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nHTTP",
}


@pytest.mark.parametrize("answer", UNUSABLE.values(), ids=UNUSABLE)
async def test_a_connection_that_cannot_go_on_is_closed(answer: bytes) -> None:
    async with with_worker(says_and_waits(answer), worker_idle_s=NEVER_S) as (http, worker):
        assert (await http.ask(post())).status == 200
        await until(worker.gone.is_set)


async def test_unrequested_bytes_end_an_idle_connection() -> None:
    more = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.answer(200, completion())
        await more.wait()
        await exchange.send(b"HTTP/1.1 200 OK\r\n")
        await exchange.until_gone()

    async with with_worker(script, worker_idle_s=NEVER_S) as (http, worker):
        await http.ask(post())
        more.set()
        await until(worker.gone.is_set)


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    async with with_worker(GOOD, worker_idle_s=0.05) as (http, _):
        await http.ask(post())
        await until(lambda: not http.plane.upstreams.connections)


DROPPED: dict[str, tuple[Script, int]] = {
    "length": (answers(503, b"busy", retry_after="7"), 1),
    "chunked": (
        says_and_waits(b"HTTP/1.1 503 -\r\nretry-after: 7\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"),
        0,
    ),
    "incomplete": (says_and_waits(b"HTTP/1.1 503 -\r\nretry-after: 7\r\ncontent-length: 9\r\n\r\nx"), 0),
}


@pytest.mark.parametrize(("script", "kept"), DROPPED.values(), ids=DROPPED)
async def test_an_answer_that_is_not_wanted_goes_nowhere(script: Script, kept: int) -> None:
    async with with_worker(script, worker_idle_s=NEVER_S) as (http, _):
        http.unwanted = {503}
        answer = await http.ask(post())
        assert (answer.status, answer.body) == (503, b"{}")
        await until(lambda: len(http.plane.upstreams.connections) == kept)
        assert http.plane.upstreams.idle == kept
    assert http.watcher.heard == ["head 503", "dropped"]
    assert http.watcher.retry_after == b"7"


# ---------------------------------------------------------------- a fault of ours


@pytest.mark.parametrize("at", ["on_head", "on_first_byte", "on_bytes", "on_end", "on_failed", "on_dropped"])
async def test_a_response_handler_that_raises_leaves_no_client_waiting(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object, **__: object) -> None:
        raise ValueError("planted")

    async def script(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD + chunked(event("a")))
        await more.wait()
        await exchange.send(chunked(event("b")))
        await (exchange.cut() if at == "on_failed" else exchange.chunk(b""))

    more = asyncio.Event()
    monkeypatch.setattr(Recorded, at, fault)
    with capture_logs() as logs:
        async with with_worker(script, sweep_s=0.01) as (http, worker):
            http.unwanted = {200} if at == "on_dropped" else set()
            _, writer = await http.dial(post(headers=b"connection: close\r\n"))
            await until(lambda: bool(logs if at == "on_bytes" else worker.received))
            more.set()
            await until(lambda: not http.plane.connections)
            await until(lambda: http.plane.inflight == 0)
            writer.close()
    assert [each["event"] for each in logs] == ["relay_failed"]


async def test_a_worker_for_whose_connection_there_is_no_tls_fails_in_connecting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise ssl.SSLError("planted")

    monkeypatch.setattr(ssl, "create_default_context", fails)
    async with running() as http:
        http.worker = "https://127.0.0.1:1"
        assert (await http.ask(post())).status == 502
    assert [each[:15] for each in http.watcher.heard] == ["failed connect:"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_aside_whose_end_is_too_much_fails_and_has_no_other_end(is_stream: bool) -> None:
    part, more = event("x" * 10_000), asyncio.Event()
    most = part * (ASIDE_BYTES_MAX // len(part) - 1)
    stream = in_two(more, STREAM_HEAD + chunked(most), chunked(part + part + DONE))
    async with with_worker(stream if is_stream else answers(200, b"x" * ASIDE_BYTES_MAX)) as (http, _):
        aside = BufferedResponse(http.plane.upstreams)
        watcher = Recorded(http, ClientExchange(aside, "POST", "/", "", {}, b"", 0.0), 0)
        await until(lambda: http.plane.upstreams.dials is not None)
        aside.ask(OutboundCall(http.worker, "/", b"", b"{}", LIMITS), watcher)
        await until(lambda: not is_stream or len(aside.body) == len(most))
        more.set()
        failed = f"failed body begun: an answer of more than {ASIDE_BYTES_MAX} bytes"
        await until(lambda: failed in watcher.heard)
        await until(lambda: not http.plane.upstreams.connections)
        assert [each for each in watcher.heard if each != "bytes"] == ["head 200", "first byte", failed]
