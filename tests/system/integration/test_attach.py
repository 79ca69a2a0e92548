"""`attach` as a process: a foreign engine's events become streams, and it joins the fleet."""

import asyncio
import re
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from unittest.mock import AsyncMock

import aiohttp
import pytest

from bench.processes import ChildProcess, free_ports
from kv_protocol.fleet import WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.fleet_gate import FleetGate
from kv_protocol.hashing import HASH_SCHEME, canary, sequence_hashes
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.text.loading import load_text
from tests.contract.engine_servers import vllm_payload
from tests.support.manual_clock import ManualClock
from tests.support.metric_families import COMMANDS, shown_families
from tests.support.processes import running
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.engine_doubles import (
    DOUBLES,
    EngineDouble,
    Fault,
    PrometheusDouble,
    TrtllmServeDouble,
    VllmDouble,
)
from tests.system.integration.event_path import endpoint_of, playing, running_index, zmq_context
from tests.system.integration.fleet_events import fleet_events
from tests.system.integration.scripted_engine import BLOCK_SIZE
from tests.unit.router.upstream import Exchange, Upstream
from worker_agent.attached.client import EngineClient
from worker_agent.attached.config import AttachSettings
from worker_agent.attached.watch import FAILURES_MAX, PROBE_PERIOD_S, HealthWatch
from worker_agent.attached.worker import AttachedWorker, Host
from worker_agent.engines.servers import SERVERS
from worker_agent.engines.servers.vllm import Vllm
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.engine_events import EngineStored
from worker_agent.fleet.membership import Membership
from worker_agent.fleet.worker_id import WorkerId

MODEL, WORKER = "llama-8b", "vllm-0"


def vllm_stored(
    hashes: tuple[int, ...], tokens: tuple[int, ...], parent: int | None = None, dp_rank: int | None = 0
) -> bytes:
    event = EngineStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=BLOCK_SIZE)
    return vllm_payload(event, dp_rank)


def agent(*arguments: str) -> AbstractAsyncContextManager[ChildProcess]:
    return running(ChildProcess(arguments[0], [sys.executable, "-m", "worker_agent", *arguments]))


def attaching(engine: EngineDouble, broker: Broker, *more: str) -> AbstractAsyncContextManager[ChildProcess]:
    """An agent of tokens that are bytes attaches the engine."""
    named = ("--worker-id", WORKER, "--url", engine.url, "--text", "byte", "--nats-url", broker.url)
    return agent("attach", *named, *more)


async def healthy(exchange: Exchange) -> None:
    """An engine that answers GET /health, and nothing else."""
    await exchange.answer(200 if exchange.received.path == "/health" else 404)


# ---------------------------------------------------------------- attach


async def test_an_attached_engine_is_in_the_fleet_and_its_blocks_are_known(broker: Broker, log: EventLog) -> None:
    async with (
        zmq_context() as context,
        playing(context, topic=()) as (engine,),
        Upstream(healthy) as serving,
        fleet_events(log) as told,
        running_index(broker.url) as index,
    ):
        signed = 2**64 - 8  # a negative number on the wire
        await engine.add(vllm_stored((7, signed), (1, 2, 3, 4)))
        await engine.add(vllm_stored((9,), (5, 6), parent=signed, dp_rank=None))
        async with agent(
            *("attach", "--engine", "vllm", "--worker-id", WORKER, "--model", MODEL, "--served-name", "chat"),
            *(*engine.flags, "--block-size", str(BLOCK_SIZE), "--total-kv-blocks", "100", "--max-num-seqs", "8"),
            *("--url", serving.base_url, "--text", "byte", "--nats-url", broker.url),
        ):
            rank, prompt = WorkerRank(WORKER, 0), sequence_hashes([1, 2, 3, 4, 5, 6], BLOCK_SIZE)
            await eventually(lambda: index.overlap(prompt, [rank])[0].overlap_blocks[0] == 3)
            await engine.add(vllm_stored((10,), (9, 9)))
            other = sequence_hashes([9, 9], BLOCK_SIZE)
            await eventually(lambda: index.overlap(other, [rank])[0].overlap_blocks[0] == 1)
            await eventually(lambda: told)
        text = load_text("byte")
        assert told[0] == WorkerRegistered(
            worker_id=WORKER,
            instance=told[0].instance,
            model=MODEL,
            served_names=("chat",),
            base_url=serving.base_url,
            block_size=BLOCK_SIZE,
            hash_scheme=HASH_SCHEME,
            tokenizer_digest=text.tokenizer_digest,
            template_digest=text.template_digest,
            canary=canary(BLOCK_SIZE),
            total_kv_blocks=100,
            max_num_seqs=8,
            event_source="vllm",
            stream_token_ids="vllm",
            event_flag=Vllm.event_flag,
            accepts_token_ids=False,
            version=told[0].version if isinstance(told[0], WorkerRegistered) else "",
            endpoint="dynamo.backend.generate",
        )
        await eventually(lambda: len(told) == 3)
        assert [type(event) for event in told] == [WorkerRegistered, WorkerDraining, WorkerLeft]


