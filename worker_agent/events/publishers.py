"""Publishers of engine events: their configuration, and their ZeroMQ addresses, checked before a socket uses them.

    tcp://host:port    `*` is this machine: the engine binds it, we connect
    ipc://path         a socket of this machine

If each rank has its own publisher, rank r's is at port + r, or at path + `_dp<r>`; rank 0's is at the path itself.
Source: `docs/SOURCES.md` E3.5.
"""

import re
from typing import Annotated

from pydantic import Field, model_validator

from kv_protocol.ids import DP_RANK_MAX
from kv_runtime.config.sections import Section
from kv_runtime.http.hosts import is_loopback
from worker_agent.events.consolidation import Origin
from worker_agent.events.engine_event_subscriber import PublisherAddress
from worker_agent.events.mirror import ENGINE

PORT_MAX = 65_535
IPC_PATH_BYTES_MAX = 107
"""The longest path of a Unix socket's address, in bytes."""

_TCP = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_IPC = re.compile(r"ipc://\S+")


def checked_endpoint(field: str, value: str, *, allow_remote: bool) -> str:
    """Return `value` as an address to connect to.

    Raises:
        ValueError: it is no address, or remote without `allow_remote`; the error names field, found and allowed.
    """
    if _IPC.fullmatch(value) and len(value.encode()) - len("ipc://") <= IPC_PATH_BYTES_MAX:
        return value
    found = _TCP.fullmatch(value)
    if not found or not 1 <= int(found[2]) <= PORT_MAX:
        raise ValueError(f"{field}: found {value!r}, allowed tcp://host:port or ipc://path")
    host = "127.0.0.1" if found[1] == "*" else found[1]
    if not allow_remote and not is_loopback(host.strip("[]")):
        raise ValueError(f"{field}: found {value!r}, allowed this machine's own addresses unless allow_remote is true")
    return f"tcp://{host}:{found[2]}"


def rank_endpoints(field: str, value: str, ranks: int, *, allow_remote: bool) -> list[str]:
    """Return the address of each rank's publisher: as `value` lists them, between commas, or counted up from rank 0's.

    Raises:
        ValueError: an address or their number is not allowed, or a port would be beyond 65535.
    """
    stated = [checked_endpoint(field, each, allow_remote=allow_remote) for each in value.split(",")]
    if len(stated) not in (1, ranks):
        raise ValueError(f"{field}: found {len(stated)} addresses, allowed one, or one of each of {ranks} ranks")
    return [rank_endpoint(stated[0], dp_rank) for dp_rank in range(ranks)] if len(stated) == 1 else stated


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Return the address of the rank's own publisher; `endpoint` is rank 0's, and was checked.

    Raises:
        ValueError: the port would be beyond 65535.
    """
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{dp_rank}" if dp_rank else endpoint
    head, _, port = endpoint.rpartition(":")
    if int(port) + dp_rank > PORT_MAX:
        raise ValueError(f"{endpoint}: port {int(port) + dp_rank} of rank {dp_rank}, allowed up to {PORT_MAX}")
    return f"{head}:{int(port) + dp_rank}"


_RANK = Annotated[int, Field(ge=0, le=DP_RANK_MAX)]


class PublisherSection(Section):
    """One publisher of hop A."""

    source: str = Field(ENGINE, pattern="^[a-z0-9_-]{1,32}$", description="the source of its events: engine, host, ...")
    endpoint: str = Field(description="its PUB socket: tcp://host:port or ipc://path")
    replay_endpoint: str = Field("", description="its ROUTER socket; empty: it has none, and every gap is a loss")
    dp_rank: _RANK | None = Field(None, description="the one rank it speaks for; null: its batches say which")
    allow_remote: bool = Field(default=False, description="other machines' addresses too; what they say is believed")

    @model_validator(mode="after")
    def _endpoints(self) -> "PublisherSection":
        assert self.at  # raises ValueError, which names a wrong address
        return self

    @property
    def at(self) -> PublisherAddress:
        """Its addresses, as a subscriber connects to them."""
        replay = self.replay_endpoint
        return PublisherAddress(
            Origin(self.source, self.dp_rank),
            checked_endpoint("endpoint", self.endpoint, allow_remote=self.allow_remote),
            replay and checked_endpoint("replay_endpoint", replay, allow_remote=self.allow_remote),
        )
