"""`configs/nats/nats.conf` in a real nats-server: each role's component works as its user, and may do nothing else."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import nats
from nats.aio.client import Client as NatsClient

from bench.processes import ChildProcess
from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.nats_server import find_binary
from tests.support.paths import ROOT
from tests.support.processes import running
from tests.system.integration.broker import eventually

CONFIGURATION = ROOT / "configs" / "nats" / "nats.conf"
ROLES = ("agent", "router", "indexer", "observer")
MODEL, RANK = "sim-8b", WorkerRank("w0", 0)
KEYS = "nats.fleet_keys=[0123456789abcdef0123456789abcdef]"


def password_of(role: str) -> str:
    return f"password-of-{role}"


class Server(NamedTuple):
    """The server, as nats.conf describes it but for port and store."""

    process: ChildProcess
    port: int

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def violations(self) -> list[str]:
        """What the server refused, as far as its log still has it."""
        return [line for line in self.process.output.splitlines() if "Violation" in line]

    async def client(self, role: str, errors: list[str] | None = None) -> NatsClient:
        """Return a connection as a role's user, that adds what it is refused to `errors`."""

        async def erred(error: Exception) -> None:
            if errors is not None:
                errors.append(str(error).lower())

        return await nats.connect(self.url, user=role, password=password_of(role), error_cb=erred)


@asynccontextmanager
async def running_server(directory: Path) -> AsyncIterator[Server]:
    variables = {f"KV_NATS_{role.upper()}_PASSWORD": password_of(role) for role in ROLES}
    command = [find_binary(), "--config", str(CONFIGURATION), "--port", "-1"]
    async with running(ChildProcess("nats", command), KV_NATS_STORE=str(directory / "store"), **variables) as process:
        listening = await process.line_with("Listening for client connections on")
        await process.line_with("Server is ready")
        yield Server(process, int(listening.rpartition(":")[2]))


def command(server: Server, role: str, module: str, *arguments: str, last: Sequence[str] = ()) -> list[str]:
    """Return the command line of a process that connects as a role's user and shares the fleet's key."""
    login = ("--nats-url", server.url, "--set", f"nats.user={role}", "--set", f"nats.credentials={password_of(role)}")
    return [sys.executable, "-m", module, *arguments, *login, "--set", KEYS, *last]


