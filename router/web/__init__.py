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
"""Of every answer: only this server's own scripts and styles run, and in no frame; a copy is checked by its ETag."""


class WebPage:
    """The page's files by their paths."""

    def __init__(self) -> None:
        found = [each for each in _ASSETS.iterdir() if each.suffix in _TYPES]
        self._files = {ROOT + each.name.replace("index.html", ""): each for each in found}

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all files, which need no token."""
        return frozenset({"/", ROOT.rstrip("/"), *self._files})

    def routes(self) -> list[web.RouteDef]:
        """Return a route for each file; `/` and `/ui` lead to `/ui/`."""
        roots = [web.get(path, _to_root) for path in ("/", ROOT.rstrip("/"))]
        return [*roots, *(web.get(path, self._file) for path in self._files)]

    async def _file(self, request: web.Request) -> web.FileResponse:
        file = self._files[request.path]
        return web.FileResponse(file, headers={**HEADERS, "Content-Type": f"{_TYPES[file.suffix]}; charset=utf-8"})


async def _to_root(_: web.Request) -> web.Response:
    return web.Response(status=308, headers={**HEADERS, "Location": ROOT})
