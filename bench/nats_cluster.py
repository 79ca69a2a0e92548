"""nats-servers on loopback that keep the streams together: a configuration and a store for each."""

import json
from pathlib import Path
from typing import Any

from bench.ports import free_ports
from kv_runtime.nats_server import HOST, MAX_PAYLOAD_BYTES, find_binary

READY = "Server is ready"
LED = "metadata leader"
"""What each server's log says once several have one that leads them."""
_STORE_BYTES = 8 << 30


class NatsCluster:
    """The servers nats-0, nats-1, ...: their addresses, and the commands that start them."""

    def __init__(self, servers: int, directory: Path) -> None:
        """The directory gets the configurations and the stores."""
        ports = free_ports(2 * servers)
        self._clients, self._routes = ports[:servers], ports[servers:]
        self._directory = directory

    @property
    def url(self) -> str:
        """All addresses, by commas."""
        return ",".join(f"nats://{HOST}:{port}" for port in self._clients)

    def commands(self) -> dict[str, list[str]]:
        """Write the configurations; return the command of each server by its name."""
        return {f"nats-{number}": self._command(number) for number in range(len(self._clients))}

    def _command(self, number: int) -> list[str]:
        directory = self._directory / f"nats-{number}"
        directory.mkdir()
        own = self._routes[number]
        configuration: dict[str, Any] = {
            "server_name": directory.name,
            "listen": f"{HOST}:{self._clients[number]}",
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": {"store_dir": str(directory), "max_file_store": _STORE_BYTES, "max_memory_store": 64 << 20},
        }
        if others := [f"nats://{HOST}:{port}" for port in self._routes if port != own]:
            configuration["cluster"] = {"name": "kv", "listen": f"{HOST}:{own}", "routes": others}
        file = directory / "nats.conf"
        file.write_text(json.dumps(configuration), encoding="utf-8")
        return [find_binary(), "--config", str(file)]
