"""What the chart starts, as processes on loopback: files, arguments and variables are those that helm rendered."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from bench.processes import ChildProcess, free_ports
from kv_runtime.clock import Clock
from kv_runtime.nats_server import find_binary
from tests.system.deploy.chart import Manifest, Release, needs_helm, pod_specs, rendered
from tests.system.e2e.computing_engines import Computing, ComputingSglang, ComputingVllm
from tests.system.integration.event_path import zmq_context

PROMPT = "All hosts are equal. " * 10
STARTED = {
    "nats": ((find_binary(),), "Server is ready"),
    "router": ((sys.executable, "-m", "router"), "router on"),
    "indexer": ((sys.executable, "-m", "indexer"), "index on"),
    "agent": ((sys.executable, "-m", "worker_agent"), "worker_registered"),
    "worker": ((sys.executable, "-m", "worker_agent"), "worker_registered"),
}
"""Containers in the order in which they are started: what images have as entrypoint, and the line that says it runs."""
SECRET = {"worker-token": "token-of-workers", "control-token": "token-of-control"}
PORTS = ("4222", "8222", "9000", "9001", "8000", "8001", "8002")
WAIT_S = 40.0

pytestmark = needs_helm


class Here(NamedTuple):
    """What a cluster's names, addresses and directories are on this machine."""

    local: dict[str, str]

    def translated(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, self.local)), lambda found: self.local[found[0]], text)

    def command(self, container: Manifest) -> tuple[list[str], dict[str, str]]:
        """Return command and variables of a container, as the kubelet makes them."""
        variables = dict[str, str]()

        def expanded(text: str) -> str:
            return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], self.translated(text))

        for each in container["env"]:
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                is_address = source["fieldRef"]["fieldPath"] == "status.podIP"
                variables[each["name"]] = "127.0.0.1" if is_address else f"{container['name']}-0"
            elif "secretKeyRef" not in source:
                variables[each["name"]] = expanded(each["value"])
            elif source["secretKeyRef"]["key"] in SECRET:
                variables[each["name"]] = SECRET[source["secretKeyRef"]["key"]]
            else:
                assert source["secretKeyRef"]["optional"]
        return [*STARTED[container["name"]][0], *map(expanded, container["args"])], variables

    def probes(self, container: Manifest) -> set[str]:
        """Return the addresses that the kubelet asks."""
        numbers = {each.get("name"): each["containerPort"] for each in container["ports"]}
        asked = [probe["httpGet"] for name, probe in container.items() if name.endswith("Probe") and "httpGet" in probe]
        return {
            f"http://127.0.0.1:{self.local[str(numbers.get(each['port'], each['port']))]}{each['path']}"
            for each in asked
        }


@asynccontextmanager
async def installed(release: Release, engine: Computing, directory: Path) -> AsyncIterator[str]:
    """One container of each kind runs beside the engine, and answers its probes; the value is the data plane's URL."""
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    own = {"router": {"data": "8000", "control": "8001"}, "indexer": {"control": "8002"}}
    settings = [
        f"{name}.config.{plane}.port={ports[port]}" for name, planes in own.items() for plane, port in planes.items()
    ]
    objects = rendered(release._replace(values=",".join([release.values, "nats.replicas=1", *settings]).lstrip(",")))
    here = Here(
        {
            "http://$(POD_IP):8000": engine.url,
            "dns://kv-worker:8000": engine.url.replace("http://127.0.0.1", "dns://localhost"),
            "tcp://127.0.0.1:5557": engine.events,
            "/models/qwen3-0.6b": "byte",
            "/etc/nats": str(directory),
            "/etc/kv-router": str(directory),
            "/data": str(directory / "data"),
            "0.0.0.0": "127.0.0.1",  # noqa: S104 - what is not bound here
            "kv-nats:": "127.0.0.1:",
            **ports,
        }
    )
    for each in objects:
        for name, text in each.get("data", {}).items():
            (directory / name).write_text(here.translated(text))
    containers = {one["name"]: one for each in objects for spec in pod_specs(each) for one in spec["containers"]}
    async with asyncio.TaskGroup() as group, AsyncExitStack() as cleanup:
        for name in filter(containers.__contains__, STARTED):
            command, variables = here.command(containers[name])
            process = ChildProcess(name, command)
            await process.start(group, variables)
            cleanup.push_async_callback(process.end)
            await process.line_with(STARTED[name][1])
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        for address in [one for name in STARTED if name in containers for one in here.probes(containers[name])]:
            await answered(session, address)
        yield f"http://127.0.0.1:{ports['8000']}"


async def answered(session: aiohttp.ClientSession, address: str) -> None:
    """Return once the address is answered with 200."""
    async with asyncio.timeout(WAIT_S):
        while True:
            async with session.get(address) as answer:
                if answer.status == 200:
                    return
            await Clock().sleep(0.05)


@pytest.mark.parametrize(
    "release",
    [
        Release(values="indexer.enabled=true"),
        Release(("vllm",)),
        Release(("sglang",)),
        Release(("sglang",), "attach=router"),
    ],
    ids=str,
)
async def test_a_prompt_that_comes_again_finds_its_prefix(release: Release, tmp_path: Path) -> None:
    model = "qwen3-0.6b" if release.files else "sim-8b"
    engine = (ComputingSglang if "sglang" in release.files else ComputingVllm)(model=model)
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
    async with AsyncExitStack() as cleanup, asyncio.timeout(3 * WAIT_S):
        await cleanup.enter_async_context(engine.computing(await cleanup.enter_async_context(zmq_context())))
        session = await cleanup.enter_async_context(aiohttp.ClientSession())
        address = await cleanup.enter_async_context(installed(release, engine, tmp_path))
        overlap = "0"
        while overlap == "0":
            async with session.post(f"{address}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                overlap = answer.headers["x-overlap-blocks"]
