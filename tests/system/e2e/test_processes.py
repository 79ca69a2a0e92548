"""`router --processes`: one router in several processes, of which any may be killed."""

import asyncio
import json
import re
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import pytest
from yarl import URL

from bench.processes import ChildProcess, FleetProcesses, FleetShape
from kv_runtime.clock import Clock
from tests.support.metric_families import COMMANDS, shown_families
from tests.system.e2e.client import MODEL, Client
from tests.system.e2e.typed import typed

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]

WAIT_S = 60.0
PROMPT = "one prefix of all, " * 40
QUIET = ("telemetry.log_level=error",)
SLOW = "engine.speed=0.2"
"""A stream of 100 tokens takes seconds."""


class Stream(NamedTuple):
    """One request: which router's process took it, and whether the answer came whole."""

    process: str
    is_whole: bool


class Routed(Client):
    """A client that opens a connection for each request, and the router of two serving processes that it asks."""

    router: ChildProcess

    async def control(self, path: str, method: str = "GET", body: Any = None) -> Any:
        url = URL(self.control_url + path, encoded=True)
        async with self.session.request(method, url, json=body) as response:
            return await response.json(content_type=None)

    async def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        return (await self.scrape()).total(name, **labels)

    async def ask(self, *, tokens: int = 2, began: Callable[[], None] = lambda: None) -> Stream:
        """Send a request."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "stream": True}
        async with self.session.post(f"{self.data_url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            process, answer = response.headers["x-decision-id"][:8], b""
            try:
                async for chunk in response.content.iter_any():
                    answer += chunk
                    began()
            except aiohttp.ClientPayloadError:
                return Stream(process, is_whole=False)
            return Stream(process, is_whole=answer.endswith(b"data: [DONE]\n\n"))

    async def asked(self, count: int) -> list[Stream]:
        """Send so many requests at once."""
        return await asyncio.gather(*(self.ask() for _ in range(count)))

    async def streams(self, count: int) -> "asyncio.Future[list[Stream]]":
        """Return streams of some seconds, all of which have begun."""
        begun = [asyncio.Event() for _ in range(count)]
        running = asyncio.gather(*(self.ask(tokens=100, began=each.set) for each in begun))
        async with asyncio.timeout(WAIT_S):
            for each in begun:
                await each.wait()
        return running

    async def until_both_serve(self) -> None:
        """Return once both processes accept requests: one that was started again may not do so yet."""

        async def is_so() -> bool:
            asked = await self.asked(40)
            assert all(each.is_whole for each in asked)
            return len({each.process for each in asked}) == 2

        await self.until(is_so)

    async def pid(self, name: str) -> int:
        """Return the process's id once it runs."""
        found = list[int]()

        async def is_up() -> bool:
            processes = (await self.control("/v1/processes"))["processes"]
            found.extend(int(each["pid"]) for each in processes if each["name"] == name and each["is_up"])
            return bool(found)

        await self.until(is_up)
        return found[-1]

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Return once it holds; a control plane that is away does not count."""
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    if await holds():
                        return
                except (aiohttp.ClientError, json.JSONDecodeError):
                    pass
                await Clock().sleep(0.05)

    async def kill(self, name: str) -> None:
        """Kill a process, and return once another is in its place."""
        before = await self.pid(name)
        psutil.Process(before).kill()

        async def is_another() -> bool:
            return await self.pid(name) != before

        await self.until(is_another)


@asynccontextmanager
async def fleet(*settings: str, speed: str = "engine.speed=5") -> AsyncIterator[Routed]:
    """A router of two serving processes and a worker run."""
    router = ("data.processes=2", *QUIET, *settings)
    shape = FleetShape(workers=1, worker_settings=(speed, *QUIET), router_settings=router)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with FleetProcesses(shape) as running, aiohttp.ClientSession(connector=connector) as session:
        made = Routed(session, running.data_url, running.control_url)
        made.router = running.router

        async def is_ready() -> bool:
            found = await made.control("/ready")
            return bool(found["ready"]) and not found["notes"]

        await made.until(is_ready)
        yield made


async def test_each_process_serves_from_one_port_knows_what_workers_hold_and_ends_with_a_killed_parent() -> None:
    async with fleet() as made:
        processes = set[str]()

        async def both_know() -> bool:
            asked = await made.asked(20)
            processes.update(each.process for each in asked)
            listed = (await made.control("/v1/decisions?limit=20"))["decisions"]
            assert {each.process for each in asked} == {each["decision_id"][:8] for each in listed}
            assert [each["age_s"] for each in listed] == sorted(each["age_s"] for each in listed)
            return len(processes) == 2 and all(each["overlap_blocks"] > 0 for each in listed)

        async def told() -> int:
            return int((await made.control("/v1/fleet"))["requests"]["decided_total"])

        async def all_are_told() -> bool:
            """Short requests are told once the processes have found each other."""
            before, before_ok = await told(), await made.total("requests_total", outcome="ok")
            await made.asked(20)
            assert await made.total("requests_total", outcome="ok") == before_ok + 20
            return await told() == before + 20

        async def all_are_in_the_trends() -> bool:
            rows = (await made.control("/v1/trends"))["rows"]
            return await made.total("requests_total") == sum(int(row["requests"]) for row in rows)

        async def offered() -> int:
            (group,) = (await made.control("/v1/planner"))["groups"]
            return round(float(group["offered"]["requests_per_s"]) * float(group["offered"]["covered_s"]))

        async def all_are_planned_for() -> bool:
            before = await offered()
            await made.asked(10)
            return await offered() == before + 10

        await made.until(both_know)
        await made.until(all_are_told)
        await made.until(all_are_in_the_trends)
        await made.until(all_are_planned_for)
        tree = await made.control("/v1/prefix-tree?order_by=heat")
        assert tree["outline"]["heat_requests"] == await told(), "the requests of both processes make prefixes warm"
        assert (tree["nodes"][0]["heat"] > 0, tree["nodes"][0]["ranks"][0]["worker_id"]) == (True, "w0")
        newest = (await made.control("/v1/decisions?limit=1"))["decisions"][0]["decision_id"]
        assert (await made.control(f"/v1/decisions/{newest}"))["decision"]["decision_id"] == newest
        assert (await made.control("/v1/decisions/none"))["error"]["param"] == "id"
        assert (await made.control("/v1/index"))["ranks"][0]["blocks"]["gpu"] > 0
        assert (await made.control("/v1/predictions"))["window"] == 64
        async with made.session.get(f"{made.control_url}/metrics") as response:
            assert shown_families(await response.text()) == COMMANDS["router"].keys()
        children = psutil.Process(made.router.pid).children(recursive=True)
        assert len(children) == 5  # two that serve, a nats-server, and what `multiprocessing` has: two more
        await made.router.end(signal.SIGKILL)
        gone, alive = await asyncio.to_thread(psutil.wait_procs, children, WAIT_S)
        assert (len(gone), alive) == (5, [])


async def test_shadows_of_all_processes_are_one() -> None:
    async with fleet() as made:
        shadows = {"policies": [{"name": "turns", "policy": {"mode": "round-robin"}}], "budget_us": 10_000}
        assert (await made.control("/v1/shadows", "PUT", shadows))["requests"] == 0
        processes = set[str]()
        while len(processes) < 2:
            processes.add((await made.ask()).process)

        async def all_are_evaluated() -> bool:
            page = await made.control("/v1/shadows")
            return bool(page["requests"] >= 2 and page["shadows"][0]["decisions"] == page["requests"])

        await made.until(all_are_evaluated)
        assert await made.total("shadow_decisions_total", verdict="agree") > 0
        await made.control("/v1/shadows", "PUT", {"budget_us": 777})
        await made.control("/v1/shadows", "PUT", {"policies": shadows["policies"]})  # the budget stays
        for name in ("serving-0", "serving-1"):
            await made.kill(name)
            await made.until_both_serve()
        assert (await made.control("/v1/shadows"))["budget_us"] == 777
        assert (await made.control("/v1/shadows", "DELETE"))["shadows"] == []


async def test_a_killed_serving_process_loses_its_own_streams_alone_and_a_stopped_router_none() -> None:
    async with fleet(speed=SLOW) as made:
        running = await made.streams(24)
        await made.kill("serving-0")
        outcomes = defaultdict(set)
        for each in await running:
            outcomes[each.process].add(each.is_whole)
        assert sorted(map(sorted, outcomes.values())) == [[False], [True]]
        await made.until_both_serve()
        assert await made.total("process_restarts_total") == 1
        running = await made.streams(12)
        await made.router.end(signal.SIGTERM)
        assert all(each.is_whole for each in await running)
        assert await made.router.until_ended() == 0


async def test_a_process_that_stands_still_is_killed_and_started_again_and_the_others_go_on() -> None:
    async with fleet(speed=SLOW) as made:
        frozen = psutil.Process(await made.pid("serving-0"))
        frozen.suspend()

        async def is_another() -> bool:
            return await made.pid("serving-0") != frozen.pid

        await made.until(is_another)
        await made.until_both_serve()
        assert await made.total("process_silent_calls_total") >= 2
        assert await made.total("process_up") == 2


async def test_a_changed_policy_and_a_drain_are_in_force_in_all_processes(tmp_path: Path) -> None:
    async with fleet(f"state.dir={tmp_path}") as made:
        changed = await made.control("/v1/policy", "PATCH", {"mode": "round-robin"})
        assert changed["mode"] == "round-robin"
        await made.kill("serving-1")
        await made.kill("serving-0")
        await made.until_both_serve()
        assert await made.control("/v1/policy", "PATCH", {"temperature": 0.5}) == changed | {"temperature": 0.5}
        await made.asked(40)
        listed = (await made.control("/v1/decisions?limit=40"))["decisions"]
        assert {each["policy"] for each in listed} == {"round-robin"}
        assert (await made.control("/v1/policy", "PATCH", {"mode": "none"}))["error"]["param"] == "policy"
        assert (await made.control("/v1/policy", "DELETE"))["mode"] == "kv"
        await made.asked(20)
        listed = (await made.control("/v1/decisions?limit=20"))["decisions"]
        assert {each["policy"] for each in listed} == {"kv"}
        begun = await made.control("/v1/workers/w0/drain", "POST", {"handover_tokens": 100})
        assert begun["published"]["worker_id"] == "w0"
        shown = await made.control("/v1/workers/w0/drain?wait=30")
        assert (shown["state"], shown["handover"]["budget_tokens"]) == ("drained", 100)
        ended = await made.control("/v1/workers/w0/drain", "DELETE")
        assert (ended["published"]["worker_id"], ended["drain"]["state"]) == ("w0", "serving")
        assert (await made.control("/v1/workers/none/drain"))["error"]["param"] == "id"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("ledger.replicas=false",), "ledger.replicas: found false, allowed true"),
        (("data.processes=65",), "data.processes: found 65"),
        (("nats.url=nats://127.0.0.1:1",), r"process serving-[01] ended with exit code 1 before it had started"),
    ],
)
async def test_what_cannot_run_in_processes_is_said(settings: tuple[str, ...], message: str) -> None:
    assigned = [part for each in settings for part in ("--set", each)]
    command = ["-m", "router", "--processes", "2", "--port", "0", "--control-port", "0", *assigned]
    if "data.processes=65" in settings:
        command.remove("--processes")
        command.remove("2")
    ended = await typed(*command)
    assert ended.code == 1
    assert re.search(message, ended.err), ended.err