async def run(server: Server, group: asyncio.TaskGroup, role: str, module: str, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of a command that ends by itself."""
    process = ChildProcess(module, command(server, role, module, *arguments))
    await process.start(group)
    return await process.until_ended(), process.output


async def test_each_role_s_component_works_as_its_user_and_a_request_is_served(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server, asyncio.TaskGroup() as group:
        router = ChildProcess(
            "router",
            command(server, "router", "router", "--port", "0", "--set", "control.port=0", "--set", "journal.router=r0"),
        )
        serving = ("serve", "--worker-id", "w0", "--set", "encode.form=embeddings")
        agent = ChildProcess("agent", command(server, "agent", "worker_agent", *serving))
        attaching = ("attach", "--worker-id", "c0", "--model", MODEL, "--kv-events", f"ipc://{tmp_path}/events")
        attached = ChildProcess("attached", command(server, "agent", "worker_agent", *attaching))
        snapshots = ("--set", "nats.snapshot_period_s=1")
        indexer = ChildProcess("indexer", command(server, "indexer", "indexer", "serve", "--port", "0", *snapshots))
        processes = [router, agent, attached, indexer]
        await router.start(group)
        data_url = (await router.line_with("router on")).split()[2]
        control_url = (await router.line_with("control plane")).split()[2]
        for process in processes[1:]:
            await process.start(group)
        await agent.line_with("worker_registered")
        index_url = (await indexer.line_with("index on")).split()[2]
        await attached.line_with("streams of c0")
        try:
            async with aiohttp.ClientSession() as session:
                assert await overlap_of_the_second(session, data_url) > 0
                await eventually_in(session, f"{index_url}/metrics", r"kvrouter_snapshot_age_seconds \d")
            looks: list[tuple[str, set[int], tuple[str, ...]]] = [
                ("indexer", {0}, ("verify", "--index-url", index_url)),
                ("indexer", {0}, ("at", "--time", "0")),
                ("indexer", {0}, ("dump", "--snapshot", "newest", "--out", str(tmp_path / "blocks"))),
                ("router", {0}, ("replay",)),
                ("router", {0}, ("report", "--journal")),
                ("router", {0}, ("explain", "--last", "--journal")),
                ("router", {0, 1}, ("what-if", "--modes", "round-robin", "--requests", "10")),
                ("router", {0, 1}, ("doctor", "--router", control_url, "--data", data_url)),
            ]
            for module, expected, look in looks:
                code, output = await run(server, group, "observer", module, *look)
                assert code in expected, output
                assert "ermission" not in output
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{control_url}/v1/workers/w0/drain", data=b'{"handover_tokens": 0}') as answer:
                    assert answer.status == 202
                refused = 'kvrouter_fleet_refused_total{reason="signature"} 0.0'
                assert refused in await text(session, f"{control_url}/metrics")
            assert not server.violations
        finally:
            for process in reversed(processes):
                await process.end(signal.SIGTERM)
        assert not server.violations, "their ends are allowed, too"


async def overlap_of_the_second(session: aiohttp.ClientSession, data_url: str) -> int:
    """Return the overlap of a request that was sent before, once the index knows its blocks."""
    body = {"model": MODEL, "prompt": "a" * 400, "max_tokens": 2}
    async with asyncio.timeout(60):
        while True:
            async with session.post(f"{data_url}/v1/completions", json=body) as answer:
                if answer.status == 200 and (overlap := int(answer.headers["x-overlap-blocks"])):
                    return overlap
            await Clock().sleep(0.1)


async def text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        return await answer.text()


async def eventually_in(session: aiohttp.ClientSession, url: str, pattern: str) -> None:
    async with asyncio.timeout(30):
        while not re.search(pattern, await text(session, url)):
            await Clock().sleep(0.1)


EVENTS, FLEET, BEAT = subjects.events(MODEL, RANK), subjects.fleet(MODEL, "w0"), subjects.heartbeat(MODEL, RANK)
LOAD, RECOVER, JOURNAL = subjects.load(MODEL, RANK), subjects.recover(MODEL, RANK), subjects.journal("r0")
LEDGER, SNAPSHOT, ANSWER = subjects.LEDGER, "$O.KV_SNAPSHOTS.M.x", "_INBOX.of.another"
DELETE, PURGE = "$JS.API.STREAM.DELETE.KV_FLEET", "$JS.API.STREAM.PURGE.KV_FLEET"
EVERYTHING = {EVENTS, FLEET, BEAT, LOAD, RECOVER, JOURNAL, LEDGER, SNAPSHOT, ANSWER, DELETE, PURGE}
MAY_PUBLISH = {
    "agent": {EVENTS, FLEET, BEAT, LOAD},
    "router": {FLEET, RECOVER, JOURNAL, LEDGER, SNAPSHOT},
    "indexer": {RECOVER, SNAPSHOT},
    "observer": {RECOVER},
}
MAY_SUBSCRIBE = {
    "agent": {RECOVER, FLEET, BEAT},
    "router": {FLEET, BEAT, LOAD, LEDGER},
    "indexer": {FLEET, BEAT},
    "observer": {FLEET, BEAT, LOAD},
}


async def test_no_role_may_publish_or_subscribe_to_what_is_not_its_own(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for role in ROLES:
            await expect_refused(server, role, "publish", EVERYTHING - MAY_PUBLISH[role])
            await expect_refused(server, role, "subscribe", EVERYTHING - MAY_SUBSCRIBE[role] - {ANSWER})


async def expect_refused(server: Server, role: str, what: str, expected: set[str]) -> None:
    """Of all subjects the server refuses the role these."""
    errors = list[str]()
    client = await server.client(role, errors)
    for subject in EVERYTHING:
        if what == "publish":
            await client.publish(subject, b"{}")
        else:
            await client.subscribe(subject)
    await client.flush()
    await eventually(lambda: len(errors) >= len(expected), f"{role} {what}: {errors}")
    await client.close()
    refused = {subject for subject in EVERYTHING if any(f'"{subject.lower()}"' in error for error in errors)}
    assert refused == expected, (role, what)


async def test_a_wrong_or_missing_password_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server, asyncio.TaskGroup() as group:
        wrong = command(server, "agent", "worker_agent", "serve", last=("--set", "nats.credentials=wr0ng"))
        process = ChildProcess("agent", wrong)
        await process.start(group)
        assert await process.until_ended() == 1
        assert f"worker-agent: nats.url {server.url}: " in process.output
        assert "wr0ng" not in process.output
