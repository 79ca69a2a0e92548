"""Names by which a server may be called, so that a page of another site cannot reach it under a name of its own.

A browser lets a page talk to the site that the page is from. Whoever owns that site's name can let it point to this
server (DNS rebinding), and is given away by `Host` alone:

| `Host` names | served |
|---|---|
| an IP address, `localhost` | always: no foreign name server was asked |
| the name that the server is bound to, a name of the setting | always; `*` in the setting allows all |
| this machine's own name | unless the server is bound to loopback |
| any other name, what is neither host nor host:port, nothing | never |

A request of HTTP/1.0 without `Host` is served: a browser sends one.
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
    """Return whether `host` can be reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked_name(name: str) -> str:
    lower = name.lower()
    if lower != ANY and not _NAME.fullmatch(lower):
        raise ValueError(f"found {name!r}, allowed a host's name without scheme and port, or *")
    return lower


def _checked_origin(origin: str) -> str:
    lower = origin.lower()
    if lower != ANY and not _ORIGIN.fullmatch(lower):
        raise ValueError(f"found {origin!r}, allowed http(s)://host, or http(s)://host:port, or *")
    return lower


HostName = Annotated[str, AfterValidator(_checked_name)]
"""A name that a server may be called by, in lower case; `*`: any."""
WebOrigin = Annotated[str, AfterValidator(_checked_origin)]
"""What a browser sends as `Origin`, in lower case; `*`: any."""


class HostNames:
    """The names of one server."""

    def __init__(self, bound: str, named: Iterable[str] = (), *, setting: str = "control.hosts") -> None:
        """`bound` is the address that it listens at, `named` what `setting` says."""
        own = set() if is_loopback(bound) else {socket.gethostname().lower()}
        self._names = {"localhost", bound.lower(), *own, *named}
        self._setting = setting

    def refusal(self, host: str) -> str:
        """Return why a request with this `Host` is refused; empty where it is served."""
        shown = host[:_SHOWN_CHARACTERS]
        if not _HOST.fullmatch(host):
            return f"host: found {shown!r}, allowed host or host:port"
        name = _without_port(host)
        if name in self._names or ANY in self._names or _is_address(name):
            return ""
        return f"host: found {shown!r}, allowed IP addresses, localhost and the names of {self._setting}"


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
