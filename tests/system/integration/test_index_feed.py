"""The index on a real log: what a scripted consolidator says is what it holds, whatever befell the messages."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from bench.processes import ChildProcess
from indexer.commands.http import index_app
from indexer.follow.fold import TICK_S, RankView
from kv_protocol import subjects
from kv_runtime.clock import Clock
from kv_runtime.config.sections import IndexSection
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.telemetry import new_registry
from router.config import RouterSettings
from router.control_plane import ControlPlane
from router.decision.routing import Routing
from router.decision.state import RouterState, StateSettings
from router.fleet.registry import TextDigests
from tests.support.metric_families import COMMANDS, shown_families
from tests.support.processes import running
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.index_on_log import WAIT_S, Index, gpu, running_index
from tests.system.integration.scripted_rank import MODEL, ScriptedRank
from tests.system.integration.serving import Api, serving

NOTHING = (0, 0, 0, 0)
SMALL = IndexSection(memory_bytes_max=1 << 20)
TOO_MANY_BLOCKS = 40_000
"""More than there is room for, of one rank."""


@pytest_asyncio.fixture
async def index(broker: Broker, log: EventLog) -> AsyncIterator[Index]:  # noqa: ARG001 - it made the streams
    async with running_index(broker.url) as index:
        yield index


# ---------------------------------------------------------------- what is wrong is seen, asked about, and healed


@pytest.mark.parametrize("data", [b"", b"garbage" * 100])
async def test_bytes_that_cannot_be_read_make_the_rank_stale_until_a_dump_heals_it(
    index: Index, scripted: ScriptedRank, data: bytes
) -> None:
    await scripted.store(1, 2)
    await scripted.beat()
    await index.until_at(scripted)
    scripted.may_answer.clear()
    await scripted.store(3, parent=2, silently=True)
    await scripted.publish_raw(data)
    await index.until_stale(scripted.rank, "resyncing")
    assert index.view(scripted.rank, 1, 2, 3).overlap_blocks == gpu(2)
    await scripted.store(4, parent=3)
    scripted.may_answer.set()
    await index.until_at(scripted)
    assert index.view(scripted.rank, 1, 2, 3, 4) == RankView(gpu(4), 7, 3, "")
    assert scripted.dumps_asked == 1
    assert "kvrouter_index_refused_messages_total 1.0" in index.metrics()


# ---------------------------------------------------------------- what says nothing of a rank


async def test_heartbeats_fleet_events_and_chunks_that_cannot_be_read_are_counted_and_cost_nothing(
    index: Index, scripted: ScriptedRank, log: EventLog
) -> None:
    await scripted.store(1)
    await scripted.store(2, parent=1, silently=True)
    await scripted.store(3, parent=2)
    await index.until_stale(scripted.rank, "resyncing")
    await index.pass_time(0.6)
    await index.until_at(scripted)
    await scripted.beat()
    inbox = scripted.replied_to.removesuffix(".w0.0")
    for subject in ("kv.v1.heartbeat.m-1.w0.0", "kv.v1.heartbeat.x", f"{inbox}.w0.0", f"{inbox}.x", f"{inbox}.W.9.9"):
        await log.announce(subject, b"garbage")
    await log.publish("kv.v1.fleet.m-1.w0", b"garbage")
    await eventually(lambda: "refused_messages_total 6.0" in index.metrics())
    assert index.view(scripted.rank, 1) == RankView(gpu(1), 7, 3, "")
    assert list(index.index.statistics().streams) == [scripted.rank]


# ---------------------------------------------------------------- ranks come and go


async def test_a_rank_with_more_blocks_than_memory_is_overfull_where_people_look(
    broker: Broker, scripted: ScriptedRank
) -> None:
    with capture_logs() as lines:
        async with running_index(broker.url, settings=SMALL) as index:
            await scripted.store(*range(TOO_MANY_BLOCKS))
            await index.until_at(scripted)
            await scripted.beat()
            await index.until_stale(scripted.rank, "overfull")
            await index.pass_time(1.0)
            assert "kvrouter_index_overfull_ranks 1.0" in index.metrics()
            assert 'kvrouter_stream_stale{dp_rank="0",worker="w0"} 1.0' in index.metrics()
            assert scripted.dumps_asked == 0
            await index.until_at(scripted)
            await scripted.clear()
            await scripted.beat()
            await index.until_stale(scripted.rank, "")
            async with asyncio.timeout(WAIT_S):
                while "rank_not_overfull_any_more" not in [line["event"] for line in lines]:
                    await index.pass_time(TICK_S)  # a dump is asked, and answered over the log
    told = [(line["event"], line["log_level"], line["rank"]) for line in lines if "overfull" in line["event"]]
    assert told == [("rank_overfull", "warning", "w0/0"), ("rank_not_overfull_any_more", "info", "w0/0")]


def routing_on(index: Index) -> Routing:
    """Return the routing of a router without workers."""
    settings = RouterSettings()
    state = RouterState(StateSettings(text=TextDigests("", "")))
    return Routing(
        state,
        index.index,
        index.clock,
        settings.policy.policy(),
        seed=1,
        lease_s=300.0,
        decisions_max=1,
    )


async def test_a_full_index_is_ready_until_a_rank_is_refused_and_says_which(broker: Broker, log: EventLog) -> None:
    first, second = ScriptedRank(log, "w0"), ScriptedRank(log, "w1")
    handover: Any = None  # nothing is drained here
    async with (
        running_index(broker.url, settings=SMALL) as index,
        serving(index_app(index.index, new_registry(), token="")) as api,
        serving(ControlPlane(routing_on(index), index.index, log, handover).app(new_registry(), token="")) as router,
    ):
        await first.store(*range(TOO_MANY_BLOCKS))
        await index.until_at(first)
        await first.beat()
        await index.until_stale(first.rank, "overfull")
        assert await api.get("/ready") == (200, answered(stale={"w0/0": "overfull"}))
        await second.beat()
        await index.until_stale(second.rank, "refused")
        status, body = await api.get("/ready")
        assert (status, body["ready"], list(body["refused"])) == (503, False, ["w1/0"])
        assert str(SMALL.memory_bytes_max) in body["refused"]["w1/0"]
        assert (await api.get("/v1/ranks"))[1]["refused"] == body["refused"]
        assert (await router.get("/v1/index"))[1]["refused"] == body["refused"]


# ---------------------------------------------------------------- the log goes and comes


@pytest.mark.parametrize("store_lost", [False, True])
async def test_while_the_log_is_away_no_worker_is_forgotten_and_then_the_index_catches_up(
    broker: Broker, index: Index, scripted: ScriptedRank, log: EventLog, store_lost: bool
) -> None:
    await scripted.store(1, 2)
    await scripted.beat()
    await index.until_at(scripted)
    await broker.kill()
    await eventually(lambda: not index.log.is_connected and not log.is_connected)
    await index.pass_time(120.0)
    assert index.view(scripted.rank, 1, 2) == RankView(gpu(2), 7, 1, "log_away")
    if store_lost:
        broker.lose_store()
    await broker.start()
    await eventually(lambda: index.log.is_connected and log.is_connected)
    await index.pass_time(1.0)
    assert index.view(scripted.rank, 1, 2) == RankView(gpu(2), 7, 1, "")
    await ready(log)
    await scripted.store(3, parent=2)
    await scripted.beat()
    await index.until_at(scripted)
    assert index.view(scripted.rank, 1, 2, 3) == RankView(gpu(3), 7, 2, "")
    assert (index.happened("gaps", scripted.rank), scripted.dumps_asked) == (0, 0)
    await scripted.leave()
    await eventually(lambda: not index.index.statistics().streams)


async def ready(log: EventLog) -> None:
    """Return once something can be published again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await log.publish(subjects.fleet(MODEL, "unknown"), b"garbage")
            except BrokerUnavailable:
                await Clock().sleep(0.02)
            else:
                return