@pytest.mark.parametrize("events", ["poll", "tcp://127.0.0.1:5557"])
async def test_a_status_port_that_is_used_ends_it_with_a_line(broker: Broker, events: str) -> None:
    async with TrtllmServeDouble().serving() as engine:
        told = ("--engine", "trtllm-serve", "--kv-events", events, "--block-size", "32", "--model", MODEL)
        async with attaching(engine, broker, *told, "--port", str(broker.port)) as process:
            assert await process.until_ended() == 1
        assert f"worker-agent: port: found 127.0.0.1:{broker.port}, which cannot be bound" in process.output


async def test_an_engine_is_waited_for_and_asked_what_it_is(broker: Broker, log: EventLog) -> None:
    double = VllmDouble(model="llama", total_blocks=500, is_healthy=False)
    double.adapters = ("law",)
    double.served_paths = ("/v1/chat/completions", "/v1/responses")
    async with double.serving() as engine, fleet_events(log) as told:
        async with attaching(engine, broker) as process:
            await process.line_with("waiting_for_engine")
            engine.is_healthy = True
            await eventually(lambda: told)
        await eventually(lambda: len(told) == 3)
    registered = told[0]
    assert isinstance(registered, WorkerRegistered)
    assert (registered.model, registered.served_names, registered.loras) == ("llama", ("llama",), ("law",))
    assert (registered.block_size, registered.total_kv_blocks, registered.max_seq_len) == (16, 500, 4096)
    assert registered.api_endpoints == ("chat", "responses")
    assert (registered.base_url, registered.accepts_token_ids, registered.version) == (engine.url, False, "0.33.0")


async def test_an_engine_that_tokenizes_is_not_taken_for_one_of_bytes(broker: Broker) -> None:
    double = VllmDouble(
        served_paths=("/v1/completions", "/tokenize"), faults={"/tokenize": Fault(body=b'{"tokens":[7]}')}
    )
    async with double.serving() as engine, attaching(engine, broker) as process:
        assert await process.until_ended() == 1
    assert "engine.text: found 'byte', allowed the directory of m: --text DIR" in process.output
    assert "Traceback" not in process.output


async def test_an_engine_that_comes_back_is_registered_as_it_is_now_or_not_at_all(
    broker: Broker, log: EventLog
) -> None:
    async with VllmDouble().serving() as engine, fleet_events(log) as told:
        async with attaching(engine, broker) as process:
            await eventually(lambda: told)
            engine.is_healthy = False
            await eventually(lambda: len(told) == 2)
            engine.block_size, engine.is_healthy = 32, True
            await process.line_with("engine_has_another_block_size")
            assert len(told) == 2
            engine.block_size, engine.total_blocks = 16, 2000
            await eventually(lambda: len(told) == 3)
        assert [type(event) for event in told[:3]] == [WorkerRegistered, WorkerLeft, WorkerRegistered]
        sizes = [event.total_kv_blocks for event in told if isinstance(event, WorkerRegistered)]
        assert sizes == [1000, 2000]


@pytest.mark.parametrize("kind", SERVERS)
async def test_what_attach_shows_is_documented(broker: Broker, log: EventLog, kind: str) -> None:
    awaited = (f'kvrouter_engine_attached{{worker="{WORKER}"}} 1.0', 'outcome="ok",what="metrics"')
    async with DOUBLES[kind]().serving() as engine, fleet_events(log) as told, aiohttp.ClientSession() as session:
        async with attaching(engine, broker, "--engine", kind, "--requests", "forward") as process:
            engine.compute()
            await eventually(lambda: told)
            status_url = (await process.line_with("status on")).split()[-1]
            shown = ""
            async with asyncio.timeout(30):  # the agent registers before it says in its metrics that it is attached
                while any(each not in shown for each in awaited):
                    async with session.get(f"{status_url}/metrics") as response:
                        shown = await response.text()
        assert "Traceback" not in process.output
    registered = told[0]
    assert isinstance(registered, WorkerRegistered)
    assert registered.base_url != engine.url
    assert registered.accepts_token_ids
    assert registered.event_source == SERVERS[kind].event_source
    own = re.findall(rf"{SERVERS[kind].metrics.running}{{(.*)}}", shown)
    assert bool(own) == isinstance(engine, PrometheusDouble)
    assert all(f'worker="{WORKER}"' in labels for labels in own)
    assert shown_families(shown) - COMMANDS["worker-agent attach"].keys() == set()


