"""The address of an engine that the router attaches: `URL[,OPTION=VALUE...]`, the same in flags, YAML and lists.

engine             which engine it is, as the agent's `engine.kind`; without it the engine says
kv-events          tcp://host:port of rank 0, `poll`, or `none`; without it the engine says, else its default
replay-endpoint    tcp://host:port of rank 0
id                 its name in the fleet; without it host and port
"""

import re
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator

from kv_protocol.ids import WORKER_ID_PATTERN

OPTIONS = ("engine", "kv-events", "replay-endpoint", "id")
WORKERS_MAX = 256
_ID_CHARACTERS_MAX = 64
_ALLOWED = "http(s)://host:port"
DNS = "dns://"
"""Begins the place of a list that is a name's addresses."""


class WorkerAddress(NamedTuple):
    """An engine's URL without a slash at its end, its name, and the options that are settings of its agent."""

    url: str
    worker_id: str
    engine: str = "auto"
    kv_events: str = ""
    replay_endpoint: str = ""


def worker_address(text: str) -> WorkerAddress:
    """Return the address in `text`.

    Raises:
        ValueError: names what was found and what is allowed.
    """
    url, *rest = text.strip().split(",")
    options = {name: value for name, _, value in (each.partition("=") for each in rest)}
    for name, value in options.items():
        if name not in OPTIONS or not value:
            raise ValueError(f"found {name}={value!r}, allowed {', '.join(OPTIONS)}, each with a value")
    host, port = _place(url)
    worker_id = options.get("id") or re.sub(r"[^a-z0-9]+", "-", f"{host}-{port}".lower()).strip("-")
    if not re.fullmatch(WORKER_ID_PATTERN, worker_id):
        raise ValueError(f"id: found {worker_id[:_ID_CHARACTERS_MAX]!r}, allowed ^{WORKER_ID_PATTERN}$")
    return WorkerAddress(
        url.rstrip("/"),
        worker_id,
        options.get("engine", "auto"),
        options.get("kv-events", ""),
        options.get("replay-endpoint", ""),
    )


def _place(url: str) -> tuple[str, int]:
    if "@" in url:
        raise ValueError(f"found an address with a user, allowed {_ALLOWED}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(f"found {url!r}, allowed {_ALLOWED}") from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ValueError(f"found {url!r}, allowed {_ALLOWED}")
    return host, port


def _checked(text: str) -> str:
    worker_address(text)
    return text


WorkerText = Annotated[str, AfterValidator(_checked)]
"""A setting with such an address."""


def check_place(place: str) -> str:
    """Return the place of a list; raise `ValueError` if a name lacks its port."""
    name, _, port = place.removeprefix(DNS).rpartition(":")
    if place.startswith(DNS) and not (name and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"found {place!r}, allowed a file, or dns://name:port")
    return place
