"""The allowed `Host` names of a server, against DNS rebinding.

A browser lets a page send requests to its own site. The owner of that site's name can point it to this server; only
`Host` reveals this:

| `Host` names | served |
|---|---|
| an IP address, `localhost` | always: no foreign name server was involved |
| the name that the server is bound to, the advertised name of a worker, a name of the setting | always |
| this machine's own name | if the server is not bound to loopback |
| any other name | only if the setting contains `*` |
| nothing (an empty value), or a value that is neither host nor host:port | never |

A name is served if one line allows it.

An HTTP/1.0 request without `Host` is served: browsers always send one.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

ANY = "*"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9_.-]{1,253})(:[0-9]{1,5})?")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+(%[0-9A-Za-z_.-]+)?\]|[0-9A-Za-z_.-]+)(:[0-9]{0,5})?")
_SHOWN_CHARACTERS = 100


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached only from this machine."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a host and a port; an IPv6 address is put in brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _lower_case_of(pattern: re.Pattern[str], allowed: str) -> AfterValidator:
    def checked(text: str) -> str:
        lower = text.lower()
        if lower != ANY and not pattern.fullmatch(lower):
            raise ValueError(f"found {text!r}, allowed {allowed}, or *")
        return lower

    return AfterValidator(checked)


HostName = Annotated[str, _lower_case_of(_NAME, "a host's name without scheme and port")]
"""An allowed name of a server, in lower case; `*`: any."""
WebOrigin = Annotated[str, _lower_case_of(_ORIGIN, "http(s)://host, or http(s)://host:port")]
"""An `Origin` as browsers send it, in lower case; `*`: any."""


class HostNames:
    """The names of one server."""

    def __init__(self, bound: str, named: Iterable[str] = (), *, setting: str = "control.hosts") -> None:
        """`bound` is the address that the server listens on. `named` are the other allowed names, in lower case.

        `setting` is the name of the setting that refusals point to.
        """
        own = set() if is_loopback(bound) else {socket.gethostname().lower()}
        self._names = {"localhost", bound.lower(), *own, *named}
        self._setting = setting

    def refusal(self, host: str) -> str:
        """Return why a request with this `Host` is refused; empty if it is served."""
        shown = host[:_SHOWN_CHARACTERS]
        if not _HOST.fullmatch(host):
            return f"host: found {shown!r}, allowed host or host:port"
        name = _without_port(host)
        if name in self._names or ANY in self._names or _address(name) is not None:
            return ""
        return f"host: found {shown!r}, allowed IP addresses, localhost and the names of {self._setting}"


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")
