"""Browsers: a page of another site reaches the data plane neither by a name of its own nor by its visitor's browser."""

import pytest

from kv_runtime.http.hosts import HostNames
from router.http.sites import Sites
from tests.system.integration.http.serving import answered, get, post, running, with_worker
from tests.unit.router.upstream import STREAM_HEAD, Exchange, answers, chunked, completion, event

APP = b"https://app.example"
SITES = Sites(HostNames("127.0.0.1", ("router.example",), setting="data.hosts"), (APP.decode(),))
ANY_SITE = Sites(HostNames("127.0.0.1", ("*",)), ("*",))


def from_page(origin: bytes, request: bytes = b"") -> bytes:
    """Let a browser send the request for a page of this origin."""
    return (request or post(b"x", headers=b"content-type: text/plain\r\n")).replace(
        b"\r\n\r\n", b"\r\norigin: " + origin + b"\r\n\r\n", 1
    )


def called(name: bytes) -> bytes:
    return get().replace(b"host: 127.0.0.1", b"host: " + name)


async def test_a_name_that_is_not_ours_is_refused_before_the_body_is_read() -> None:
    async with running(sites=SITES) as http:
        reader, _ = await http.dial(called(b"rebound.example:8000")[:-2] + b"content-length: 100000\r\n\r\n")
        answer = await answered(reader)
        assert await reader.read() == b""
        assert http.plane.refusals == {421: 1}
    assert (answer.status, answer.error["code"]) == (421, "unknown_host")
    assert answer.error["message"].endswith("allowed IP addresses, localhost and the names of data.hosts")
    assert http.exchanges == []


async def test_a_page_without_an_origin_is_not_ours_where_no_host_is_named() -> None:
    async with running(sites=SITES) as http:
        answer = await http.ask(b"GET / HTTP/1.0\r\norigin: null\r\n\r\n")
    assert (answer.status, answer.error["code"]) == (403, "foreign_origin")


@pytest.mark.parametrize("name", [b"localhost:8000", b"router.example", b"10.0.0.7:80", b"[::1]:8000"])
async def test_a_name_of_ours_is_served(name: bytes) -> None:
    async with running(sites=SITES) as http:
        for _ in range(2):
            assert (await http.ask(called(name))).status == 200


@pytest.mark.parametrize(
    "origin", [b"https://evil.example", b"null", b"http://127.0.0.1:1", b"https://app.example.evil"]
)
async def test_a_page_of_a_site_that_is_not_listed_is_refused(origin: bytes) -> None:
    async with running(sites=SITES) as http:
        answer = await http.ask(from_page(origin))
    assert (answer.status, answer.error["code"]) == (403, "foreign_origin")
    assert "data.cors_origins" in answer.error["message"]
    assert "access-control-allow-origin" not in answer.headers
    assert http.exchanges == []


@pytest.mark.parametrize(
    ("sites", "request_", "allowed", "vary"),
    [
        (SITES, get(), None, "origin"),
        (ANY_SITE, called(b"anything.example"), None, None),
        (ANY_SITE, from_page(b"https://unlisted.example", get()), "*", None),
        (None, from_page(b"http://127.0.0.1", get()), None, None),
    ],
    ids=["no origin", "any name", "any site", "a page of our own"],
)
async def test_what_is_served_says_who_may_read_it(
    sites: Sites | None, request_: bytes, allowed: str | None, vary: str | None
) -> None:
    async with running(sites=sites) as http:
        answer = await http.ask(request_)
    assert answer.status == 200
    assert (answer.headers.get("access-control-allow-origin"), answer.headers.get("vary")) == (allowed, vary)


async def test_a_page_of_a_listed_site_may_read_answers_streams_and_refusals() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD + chunked(event("a")))
        await exchange.chunk(b"")

    async with with_worker(script, sites=SITES) as (http, _):
        reader, _ = await http.dial(from_page(APP) + from_page(APP, get("/own")) + from_page(APP, get("/fault")))
        found = [await answered(reader) for _ in range(3)]
    assert [each.status for each in found] == [200, 200, 500]
    assert found[0].body == event("a")
    for each in found:
        assert (each.headers["access-control-allow-origin"], each.headers["vary"]) == (APP.decode(), "origin")
        assert "x-request-id" in each.headers["access-control-expose-headers"]


async def test_a_preflight_of_a_listed_site_is_answered() -> None:
    asked = b"access-control-request-method: POST\r\naccess-control-request-headers: authorization, content-type\r\n"
    async with running(sites=SITES) as http:
        reader, _ = await http.dial(from_page(APP, get("/v1/completions", asked, "OPTIONS")) + get("/next"))
        answer = await answered(reader)
        assert (await answered(reader)).body == b"/next?"
        refused, _ = await http.dial(from_page(b"https://evil.example", get("/v1/completions", asked, "OPTIONS")))
        assert (await answered(refused)).status == 403
        assert [each.path for each in http.exchanges] == ["/next"]
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, APP.decode())
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"


async def test_a_workers_cors_headers_are_not_passed_on() -> None:
    lines = {"access_control_allow_origin": "*", "access_control_allow_credentials": "true"}
    async with with_worker(answers(200, completion(), **lines), sites=SITES) as (http, _):
        answer = await http.ask(from_page(APP))
    assert answer.headers["access-control-allow-origin"] == APP.decode()
    assert "access-control-allow-credentials" not in answer.headers
