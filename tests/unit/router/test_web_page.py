"""The page's files: served without the token under a strict policy, complete, and without a way to run foreign text."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
from aiohttp import web

import router.web
from router.control_plane import control_app
from router.web import PATHS
from tests.support.served import served

TOKEN = "secret"
ASSETS = Path(router.web.__file__).parent / "assets"
FILES = sorted(each.name for each in ASSETS.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
PARSES_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\(|new Function|srcdoc"
)
IMPORT = re.compile(r'from "\./([a-z_]+\.js)"')


class Inline(HTMLParser):
    """What a strict policy refuses in a document, and the addresses that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refused = list[str]()
        self.loaded = list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.refused += [f"{tag} {name}" for name in names if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and not names.get("src")):
            self.refused.append(tag)
        if tag in {"script", "link", "img"}:
            self.loaded.append(names.get("src") or names.get("href") or "")


async def workers(_: web.Request) -> web.Response:
    return web.json_response({"workers": []})


@asynccontextmanager
async def shown(token: str = TOKEN) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = control_app([web.get("/v1/workers", workers)], token=token)
    async with served(app) as url, aiohttp.ClientSession() as session:
        yield session, url


async def test_every_file_is_served_without_the_token_under_a_strict_policy() -> None:
    async with shown() as (session, url):
        for path in sorted(PATHS - {"/", "/ui"}):
            async with session.get(url + path) as response:
                body = await response.read()
                assert response.status == 200, path
            assert body == (ASSETS / (path.removeprefix("/ui/") or "index.html")).read_bytes()
            policy = response.headers["Content-Security-Policy"].split("; ")
            assert "default-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert not any("unsafe" in each or "http" in each for each in policy)
            assert response.headers["X-Frame-Options"] == "DENY"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"
        async with session.get(f"{url}/v1/workers") as response:
            assert response.status == 401


async def test_the_page_is_found_without_its_slash_and_nothing_beside_it_is() -> None:
    async with shown("") as (session, url):
        async with session.get(f"{url}/ui") as response:
            assert (response.status, response.url.path) == (200, "/ui/")
        for path in (
            "/ui/nothing.js",
            "/ui/../__init__.py",
            "/ui/%2e%2e/__init__.py",
            "/ui/__init__.py",
            "/ui/app.js/",
        ):
            async with session.get(f"{url}{path}") as response:
                assert response.status == 404, path


async def test_a_copy_that_is_current_is_not_sent_again() -> None:
    async with shown() as (session, url):
        async with session.get(f"{url}/ui/app.js") as response:
            etag = response.headers["ETag"]
        async with session.get(f"{url}/ui/app.js", headers={"If-None-Match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")
        async with session.get(f"{url}/ui/app.js", headers={"If-None-Match": '"other"'}) as response:
            assert response.status == 200


async def test_a_page_of_another_name_is_not_shown() -> None:
    async with shown() as (session, url), session.get(f"{url}/ui/", headers={"Host": "rebound.example"}) as response:
        assert response.status == 421


def test_the_document_loads_its_own_files_alone_and_has_nothing_inline() -> None:
    found = Inline((ASSETS / "index.html").read_text())
    assert found.refused == []
    assert set(found.loaded) <= PATHS
    assert found.loaded


def test_what_is_inline_is_found() -> None:
    planted = {
        "<script>x</script>": "script",
        "<p style='x'>": "p style",
        "<a onclick=x>": "a onclick",
        "<style>": "style",
    }
    assert {text: Inline(text).refused for text in planted} == {text: [found] for text, found in planted.items()}


def test_no_script_parses_text_as_html_or_code() -> None:
    assert {name: PARSES_TEXT.findall((ASSETS / name).read_text()) for name in SCRIPTS} == {
        name: [] for name in SCRIPTS
    }
    planted = ("a.innerHTML = b", "eval(a)", "new Function(a)", "a.insertAdjacentHTML('x', b)")
    assert all(map(PARSES_TEXT.search, planted))


def test_every_script_is_imported_from_the_first_one_and_is_there() -> None:
    reached, waiting = set[str](), ["app.js"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += IMPORT.findall((ASSETS / name).read_text())
    assert reached == set(SCRIPTS)
