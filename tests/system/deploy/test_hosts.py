"""`docs/DEPLOY.md`, "On hosts of your own": its files and commands on loopback, and the units of systemd."""

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.processes import ChildProcess, free_ports
from tests.support.paths import ROOT
from tests.system.e2e.computing_engines import ComputingVllm
from tests.system.integration.event_path import zmq_context

UNITS = sorted((ROOT / "configs" / "systemd").iterdir())
GUIDE = (ROOT / "docs" / "DEPLOY.md").read_text().partition("## On hosts of your own")[2].partition("\n## ")[0]
PROGRAMS = Path(sys.executable).parent
EXPOSURE_MAX = 20
"""Of 100, as `systemd-analyze security` counts it times ten; services that are not confined have 96."""


def settings(unit: str) -> dict[str, str]:
    text = (ROOT / "configs" / "systemd" / f"{unit}.service").read_text()
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_valid_and_confined(unit: Path, tmp_path: Path) -> None:
    here = tmp_path / unit.name
    here.write_text(unit.read_text().replace("/opt/kv-router/bin", str(PROGRAMS)))
    security = ["security", "--offline=yes", f"--threshold={EXPOSURE_MAX}"]
    for command in (["verify"], security):
        ran = subprocess.run(
            ["systemd-analyze", *command, here], capture_output=True, text=True, check=False, timeout=60
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout


class Hosts(NamedTuple):
    """Both hosts of the guide, here: its directories and addresses are these."""

    group: asyncio.TaskGroup
    local: dict[str, str]

    def translated(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, self.local)), lambda found: self.local[found[0]], text)

    async def run(self, script: str) -> str:
        """Return what a script prints, which must succeed."""
        shell = ChildProcess("sh", ["/bin/sh", "-ec", f"cd {ROOT}\n{self.translated(script)}"])
        await shell.start(self.group)
        assert await shell.until_ended() == 0, shell.output
        return shell.output

    async def start(self, unit: str, ready: str) -> ChildProcess:
        """Start what a unit starts, with its variables; return once it has printed `ready`."""
        service = {name: self.translated(value) for name, value in settings(unit).items()}
        lines = [*read(service["EnvironmentFile"]), service.get("Environment", "")]
        process = ChildProcess(unit, shlex.split(service["ExecStart"]))
        await process.start(self.group, dict(line.split("=", 1) for line in filter(None, lines)))
        await process.line_with(ready)
        return process


def read(file: str) -> list[str]:
    return Path(file).read_text().splitlines()


async def test_the_two_hosts_of_the_guide_serve_and_the_doctor_finds_no_error(tmp_path: Path) -> None:
    (secrets, look), (router, agent) = blocks("sh"), blocks("yaml")
    engine = ComputingVllm(model="qwen3-0.6b")
    async with asyncio.TaskGroup() as group, AsyncExitStack() as cleanup:
        await cleanup.enter_async_context(engine.computing(await cleanup.enter_async_context(zmq_context())))
        hosts = Hosts(
            group,
            {
                "/etc/kv-router": str(tmp_path),
                "/opt/kv-router/bin": str(PROGRAMS),
                "/var/lib": str(tmp_path),
                '"http://10.0.0.2:8100"': f'"{engine.url}", publish_endpoint: "{engine.events}"',
                "/models/qwen3-0.6b": "byte",
                "10.0.0.1": "127.0.0.2",
                "10.0.0.2": "127.0.0.3",
                **dict(zip(("4222", "8000", "8001", "9001"), map(str, free_ports(4)), strict=True)),
            },
        )
        (tmp_path / "router.yaml").write_text(hosts.translated(router))
        (tmp_path / "agent.yaml").write_text(hosts.translated(agent))
        await hosts.run(secrets)
        starts = (("kv-nats", "Server is ready"), ("kv-router", "router on"), ("kv-agent", "worker_registered"))
        for unit, ready in starts:
            process = await hosts.start(unit, ready)
            cleanup.push_async_callback(process.end)
        said = await hosts.run(look)
    workers = re.findall(r"x-worker-instance-id: (\S+)", said, re.IGNORECASE)
    overlaps = re.findall(r"x-overlap-blocks: (\d+)", said, re.IGNORECASE)
    assert (workers, overlaps[0], overlaps[1] != "0") == (["vllm-0", "vllm-0"], "0", True), said