# ---------------------------------------------------------------- stand-alone: same questions, same answers


def answered(*, ready: bool = True, stale: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what `/ready` says of an index that has read the log and refuses no rank."""
    return {"ready": ready, "catching_up": "", "stale": stale or {}, "refused": {}}


@pytest_asyncio.fixture
async def api(index: Index) -> AsyncIterator[Api]:
    async with serving(index_app(index.index, new_registry(), token="")) as api:
        yield api


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"sequence_hashes": [1, 2, 3]}, {"w0/0": [3, ""], "w0/1": [1, ""], "w1/0": [0, "source"]}),
        ({"sequence_hashes": []}, {"w0/0": [0, ""], "w0/1": [0, ""], "w1/0": [0, "source"]}),
        ({"sequence_hashes": [2**64 - 1]}, {"w0/0": [0, ""], "w0/1": [0, ""], "w1/0": [1, "source"]}),
        ({"sequence_hashes": [1, 2], "ranks": [["w0", 1]]}, {"w0/1": [1, ""]}),
        ({"sequence_hashes": [1], "ranks": []}, {}),
        ({"sequence_hashes": [1], "ranks": [["w9", 0], ["w0", 0]]}, {"w9/0": [0, "never_heard"], "w0/0": [1, ""]}),
    ],
)
async def test_the_stand_alone_index_says_what_each_rank_has_of_a_prompt(
    index: Index, log: EventLog, api: Api, query: dict[str, Any], expected: dict[str, list[Any]]
) -> None:
    ranks = [ScriptedRank(log, "w0", 0), ScriptedRank(log, "w0", 1), ScriptedRank(log, "w1", 0)]
    for scripted, hashes in zip(ranks, ([1, 2, 3], [1], [2**64 - 1]), strict=True):
        await scripted.store(*hashes)
        await scripted.beat()
        await index.until_at(scripted)
    await ranks[2].beat(stale="why")
    await index.until_stale(ranks[2].rank, "source")
    status, body = await api.post(json.dumps(query).encode())
    told = {f"{r['worker_id']}/{r['dp_rank']}": [r["overlap_blocks"][0], r["stale"]] for r in body["ranks"]}
    assert (status, told) == (200, expected)
    assert all((r["epoch"], r["seq"]) == (7, 1) for r in body["ranks"] if r["worker_id"] != "w9")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "truncated"),
        (b"{}", "missing required field `sequence_hashes`"),
        (b'{"sequence_hashes": [18446744073709551616]}', "sequence_hashes: found 18446744073709551616, allowed u64"),
        (b'{"sequence_hashes": [1], "rank": []}', "unknown field `rank`"),
        (b'{"sequence_hashes": [1], "ranks": [["W 0", 0]]}', "worker_id: found 'W 0', allowed"),
        (b'{"sequence_hashes": [1], "ranks": [["w0", -1]]}', "dp_rank: found -1, allowed"),
        (b'{"sequence_hashes": ' + b"[" * 100_000, "array"),
    ],
)
async def test_a_bad_question_is_named(api: Api, body: bytes, words: str) -> None:
    status, answer = await api.post(body)
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "body")
    assert words in error["message"]


async def test_what_one_rank_holds_can_be_seen(index: Index, scripted: ScriptedRank, api: Api) -> None:
    assert (await api.get("/v1/ranks/w0/0/blocks"))[0] == 404
    await scripted.store(1, 2)
    await index.until_at(scripted)
    status, body = await api.get("/v1/ranks/w0/0/blocks")
    assert (status, body["blocks"]) == (
        200,
        [{"sequence_hash": 1, "parent": None, "tier_bits": 1}, {"sequence_hash": 2, "parent": 1, "tier_bits": 1}],
    )
    status, body = await api.get("/v1/ranks")
    assert [(each["worker_id"], each["blocks"]["gpu"], each["cursor"]) for each in body["ranks"]] == [("w0", 2, 1)]


@pytest.mark.parametrize("rank", ["w0/1", "w0/-1", "w0/%D9%A0", f"w0/{'9' * 5000}"])
async def test_an_unknown_rank_is_a_404_that_names_those_that_are(
    index: Index, scripted: ScriptedRank, api: Api, rank: str
) -> None:
    await scripted.store(1)
    await index.until_at(scripted)
    status, body = await api.get(f"/v1/ranks/{rank}/blocks")
    assert status == 404, body
    assert body["error"]["message"].endswith("allowed w0/0")


async def test_the_stand_alone_index_is_ready_while_no_rank_is_stale(
    index: Index, scripted: ScriptedRank, api: Api
) -> None:
    assert await api.get("/ready") == (200, answered())
    await scripted.store(1)
    await scripted.beat(stale="why")
    await index.until_stale(scripted.rank, "source")
    assert await api.get("/ready") == (503, answered(ready=False, stale={"w0/0": "source"}))
    assert await api.get("/health") == (200, {"status": "ok"})


async def test_the_indexer_serves_as_a_process(broker: Broker, scripted: ScriptedRank) -> None:
    await scripted.store(1, 2, 3)
    command = ["-m", "indexer", "serve", "--nats-url", broker.url, "--port", "0"]
    indexer = ChildProcess("indexer", [sys.executable, *command, "--set", f"nats.events_max_bytes={1 << 24}"])
    async with running(indexer) as process, aiohttp.ClientSession() as session:
        address = (await process.line_with("index on")).split()[2]
        query = {"sequence_hashes": [1, 2, 9], "ranks": [["w0", 0]]}
        async with asyncio.timeout(WAIT_S):
            while True:
                async with session.post(f"{address}/v1/overlap", json=query) as response:
                    (answer,) = (await response.json())["ranks"]
                if answer["seq"] == scripted.seq:
                    break
                await Clock().sleep(0.02)
        assert (answer["overlap_blocks"], answer["epoch"], answer["stale"]) == ([2, 2, 2, 2], 7, "")
        async with session.get(f"{address}/metrics") as response:
            shown = await response.text()
        assert "kvrouter_index_ranks 1.0" in shown
        assert shown_families(shown) == COMMANDS["indexer serve"].keys()
    assert process.ended_with == 0, process.output
