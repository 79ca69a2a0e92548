"""Media from real servers and files: fetched where that is allowed, and otherwise not even asked for."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.unit.router.upstream import Exchange, Script, Upstream, pours, says, says_and_waits
from tests.unit.worker_agent.media_samples import GIF, JPEG, PNG, data_url, refused
from worker_agent.media.config import MediaSection
from worker_agent.media.fetch import REDIRECTS_MAX
from worker_agent.media.loader import FETCHES_MAX, MediaLoader
from worker_agent.media.parts import MediaPart
from worker_agent.media.refusals import MediaRefused
from worker_agent.media.urls import Address
from worker_agent.port.types import Media

HERE, OTHER = ip_address("127.0.0.1"), ip_address("127.0.0.2")


class Names:
    """A resolver: each answer is given once, the last one for ever."""

    def __init__(self, *answers: list[Address]) -> None:
        self.answers = list(answers) or [[HERE]]
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[Address]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Server:
    """Answers with what `paths` says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.paths: dict[str, Callable[[], web.StreamResponse]] = {}
        self.asked: list[web.Request] = []
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        return self.paths[request.path]()

    def url(self, path: str, host: str = "images.example") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def serving(server: Server, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Server]:
    app = web.Application()
    app.add_routes([web.get("/{path:.*}", server.answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
IN_CHUNKS = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = pours(IN_CHUNKS, b"1000\r\n" + bytes(4096) + b"\r\n")
FLOODS = [
    (pours(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 4096), "unreachable"),
    (pours(IN_CHUNKS, b"000001\r\na\r\n" * 4096), "incomplete"),
]


@pytest.mark.parametrize(("script", "reason"), FLOODS)
async def test_a_server_that_floods_the_reader_is_left_and_the_loop_turns_meanwhile(
    script: Script, reason: str
) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with Upstream(script) as speaker:
        turning = asyncio.ensure_future(turn())
        url = f"http://images.example:{speaker.port}/a.png"
        assert await reason_of(speaker.port, url, fetch_s=60.0, part_bytes_max=1 << 20) == reason
        turning.cancel()
        async with asyncio.timeout(20):
            await speaker.gone.wait()
    assert turns > 10


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(Server()) as running:
        running.paths["/a.png"] = lambda: web.Response(body=PNG, content_type="image/png")
        yield running


def section(port: int, **fields: Any) -> MediaSection:
    given = {"schemes": ("http",), "ports": (port,), "networks": ("127.0.0.1",)}
    return MediaSection.model_validate({**given, **fields})


def part(url: str) -> MediaPart:
    return MediaPart(field="messages[0].content[0].image_url.url", url=url)


async def load(port: int, *urls: str, names: Names | None = None, **fields: Any) -> tuple[Media, ...]:
    return await MediaLoader(section(port, **fields), resolve=names or Names()).load([part(url) for url in urls])


async def reason_of(port: int, url: str, *, names: Names | None = None, fetch_s: float = 10.0, **fields: Any) -> str:
    loader = MediaLoader(section(port, **fields), resolve=names or Names(), fetch_s=fetch_s)
    with pytest.raises(MediaRefused) as caught:
        await loader.load([part(url)])
    reason = refused(caught)
    assert "secret" not in str(caught.value)
    return reason


# -------------------------------------------------------------------------------------------------- what is read
async def test_media_come_from_everywhere_that_is_allowed_in_their_order(server: Server, tmp_path: Path) -> None:
    (tmp_path / "b.jpg").write_bytes(JPEG)
    urls = (server.url("/a.png?x=1"), data_url(GIF, "image/gif"), f"file://{tmp_path}/b.jpg")
    loader = MediaLoader(section(server.port, directories=(str(tmp_path),)), resolve=Names())
    media = await loader.load([part(url) for url in urls])
    assert [each.data for each in media] == [PNG, GIF, JPEG]
    assert loader.loaded_total == {"image": 3}
    assert loader.loaded_bytes_total == len(PNG) + len(GIF) + len(JPEG)


async def test_the_server_is_told_nothing_but_what_it_must(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server.paths["/moved"] = lambda: web.Response(
        status=302, headers={"Location": "/a.png?k=v%2F", "Set-Cookie": "a=b"}
    )
    await load(server.port, server.url("/moved"))
    last = server.asked[-1]
    assert last.path_qs == "/a.png?k=v%2F"
    assert last.headers["Host"] == f"images.example:{server.port}"
    assert last.headers["Accept-Encoding"] == "identity"
    assert not {"Cookie", "Authorization", "Referer", "Proxy-Authorization"} & set(last.headers)


# --------------------------------------------------------------------------------------- which hosts are asked
@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", "address_loopback"),
        ("images.example", "address_loopback"),
    ],
)
async def test_an_address_that_is_not_public_is_not_even_asked(server: Server, host: str, reason: str) -> None:
    assert await reason_of(server.port, server.url("/a.png?secret", host), networks=()) == reason
    assert server.asked == []


async def test_an_allowed_address_may_be_named_itself_in_each_of_its_forms(server: Server) -> None:
    names = Names()
    (media,) = await load(server.port, server.url("/a.png", "127.0.0.1"), names=names)
    assert (media.data, names.asked) == (PNG, [])


async def test_a_name_is_resolved_once_and_the_connection_goes_where_it_led(server: Server) -> None:
    names = Names([HERE], [OTHER])  # a second look would lead elsewhere
    async with serving(Server(), "127.0.0.2", server.port) as rebound:
        await load(server.port, server.url("/a.png"), names=names, networks=("127.0.0.0/8",))
        assert (len(names.asked), len(server.asked), rebound.asked) == (1, 1, [])


async def test_each_redirect_is_resolved_and_checked_anew(server: Server) -> None:
    server.paths["/moved"] = lambda: web.Response(status=307, headers={"Location": "/a.png"})
    names = Names([HERE], [OTHER])
    assert await reason_of(server.port, server.url("/moved"), names=names) == "address_loopback"
    assert [request.path for request in server.asked] == ["/moved"]


async def test_a_name_without_addresses_is_refused(server: Server) -> None:
    async def unresolved(_: str) -> list[Address]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(MediaRefused) as caught:
        await MediaLoader(section(server.port), resolve=unresolved).load([part(server.url("/a.png"))])
    assert refused(caught) == "address_unresolved"
    assert await reason_of(server.port, server.url("/a.png"), names=Names([])) == "address_unresolved"


async def test_redirects_are_bounded(server: Server) -> None:
    server.paths["/loop"] = lambda: web.Response(status=308, headers={"Location": "/loop"})
    assert await reason_of(server.port, server.url("/loop")) == "redirect_count"
    assert len(server.asked) == 1 + REDIRECTS_MAX


# ------------------------------------------------------------------------------------------------------ answers
@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"status": 404}, "status"),
        ({"status": 206, "body": PNG}, "status"),
        ({"body": b""}, "content"),
        ({"body": b"<html>", "content_type": "text/html"}, "content_type"),
        ({"body": PNG, "headers": {"Content-Encoding": "gzip"}}, "encoding"),
        ({"body": PNG + bytes(1000)}, "too_large"),
    ],
)
async def test_an_answer_that_is_no_image_is_refused(server: Server, response: dict[str, Any], reason: str) -> None:
    server.paths["/b.png"] = lambda: web.Response(**response)
    assert await reason_of(server.port, server.url("/b.png?secret"), part_bytes_max=1000) == reason


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ((OK, b"Content-Length: 1000000000000\r\n\r\n"), "too_large"),
        ((OK, b"Content-Length: 500\r\n\r\n", PNG), "incomplete"),
        ((OK, b"Transfer-Encoding: chunked\r\n\r\n", b"46\r\n", PNG), "incomplete"),
        ((b"HTTP/1.1 200 OK\r\nX: ", b"a" * 100_000, b"\r\n\r\n"), "unreachable"),
        ((b"SSH-2.0-OpenSSH_9.9\r\n",), "unreachable"),
        ((), "unreachable"),
    ],
)
async def test_a_server_that_lies_or_breaks_off_is_refused(texts: tuple[bytes, ...], reason: str) -> None:
    async with Upstream(says(b"".join(texts))) as speaker:
        assert await reason_of(speaker.port, f"http://h:{speaker.port}/a.png?secret", part_bytes_max=1000) == reason


