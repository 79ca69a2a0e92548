"""A list of engines that changes: a file with an address in each line, or the addresses of a name.

    FILE               read again when it changes; empty lines, and those that begin with #, do not count
    dns://name:port    every address of the name, each an engine at http://address:port

A list that cannot be read leaves the engines as they are; the reason is logged once.
"""

import asyncio
import socket
from pathlib import Path

import structlog

from kv_runtime.http.hosts import url_of
from router.config.worker_address import DNS, WORKERS_MAX, WorkerAddress, worker_address

_BYTES_MAX = 1 << 20
FILE_PERIOD_S, DNS_PERIOD_S = 1.0, 5.0

_log = structlog.get_logger("workers")


class WorkerList:
    """The list at `place`."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._problem = ""
        self.period_s = DNS_PERIOD_S if place.startswith(DNS) else FILE_PERIOD_S
        """How long to wait before it is read again."""

    async def read(self) -> tuple[WorkerAddress, ...] | None:
        """Return what is in the list now; None if it cannot be read."""
        try:
            texts = await (self._resolved() if self._place.startswith(DNS) else asyncio.to_thread(self._lines))
            found = _addresses(texts)
        except (OSError, ValueError) as error:
            if self._problem != str(error):
                _log.warning("worker_list_unreadable", list=self._place, reason=str(error))
            self._problem = str(error)
            return None
        self._problem = ""
        return found

    def _lines(self) -> list[str]:
        with Path(self._place).open("rb") as file:
            content = file.read(_BYTES_MAX + 1)
        if len(content) > _BYTES_MAX:
            raise ValueError(f"found more than {_BYTES_MAX} bytes, allowed {_BYTES_MAX}")
        lines = (line.strip() for line in content.decode().splitlines())
        return [line for line in lines if line and not line.startswith("#")]

    async def _resolved(self) -> list[str]:
        name, _, port = self._place.removeprefix(DNS).rpartition(":")
        found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        hosts = sorted({str(each[4][0]) for each in found})
        return [url_of(host, int(port)) for host in hosts]


def _addresses(texts: list[str]) -> tuple[WorkerAddress, ...]:
    if len(texts) > WORKERS_MAX:
        raise ValueError(f"found {len(texts)} engines, allowed {WORKERS_MAX}")
    return tuple(dict.fromkeys(map(worker_address, texts)))