async def test_an_engine_is_described_again_and_leaves_while_it_sleeps_or_does_not_answer(log: EventLog) -> None:
    clock, stop, sleeps = ManualClock(), asyncio.Event(), [False]
    loras: list[tuple[str, ...]] = [()]
    async with (
        VllmDouble().serving() as engine,
        fleet_events(log) as told,
        EngineClient(engine.url) as client,
        asyncio.TaskGroup() as group,
    ):

        def registration() -> WorkerRegistered:
            return WorkerRegistered(
                worker_id=WORKER, instance="i", model=MODEL, served_names=(MODEL,), base_url=engine.url, block_size=16,
                hash_scheme=HASH_SCHEME, tokenizer_digest="", template_digest="", canary=canary(16),
                event_source="vllm", loras=loras[0],
            )  # fmt: skip

        async def describe() -> WorkerRegistered:
            return registration()

        async def probe(times: int) -> None:
            for _ in range(times):
                asked = engine.asked["/health"]
                while engine.asked["/health"] == asked:
                    await clock.advance(PROBE_PERIOD_S)
                    await asyncio.sleep(0.01)

        worker_id = WorkerId(log, clock, FleetGate(), worker_id=WORKER, instance="i")
        membership = Membership(registration(), worker_id, clock)
        watch = HealthWatch(client, membership, clock, describe=describe, is_asleep=lambda: sleeps[0])
        running = [group.create_task(each.run(stop)) for each in (watch, membership)]
        await eventually(lambda: engine.asked["/health"])
        await probe(1)
        await eventually(lambda: [getattr(each, "loras", None) for each in told] == [()])
        loras[0] = ("sql",)
        await probe(1)
        await eventually(lambda: [getattr(each, "loras", None) for each in told] == [(), ("sql",)])
        sleeps[0] = True
        await probe(1)
        await eventually(lambda: isinstance(told[-1], WorkerLeft) and told[-1].reason == "it sleeps")
        sleeps[0] = False
        await probe(1)
        await eventually(lambda: isinstance(told[-1], WorkerRegistered))
        assert len(told) == 4
        for failures in (FAILURES_MAX - 1, FAILURES_MAX - 1):
            engine.is_healthy = False
            await probe(failures)
            engine.is_healthy = True
            await probe(1)
        assert (len(told), membership.is_registered) == (4, True)
        engine.is_healthy = False
        await probe(FAILURES_MAX + 1)
        await eventually(lambda: len(told) == 5 and isinstance(told[-1], WorkerLeft))
        assert not membership.is_registered
        engine.is_healthy = True
        await probe(1)
        await eventually(lambda: len(told) == 6 and membership.is_registered)
        stop.set()
        await asyncio.gather(*running)


async def test_an_attach_that_fails_before_its_parts_run_leaves_no_port_open(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    engine = {"base_url": "http://127.0.0.1:1", "kind": "vllm", "model": MODEL, "block_size": 16, "text": "byte"}
    settings = AttachSettings.model_validate(
        {"engine": {**engine, "requests": "forward"}, "worker": {"id": WORKER, "host": "127.0.0.1", "port": port}}
    )

    monkeypatch.setattr(Consolidator, "start", AsyncMock(side_effect=BrokerUnavailable("away")))
    async with zmq_context() as context:
        host = Host(log, context, Clock(), FleetGate(), load_text)
        with pytest.raises(BrokerUnavailable):
            await AttachedWorker(settings, host, lambda *_: None).run(asyncio.Event())
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


# ---------------------------------------------------------------- streams alone

CONFIGURATION = """
worker: {{id: two-sources}}
engine: {{model: {model}, block_size: {block_size}, publish_endpoint: "{zero}", replay_endpoint: "{zero_replay}"}}
events:
  sources:
    - {{source: host, endpoint: "{host}", replay_endpoint: "{host_replay}"}}
nats: {{url: "{nats}"}}
"""


async def test_the_streams_of_an_engine_without_an_address_have_the_blocks_of_all_sources(
    broker: Broker, log: EventLog, tmp_path: Path
) -> None:
    async with (
        zmq_context() as context,
        playing(context, topic=()) as (zero,),
        playing(context, topic=()) as (host,),
        fleet_events(log) as told,
        running_index(broker.url) as index,
        aiohttp.ClientSession() as session,
    ):
        zero.ring, host.ring = {0: vllm_stored((7,), (1, 2))}, {0: vllm_stored((70, 80), (1, 2, 3, 4))}
        file = tmp_path / "attach.yaml"
        file.write_text(
            CONFIGURATION.format(
                model=MODEL,
                block_size=BLOCK_SIZE,
                nats=broker.url,
                zero=endpoint_of(zero.publish),
                zero_replay=endpoint_of(zero.replay),
                host=endpoint_of(host.publish),
                host_replay=endpoint_of(host.replay),
            )
        )
        async with agent("attach", "--config", str(file)) as process:
            prompt = sequence_hashes([1, 2, 3, 4], BLOCK_SIZE)
            ranks = [WorkerRank("two-sources", 0)]
            await eventually(lambda: [v.overlap_blocks[0] for v in index.overlap(prompt, ranks)] == [2])
            status_url = (await process.line_with("status on")).split()[-1]
            async with session.get(f"{status_url}/health") as response:
                health = await response.json()
            assert [(rank["worker_id"], rank["dp_rank"]) for rank in health["ranks"]] == [("two-sources", 0)]
            async with session.get(f"{status_url}/metrics") as response:
                shown = await response.text()
            assert 'kvrouter_mirror_blocks{dp_rank="0",worker="two-sources"} 2.0' in shown
            assert 'kind="stored",source="host",worker="two-sources"' in shown
        assert told == []
        assert "Traceback" not in process.output
