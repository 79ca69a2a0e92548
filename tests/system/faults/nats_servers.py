"""What is done to real nats-servers beside ending them, and what is awaited of those that lead streams together."""

import json
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from os import kill
from pathlib import Path
from typing import NamedTuple

from nats.errors import Error as NatsError

from bench.processes import ChildProcess
from kv_runtime.clock import Clock
from tests.system.faults.stream_reader import connected_to

_LOOK_S, _WITHIN_S = 0.1, 20.0
LAME_DUCK_GRACE_S = 1
"""From the word to the clients until the first of them is shut out; one follows every second at the latest."""


class Limits(NamedTuple):
    """What may be set differently at each start."""

    file_store_bytes: int = 1 << 32
    write_deadline_s: float = 10.0
    """How long a client may take nothing before it is cut off as a slow consumer."""


def configure(server: ChildProcess, limits: Limits) -> None:
    """Change what the server will read when it starts."""
    file = Path(server.command[-1])
    tree = json.loads(file.read_text())
    tree["jetstream"]["max_file_store"] = limits.file_store_bytes
    tree["write_deadline"] = f"{limits.write_deadline_s}s"
    tree["lame_duck_grace_period"] = f"{LAME_DUCK_GRACE_S}s"
    tree["lame_duck_duration"] = "30s"  # the least that is allowed; with a few clients it takes less
    file.write_text(json.dumps(tree))


def lose_store(server: ChildProcess) -> None:
    """What was kept is gone; while the server does not run."""
    shutil.rmtree(Path(server.command[-1]).parent / "jetstream")


async def retire(server: ChildProcess) -> None:
    """It takes no new clients, and shuts out those it has, one after another: it is a lame duck."""
    kill(server.pid, signal.SIGUSR2)
    await server.line_with("Entering lame duck mode")


async def until_led_by(urls: Sequence[str], stream: str, leader: str, size: int) -> None:
    """Return once `size` servers have the whole stream, and `leader` leads them: it is asked to."""
    found = "not asked"
    async with connected_to(urls) as client:
        for _ in range(round(_WITHIN_S / _LOOK_S)):
            with suppress(NatsError):
                cluster = (await client.jetstream().stream_info(stream)).cluster
                found = str(cluster)
                replicas = (cluster.replicas if cluster else None) or []
                if cluster and sum(bool(each.current) for each in replicas) == size - 1:
                    if cluster.leader == leader:
                        return
                    wish = json.dumps({"placement": {"preferred": leader}}).encode()
                    await client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}", wish)
            await Clock().sleep(_LOOK_S)
    raise AssertionError(f"{stream} is not led by {leader} on {size} servers after {_WITHIN_S} s: {found}")


async def until_all_led(urls: Sequence[str], streams: set[str]) -> None:
    """Return once the servers that are left have leaders of these streams, and of themselves."""
    led: set[str] = set()
    async with connected_to(urls) as client:
        for _ in range(round(_WITHIN_S / _LOOK_S)):
            with suppress(NatsError):
                led = {info.config.name or "" for info in await client.jetstream(timeout=1.0).streams_info()}
                if streams <= led:
                    return
            await Clock().sleep(_LOOK_S)
    raise AssertionError(f"{streams - led} have no leader after {_WITHIN_S} s")
