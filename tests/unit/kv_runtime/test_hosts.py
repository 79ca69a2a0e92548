"""A server answers to its own names and listens to its own pages: what browsers send for other pages is refused."""

import socket

import aiohttp
import pytest
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from kv_runtime.http.access import require_token
from kv_runtime.http.answers import openai_errors
from kv_runtime.http.hosts import HostName, HostNames, WebOrigin, url_of
from kv_runtime.http.server import HttpServer
from tests.support.served import served

OWN = socket.gethostname().lower()


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3:80",
     "router.example:1", "Router.Example."],
)  # fmt: skip
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - that is what is tested
def test_its_own_names_are_served(host: str, bound: str) -> None:
    assert HostNames(bound, ("router.example",)).refusal(host) == ""


@pytest.mark.parametrize(
    "host", ["rebound.example", "127.0.0.1.rebound.example:8000", "localhost.rebound.example", "router.example.evil",
             "0x7f.1", "1.2.3"],
)  # fmt: skip
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
def test_any_other_name_is_refused_with_the_setting_that_allows_it(host: str, bound: str) -> None:
    refusal = HostNames(bound, ("router.example",), setting="data.hosts").refusal(host)
    assert refusal == f"host: found {host!r}, allowed IP addresses, localhost and the names of data.hosts"


@pytest.mark.parametrize(
    "host", ["", "[::1", "[::1]x", "[]", "::1", ":8000", "127.0.0.1:19000@evil", "x@127.0.0.1", "localhost:80:80",
             "localhost:x", "localhost:123456", "localhost/a", "a b", " ", "localhost\n"],
)  # fmt: skip
@pytest.mark.parametrize("named", ["router.example", "*"])
def test_what_is_no_host_with_or_without_a_port_is_refused_always(host: str, named: str) -> None:
    assert HostNames("127.0.0.1", (named,)).refusal(host) == f"host: found {host!r}, allowed host or host:port"


def test_the_machines_name_is_served_beyond_loopback_alone() -> None:
    assert HostNames("0.0.0.0").refusal(f"{OWN}:8000") == ""  # noqa: S104
    assert HostNames("router.internal").refusal("router.internal:8000") == ""
    if OWN != "localhost":
        assert HostNames("127.0.0.1").refusal(OWN) != ""


def test_an_ipv6_address_is_in_brackets_in_a_url() -> None:
    assert [url_of("::1", 8003), url_of("::", 443, "https"), url_of("a.example", 80)] == [
        "http://[::1]:8003",
        "https://[::]:443",
        "http://a.example:80",
    ]


def test_a_star_allows_any_name() -> None:
    assert HostNames("127.0.0.1", ("*",)).refusal("anything.example") == ""


@pytest.mark.parametrize("name", ["", "http://router", "router:8000", "a b", "-a", "*.example"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="allowed a host's name without scheme and port"):
        TypeAdapter(HostName).validate_python(name)


@pytest.mark.parametrize("origin", ["", "router.example", "http://", "https://a/b", "ftp://a", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match=r"allowed http\(s\)://host"):
        TypeAdapter(WebOrigin).validate_python(origin)


def test_names_and_origins_are_compared_in_lower_case() -> None:
    assert TypeAdapter(HostName).validate_python("Router.Example") == "router.example"
    assert TypeAdapter(WebOrigin).validate_python("HTTPS://App.Example:8443") == "https://app.example:8443"


_ASKED_FOR = "answered"


async def _status(token: str, method: str = "POST", path: str = "/v1/workers", **headers: str) -> int:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=_ASKED_FOR)

    app = web.Application(middlewares=[openai_errors, require_token(token)])
    app.router.add_route("*", path, answer)
    server = HttpServer(app, "127.0.0.1", 0, hosts=HostNames("127.0.0.1", ("router.example",)))
    async with served(server) as url, aiohttp.ClientSession() as session:
        address = url.removeprefix("http://")
        named = {name: value.format(address=address, port=server.port) for name, value in headers.items()}
        async with session.request(method, url + path, headers=named) as response:
            await response.read()
    return response.status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://{address}"}, 200),
        ({"Origin": "http://localhost:{port}", "Host": "localhost:{port}"}, 200),
        ({"Origin": "http://[::1]:{port}", "Host": "[::1]:{port}"}, 200),
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}, 200),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 200),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://elsewhere.example:{port}", "Host": "elsewhere.example:{port}"}, 421),
        ({"Host": "elsewhere.example:{port}"}, 421),
        ({"Host": "router.example:{port}"}, 200),
        ({"Origin": "https://router.example", "Host": "router.example"}, 200),
        ({"Origin": "https://elsewhere.example", "Host": "router.example"}, 403),
    ],
)
async def test_without_a_token_a_page_of_another_site_is_refused(headers: dict[str, str], status: int) -> None:
    assert await _status("", **headers) == status


@pytest.mark.parametrize(("path", "token"), [("/v1/decisions", ""), ("/metrics", ""), ("/metrics", "secret")])
async def test_a_page_that_calls_the_server_by_its_own_name_reads_nothing(path: str, token: str) -> None:
    assert await _status(token, "GET", path, Host="rebound.example:{port}") == 421
    assert await _status(token, "GET", path, Host="localhost:{port}") == 200


async def test_with_a_token_it_alone_decides() -> None:
    elsewhere = "https://elsewhere.example"
    assert await _status("secret", Origin=elsewhere, Authorization="Bearer secret") == 200
    assert await _status("secret", Host="elsewhere.example", Authorization="Bearer secret") == 200
    assert await _status("secret", Origin=elsewhere) == 401
