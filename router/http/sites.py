"""Checks `Host` and `Origin`: names that the data plane answers to, and sites whose pages may call it.

| a request has | outcome |
|---|---|
| a `Host` that is not a name of ours (`kv_runtime/http/hosts.py`) | 421 |
| no `Origin`, or one of the same host and port | served |
| an `Origin` that is listed | served; the answer lets the page read it |
| any other `Origin` (`null` is one) | 403 |

Each answer has `vary: origin` if answers differ by origin. A preflight (`OPTIONS` with
`access-control-request-method`) of a listed origin is answered here.
Source: Fetch standard, CORS protocol; RFC 9110, 15.5.20.
"""

from collections.abc import Iterable

from kv_runtime.http.hosts import ANY, HostNames
from router.http.heads import Headers, Malformed

CORS_HEADERS = frozenset(
    {
        b"access-control-allow-credentials", b"access-control-allow-headers", b"access-control-allow-methods",
        b"access-control-allow-origin", b"access-control-expose-headers", b"access-control-max-age",
    }
)  # fmt: skip
"""Headers of a worker's answer that are dropped: the router decides which page may read an answer."""
_EXPOSED = (
    b"access-control-expose-headers: retry-after, x-request-id, x-decision-id, x-worker-instance-id, x-dp-rank,"
    b" x-overlap-blocks, x-ignored-parameters, x-kv-unrendered, x-kv-failure\r\n"
)
_VARY = b"vary: origin\r\n"
_KNOWN_HOSTS_MAX = 1024
_PREFLIGHT_S = b"600"
_SHOWN_BYTES = 100


class Sites:
    """The names of the data plane, and the origins that may send requests."""

    __slots__ = ("_lines_of", "_names", "lines", "served_hosts")

    def __init__(self, names: HostNames, origins: Iterable[str] = ()) -> None:
        """`origins` are in lower case; `*` allows any origin."""
        listed = set(origins)
        if ANY in listed:
            listed = {ANY}
        self._names = names
        self.served_hosts: set[bytes] = set()
        """Accepted values of `Host`, cached."""
        self.lines = _VARY if listed - {ANY} else b""
        """Header lines of the answer to a request without `Origin`."""
        self._lines_of = {each.encode(): _lines(each.encode(), self.lines) for each in listed}

    def checked(self, headers: Headers) -> bytes:
        """Return the header lines that the answer to a request with these headers needs.

        Raises:
            Malformed: 421 or 403.
        """
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        if host not in self.served_hosts and b"host" in headers:
            self._check_host(host)
        if origin is None:
            return self.lines
        lines = self._listed(origin)
        if lines is not None:
            return lines
        if host and origin.partition(b"://")[2].lower() == host.lower():
            return self.lines
        found = origin[:_SHOWN_BYTES].decode("latin-1")
        raise Malformed(403, f"origin: found {found!r}, allowed this server's own and those of data.cors_origins")

    def preflight(self, method: str, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer to a preflight from a listed origin; empty if the request is none."""
        if method != "OPTIONS" or b"access-control-request-method" not in headers:
            return []
        if self._listed(headers.get(b"origin", b"")) is None:
            return []
        allowed = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", _PREFLIGHT_S)]
        if wanted := headers.get(b"access-control-request-headers"):
            allowed += [(b"access-control-allow-headers", wanted), (b"vary", b"access-control-request-headers")]
        return allowed

    def _check_host(self, host: bytes) -> None:
        if refusal := self._names.refusal(host.decode("latin-1")):
            raise Malformed(421, refusal)
        if len(self.served_hosts) >= _KNOWN_HOSTS_MAX:
            self.served_hosts.clear()
        self.served_hosts.add(host)

    def _listed(self, origin: bytes) -> bytes | None:
        if not origin:
            return None
        return self._lines_of.get(origin.lower()) or self._lines_of.get(b"*")


def _lines(origin: bytes, vary: bytes) -> bytes:
    return b"access-control-allow-origin: %b\r\n%b%b" % (origin, vary, _EXPOSED)
