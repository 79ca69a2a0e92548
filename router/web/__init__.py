"""The web page of the control plane: its files, and the headers under which a browser shows them.

The files are in the package (`assets/`), and the page consists of nothing else: the policy in `HEADERS` lets a browser
load nothing from elsewhere. They contain no data, and so need no token; the page asks its user for the token and reads
the control plane's endpoints with it.
"""

from pathlib import Path

from aiohttp import web

ROOT = "/ui/"
_ASSETS = Path(__file__).parent / "assets"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Headers of every answer: only this server's scripts and styles run, in no frame; a cached copy is checked by ETag."""


_FILES = {ROOT + each.name.replace("index.html", ""): each for each in _ASSETS.iterdir() if each.suffix in _TYPES}
PATHS = frozenset({"/", ROOT.rstrip("/"), *_FILES})
"""The paths of the page, which need no token."""


def page_routes() -> list[web.RouteDef]:
    """Return a route for each file; `/` and `/ui` lead to `/ui/`."""
    roots = [web.get(path, _to_root) for path in ("/", ROOT.rstrip("/"))]
    return [*roots, *(web.get(path, _file) for path in _FILES)]


async def _file(request: web.Request) -> web.FileResponse:
    file = _FILES[request.path]
    return web.FileResponse(file, headers={**HEADERS, "Content-Type": f"{_TYPES[file.suffix]}; charset=utf-8"})


async def _to_root(_: web.Request) -> web.Response:
    return web.Response(status=308, headers={**HEADERS, "Location": ROOT})
