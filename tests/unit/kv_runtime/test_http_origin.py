"""A server without a token listens to its user's programs and to its own pages, not to other sites' pages."""

import aiohttp
import pytest
from aiohttp import web

from kv_runtime.http.access import require_token
from kv_runtime.http.answers import openai_errors
from kv_runtime.http.hosts import HostNames
from kv_runtime.http.server import HttpServer
from tests.support.served import served

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
