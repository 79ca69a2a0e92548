"""What is a head and what is not, rule by rule."""

from typing import Any

import pytest

from router.http.exchange import Exchange
from router.http.heads import (
    CHUNKED,
    HOP_BY_HOP,
    UNTIL_CLOSE,
    AnswerHead,
    AnswerReader,
    Malformed,
    RequestHead,
    RequestReader,
    RequestWriter,
)

PLAIN = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: router\r\n%b\r\n"


def request(lines: bytes = b"") -> bytes:
    return PLAIN % lines


def request_head(data: bytes) -> RequestHead | None:
    """Return the head of a request that comes to no host that is served: it is left to check."""
    found: RequestHead | None = RequestReader(Exchange, set(), b"", 0).read(data, None, 0.0, {})[0]
    return found


def parsed(head: bytes) -> RequestHead:
    """Return a complete head."""
    found = request_head(head)
    assert found is not None
    assert found.rest == b""
    return found


def answer(head: bytes, dropped: frozenset[bytes] = HOP_BY_HOP) -> AnswerHead:
    """Return a complete head of an answer."""
    found: AnswerHead | None = AnswerReader(dropped).head(head)
    assert found is not None
    assert found.rest == b""
    return found


def test_a_request_says_what_it_wants() -> None:
    assert request_head(request(b"Content-Length: 7\r\nX-A:\t one \r\nx-a: two\r\n") + b"{} {} !more") == (
        "POST",
        "/v1/completions",
        "a=b",
        {b"host": b"router", b"content-length": b"7", b"x-a": b"one, two"},
        7,
        True,
        True,
        b"{} {} !",
        b"more",
    )


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", "/", ""),
        (b"/a%20b?c?d", "/a%20b", "c?d"),
        (b"http://router:80/a?b", "/a", "b"),
        (b"HTTPS://router", "/", ""),
        (b"http://router?a", "/", "a"),
    ],
)
def test_a_target_is_a_path_or_an_address_with_one(target: bytes, path: str, query: str) -> None:
    head = parsed(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (head.path, head.query) == (path, query)


def test_options_may_ask_for_everything() -> None:
    assert parsed(b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n").path == "*"


@pytest.mark.parametrize(
    ("lines", "body_bytes"),
    [
        (b"", 0),
        (b"content-length: 0\r\n", 0),
        (b"content-length: 007\r\n", 7),
        (b"content-length: 999999999999999999\r\n", 999_999_999_999_999_999),
        (b"transfer-encoding: chunked\r\n", CHUNKED),
        (b"transfer-encoding: Chunked\r\n", CHUNKED),
        (b"content-encoding: identity\r\n", 0),
        (b"expect: 100-Continue\r\ncontent-length: 3\r\n", 3),
    ],
)
def test_a_body_has_a_length_or_chunks(lines: bytes, body_bytes: int) -> None:
    assert parsed(request(lines)).body_bytes == body_bytes


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (request(), True),
        (request(b"connection: keep-alive\r\n"), True),
        (request(b"connection: Close\r\n"), False),
        (request(b"connection: x, close\r\n"), False),
        (request(b"connection: x\r\nconnection: close\r\n"), False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", False),
    ],
)
def test_a_connection_stays_open_unless_one_side_wants_it_closed(head: bytes, keep_alive: bool) -> None:
    assert parsed(head).keep_alive is keep_alive


REFUSED: dict[str, tuple[bytes, int]] = {
    "no version": (b"GET /\r\n\r\n", 400),
    "two spaces": (b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a tab for a space": (b"GET\t/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "no method": (b" / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a method that is no token": (b"G@T / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a tunnel": (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 501),
    "no target": (b"GET  HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a relative target": (b"GET v1 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a target beyond ASCII": (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a target with a control character": (b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "everything, for another method": (b"GET * HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "another scheme": (b"GET ftp://x/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "an address with a user": (b"GET http://a@x/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nhost: x\r\n\r\n", 505),
    "HTTP/0.9": (b"GET / HTTP/0.9\r\n\r\n", 505),
    "a version in small letters": (b"GET / http/1.1\r\nhost: x\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (request(b"host: y\r\n"), 400),
    "a line without a colon": (request(b"x\r\n"), 400),
    "a line without a name": (request(b": x\r\n"), 400),
    "a space before the colon": (request(b"x : y\r\n"), 400),
    "a space before the name": (request(b" x: y\r\n"), 400),
    "a continuation line": (request(b"x: y\r\n z\r\n"), 400),
    "a name that is no token": (request(b"x(y: z\r\n"), 400),
    "a name beyond ASCII": (request(b"\xe4: z\r\n"), 400),
    "a bare CR": (request(b"x: y\rz: 1\r\n"), 400),
    "a bare LF": (request(b"x: y\nz: 1\r\n"), 400),
    "CR and LF far apart": (request(b"x: y\r-\nz: 1\r\n"), 400),
    "a zero byte": (request(b"x: \x00\r\n"), 400),
    "a control character": (request(b"x: \x7f\r\n"), 400),
    "101 lines": (request(b"x: y\r\n" * 100), 431),
    "two lengths": (request(b"content-length: 1\r\ncontent-length: 2\r\n"), 400),
    "a length twice": (request(b"content-length: 1\r\ncontent-length: 1\r\n"), 400),
    "two lengths in one": (request(b"content-length: 1, 1\r\n"), 400),
    "no length": (request(b"content-length:\r\n"), 400),
    "a length with a sign": (request(b"content-length: +1\r\n"), 400),
    "a negative length": (request(b"content-length: -1\r\n"), 400),
    "a length with an underscore": (request(b"content-length: 1_0\r\n"), 400),
    "a length in hexadecimal": (request(b"content-length: 0x1\r\n"), 400),
    "an endless length": (request(b"content-length: " + b"9" * 19 + b"\r\n"), 400),
    "a length and chunks": (request(b"content-length: 1\r\ntransfer-encoding: chunked\r\n"), 400),
    "chunks and a length": (request(b"transfer-encoding: chunked\r\ncontent-length: 1\r\n"), 400),
    "another coding": (request(b"transfer-encoding: gzip\r\n"), 501),
    "two codings": (request(b"transfer-encoding: gzip, chunked\r\n"), 501),
    "a coding twice": (request(b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"), 400),
    "identity": (request(b"transfer-encoding: identity\r\n"), 501),
    "chunks in HTTP/1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "a content coding": (request(b"content-encoding: gzip\r\n"), 415),
    "another expectation": (request(b"expect: 200-ok\r\n"), 417),
}


@pytest.mark.parametrize(("head", "status"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_request_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(Malformed) as raised:
        request_head(head)
    assert raised.value.status == status


def test_a_refusal_names_what_was_found_and_what_is_allowed() -> None:
    with pytest.raises(Malformed, match=r"^content-length: found '1_0', allowed 1 to 18 digits$"):
        parsed(request(b"content-length: 1_0\r\n"))


def test_a_hundred_lines_are_served() -> None:
    assert len(parsed(request(b"".join(b"x%d: y\r\n" % each for each in range(99)))).headers) == 100


@pytest.mark.parametrize("value", [b"", b"1", b"y" * 300])
def test_a_name_that_is_repeated_has_all_of_its_values_whatever_they_are(value: bytes) -> None:
    for name in (b"x", b"x" * 300):
        assert parsed(request(b"%b: %b\r\n" % (name, value) * 3)).headers[name] == b", ".join([value] * 3)


@pytest.mark.parametrize("name", [b"Content-Length", b"CONTENT-LENGTH", b"content-length"])
def test_a_name_means_the_same_however_it_is_written(name: bytes) -> None:
    head = parsed(request(name + b": 3\r\n"))
    assert (head.body_bytes, head.headers[b"content-length"]) == (3, b"3")


def test_a_name_of_one_letter_is_in_lower_case_and_the_letter_stays_as_it_is() -> None:
    assert parsed(request(b"X: Y\r\n")).headers[b"x"] == b"Y"
    # bytes of one letter are shared: in place it would be another letter everywhere
    assert [bytes([letter])[0] for letter in b"XY"] == [ord("X"), ord("Y")]


def test_a_head_ends_where_its_body_begins_and_is_awaited_until_then() -> None:
    whole = request(b"content-length: 3\r\n")
    for end in range(len(whole)):
        assert request_head(whole[:end]) is None
    for body, expected in ((b"abc", (b"abc", b"")), (b"abcGET", (b"abc", b"GET")), (b"ab", (None, b"ab"))):
        found = request_head(b"\r\n\r\n" + whole + body)
        assert found is not None
        assert (found.body, found.rest) == expected
    chunked = request_head(request(b"transfer-encoding: chunked\r\n") + b"0\r\n")
    assert chunked is not None
    assert (chunked.body, chunked.rest) == (None, b"0\r\n")


@pytest.mark.parametrize("data", [b"\n", b"\r\n\n", b"\rG", b"\r\r\n"])
def test_empty_lines_before_a_request_are_whole(data: bytes) -> None:
    assert request_head(b"\r\n\r") is None
    with pytest.raises(Malformed, match="bare CR or LF"):
        request_head(data)


def test_a_head_may_have_32_kib() -> None:
    most = request(b"x: " + b"y" * ((32 << 10) - len(request()) - 5) + b"\r\n")
    assert len(most) == 32 << 10
    assert parsed(most).headers[b"x"]
    for longer in (most.replace(b"x: ", b"x:  "), b"G" * (32 << 10), b"\r\n" * (16 << 10), b"\r\n" * (16 << 10) + b"G"):
        with pytest.raises(Malformed, match=r"^head: found more than 32768 bytes, allowed 32768$"):
            request_head(longer)
    assert request_head(b"G" * ((32 << 10) - 1)) is None


# ---------------------------------------------------------------- answers


def test_an_answer_says_what_follows_and_what_may_be_passed_on() -> None:
    head = b"HTTP/1.0 404 Not  Here\r\nServer: w\r\nTE: x\r\nContent-Length: 5\r\nX-Mine: 1\r\nRetry-After: 7\r\n\r\n"
    assert answer(head, HOP_BY_HOP | {b"x-mine"})[:-1] == (
        404,
        {b"server": b"w", b"te": b"x", b"content-length": b"5", b"x-mine": b"1", b"retry-after": b"7"},
        5,
        False,
        False,
        b"HTTP/1.1 404 Not  Here\r\nServer: w\r\nRetry-After: 7\r\n",
    )


@pytest.mark.parametrize(
    ("head", "body_bytes", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", 5, True),
        (b"HTTP/1.1 200\r\ncontent-length: 5\r\n\r\n", 5, True),
        (b"HTTP/1.1 200 \r\ntransfer-encoding: chunked\r\n\r\n", CHUNKED, True),
        (b"HTTP/1.1 200 OK\r\n\r\n", UNTIL_CLOSE, False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 0, True),
        (b"HTTP/1.1 304 -\r\ncontent-length: 5\r\n\r\n", 0, True),
        (b"HTTP/1.1 100 Continue\r\n\r\n", 0, True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\n", 5, False),
    ],
)
def test_where_an_answer_ends_and_whether_its_connection_goes_on(head: bytes, body_bytes: int, reusable: bool) -> None:
    found = answer(head)
    assert (found.body_bytes, found.reusable) == (body_bytes, reusable)


def test_what_a_connection_header_names_is_not_passed_on() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: X-A, close\r\nx-a: 1\r\nx-b: 2\r\n\r\n"
    assert answer(head).lines == b"HTTP/1.1 200 OK\r\nx-b: 2\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 600 OK\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 200 O\x00K\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n x: y\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 101 + b"\r\n",
    ],
)
def test_what_is_no_answer_is_refused(head: bytes) -> None:
    with pytest.raises(Malformed):
        answer(head)


# ---------------------------------------------------------------- what is left to check


def read(data: bytes, *, checks_all: bool = False) -> Any:
    """Return what a reader makes of a request that is sent to a served host and path."""
    reader = RequestReader(Exchange, {b"router"}, b"vary: origin\r\n", 5)
    reader.checks_all = checks_all
    found, serves = reader.read(data, None, 7.0, {"/v1/completions": "serves"})
    assert serves == ("serves" if isinstance(found, Exchange) else None)
    return found


def test_a_plain_request_is_an_exchange_at_once() -> None:
    found = read(request(b"Content-Length: 5\r\n") + b"hello")
    assert isinstance(found, Exchange)
    assert (found.method, found.path, found.query, found.body) == ("POST", "/v1/completions", "a=b", b"hello")
    assert (found.headers[b"host"], found.began_s, found.connection_line) == (b"router", 7.0, b"vary: origin\r\n")


@pytest.mark.parametrize(
    "data",
    [
        request(b"content-length: 6\r\n") + b"hello!",
        request(b"content-length: 5\r\n") + b"hell",
        request(b"content-length: 5\r\n") + b"hello ",
        request(b"transfer-encoding: chunked\r\n") + b"0\r\n\r\n",
        request(b"connection: close\r\n"),
        request(b"origin: https://router\r\n"),
        request().replace(b"router", b"another"),
        request().replace(b"POST", b"GET"),
        request().replace(b"completions", b"others"),
        request().replace(b"1.1", b"1.0"),
    ],
    ids=["too long", "not whole", "another", "chunks", "close", "origin", "host", "method", "path", "version"],
)
def test_any_other_request_is_left_to_check(data: bytes) -> None:
    assert isinstance(read(data), RequestHead)


def test_all_requests_are_left_to_check_where_that_is_asked_for() -> None:
    assert isinstance(read(request()), Exchange)
    assert isinstance(read(request(), checks_all=True), RequestHead)


# ---------------------------------------------------------------- what workers are sent, and answer


@pytest.mark.parametrize(
    ("body", "parts"),
    [(b"{}", ()), (b"x" * 17_000, (b"x" * 17_000,)), ((bytearray(b"{"), b"}"), (bytearray(b"{"), b"}"))],
    ids=["short", "long", "in parts"],
)
def test_a_request_to_a_worker_is_one_part_if_it_is_short(body: Any, parts: tuple[bytes, ...]) -> None:
    head, *rest = RequestWriter(b"/api", b"host: w\r\ncontent-length: ").request("POST", "/v1?a", b"x-a: 1\r\n", body)
    size = len(body) if isinstance(body, bytes) else sum(map(len, body))
    start = b"POST /api/v1?a HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\nx-a: 1\r\n\r\n" % size
    assert (head, tuple(rest)) == (start if parts else start + body, parts)


@pytest.mark.parametrize("path", ["/a b", "/ä", "/a\r\nx: y"])
def test_a_path_that_would_be_another_request_is_not_sent(path: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII"):
        RequestWriter(b"", b"").request("POST", path, b"", b"")


def test_an_answer_begins_behind_interim_ones() -> None:
    reader, interim = AnswerReader(HOP_BY_HOP), b"HTTP/1.1 103 -\r\n\r\n"
    whole = b"HTTP/1.1 200 OK\r\nx-a: 1\r\ncontent-length: 1\r\n\r\na"
    assert reader.head(interim + whole) == reader.head(whole)
    assert reader.head(whole).rest == b"a"
    assert reader.head(whole[:20]) is None
    assert (reader.head(interim + b"HTTP").status, reader.head(interim + b"HTTP").rest) == (103, b"HTTP")
