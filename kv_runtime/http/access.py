"""Access to an aiohttp server: a bearer token, and checks of `Host` and `Origin` against pages of other sites."""

import hmac
from collections.abc import Set as AbstractSet

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Middleware

from kv_runtime.http.answers import Handler, error_response
from kv_runtime.http.hosts import HostNames

OPEN_PATHS = frozenset({"/metrics", "/health", "/live", "/ready", "/version"})
"""Paths that need no token: they change nothing and show no request."""
HOST_NAMES = web.AppKey("host_names", HostNames)


def require_token(token: str, open_paths: AbstractSet[str] = OPEN_PATHS) -> Middleware:
    """Return a middleware that requires `Authorization: Bearer <token>` on all but `open_paths`; "": no token.

    A request without the token must name the server in `Host`. It must not have the `Origin` of another site, nor load
    what another site's page embeds, such as an image: a browser sends such requests for any page that its user visits.
    A link of another site may lead here.
    """
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")  # as aiohttp decoded it
        if token and hmac.compare_digest(given, expected):
            return await handler(request)
        if token and request.path not in open_paths:
            return error_response(401, "Authorization: a bearer token is needed")
        if (refusal := _host_refusal(request)) is not None:
            return refusal
        if _is_for_another_site(request):
            found = request.headers.get("Origin", "a page of another site")
            message = f"Origin: found {found!r}, allowed this server's own"
            return error_response(403, message, param="Origin", code="foreign_origin")
        return await handler(request)

    return check


def _host_refusal(request: web.Request) -> web.Response | None:
    """Refuse a `Host` that is not a name of the server; HTTP/1.1 needs exactly one (RFC 9112, 3.2)."""
    hosts = request.headers.getall("Host", [])
    if not hosts and request.version < HttpVersion11:
        return None
    if len(hosts) != 1:
        return error_response(400, f"host: found {len(hosts)}, allowed 1", param="Host")
    names = request.app.get(HOST_NAMES) or HostNames("127.0.0.1")
    if reason := names.refusal(hosts[0]):
        return error_response(421, reason, param="Host", code="unknown_host")
    return None


def _is_for_another_site(request: web.Request) -> bool:
    """Return whether the origin differs from the called address, which is one of ours.

    Requests for images and scripts have no `Origin`: `Sec-Fetch-Site` says where their page is from. Source: W3C, Fetch
    Metadata Request Headers.
    """
    headers = request.headers
    if (origin := headers.get("Origin")) is not None:
        return origin.partition("://")[2] != request.host
    is_embedded = headers.get("Sec-Fetch-Mode") != "navigate" or headers.get("Sec-Fetch-Dest") not in ("document", None)
    return headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and is_embedded