async def test_more_than_content_length_said_is_not_taken() -> None:
    body = OK + b"Content-Length: %d\r\n\r\n" % len(PNG) + PNG + b"more"
    async with Upstream(says(body)) as speaker:
        assert await reason_of(speaker.port, f"http://h:{speaker.port}/a.png") == "unreachable"


async def test_a_body_without_end_is_given_up_at_the_bound() -> None:
    async with Upstream(ENDLESS) as speaker:
        assert await reason_of(speaker.port, f"http://h:{speaker.port}/a.png", part_bytes_max=10_000) == "too_large"
        await speaker.gone.wait()


@pytest.mark.parametrize("texts", [(), (OK,), (OK, b"Content-Length: 70\r\n\r\n", PNG[:1])])
async def test_a_server_that_is_silent_at_any_point_is_given_up(texts: tuple[bytes, ...]) -> None:
    async with Upstream(says_and_waits(b"".join(texts))) as speaker:
        assert await reason_of(speaker.port, f"http://h:{speaker.port}/a.png", fetch_s=0.05) == "timeout"
        await speaker.gone.wait()


async def test_a_body_that_drips_is_given_up_though_it_never_stops() -> None:
    drips = pours(OK + b"Content-Length: 1000000\r\n\r\n", b"a")
    async with Upstream(drips) as speaker:
        found = await reason_of(speaker.port, f"http://h:{speaker.port}/a.png", fetch_s=0.05)
        assert found == "timeout"
        await speaker.gone.wait()


# ---------------------------------------------------------------------------------------------------- of a request
async def test_as_many_are_loaded_at_a_time_as_may_be(server: Server) -> None:
    running, peak = 0, 0

    async def resolve(_: str) -> list[Address]:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)  # all loads that may run at once are here before the first goes on
        running -= 1
        return [HERE]

    loader = MediaLoader(section(server.port), resolve=resolve)
    media = await loader.load([part(server.url("/a.png"))] * 12)
    assert (len(media), peak) == (12, FETCHES_MAX)


async def test_where_one_is_refused_the_others_are_given_up() -> None:
    async with Upstream(says_and_waits(OK)) as speaker:

        async def refused_later(host: str) -> list[Address]:
            return [HERE] if host == "h" else [OTHER]

        loader = MediaLoader(section(speaker.port), resolve=refused_later)
        with pytest.raises(MediaRefused) as caught:
            await loader.load([part(f"http://h:{speaker.port}/a.png"), part(f"http://other:{speaker.port}/a.png")])
        assert refused(caught) == "address_loopback"


async def test_a_cancelled_request_cancels_its_fetches() -> None:
    asked = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        asked.set()
        await exchange.until_gone()

    async with Upstream(script) as speaker:
        loading = asyncio.ensure_future(load(speaker.port, f"http://h:{speaker.port}/a.png"))
        await asked.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await speaker.gone.wait()
