"""`worker-agent serve --engine trtllm` as a process of its own: what the fleet is told, and how it ends."""

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import zmq

from bench.capture.payloads import encode_payload
from kv_protocol import fleet, subjects
from kv_protocol.events import Tier
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from kv_runtime.config.loading import load_settings
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.http.acceptor import PortUsed
from kv_runtime.text.loading import load_text
from tests.support.processes import BLOCK_SIZE, ENGINE, agent_process, running_agent
from tests.support.trtllm import Fake, trtllm
from tests.system.integration.broker import WAIT_S, Broker, eventually
from tests.system.integration.event_path import PlayedSource, endpoint_of, running_index, zmq_context
from tests.system.integration.fleet_events import fleet_events
from worker_agent.commands.engine_choice import chosen_engine
from worker_agent.commands.serve import run_served
from worker_agent.config import AgentSettings
from worker_agent.engine_args.rules import Circumstances
from worker_agent.engine_args.sources import EngineArgsSources
from worker_agent.events.engine_events import EngineStored

__all__ = ["trtllm"]

WORKER = "trtllm-0"


def kinds(told: list[FleetEvent]) -> list[type[FleetEvent]]:
    return [type(event) for event in told]


@pytest.mark.asyncio
async def test_the_fleet_is_told_what_the_loaded_engine_is(broker: Broker, log: EventLog, tmp_path: Path) -> None:
    arguments = (
        "--served-name",
        "chat",
        "--endpoint",
        "dyn://a.b.c",
        "--tensor-parallel-size",
        "2",
        "--max-num-tokens",
        "4000",
    )
    lora = ("--set", f"trtllm.loras={{law: {tmp_path}}}", "--trtllm.enable_lora", "true", "--enable-attention-dp")
    async with (
        fleet_events(log) as told,
        running_agent(WORKER, broker.url, *ENGINE, *arguments, *lora, model={"gpu_blocks": 77}) as agent,
    ):
        base_url = (await agent.line_with(f"worker {WORKER} on")).split()[3]
        await eventually(lambda: told)
        (registered,) = told
        assert await agent.line_with("engine_loaded")
    assert isinstance(registered, WorkerRegistered)
    text = load_text("byte")
    assert (registered.model, registered.served_names, registered.loras) == ("sim-8b", ("sim-8b", "chat"), ("law",))
    assert (registered.base_url, registered.endpoint, registered.role) == (base_url, "a.b.c", "aggregated")
    assert (registered.block_size, registered.total_kv_blocks, registered.dp_ranks) == (BLOCK_SIZE, 77, (0, 1))
    assert (registered.max_num_seqs, registered.max_num_batched_tokens, registered.max_seq_len) == (2048, 4000, 4096)
    assert registered.max_prompt_tokens == 4000
    assert (registered.event_source, registered.accepts_token_ids) == ("trtllm", True)
    assert (registered.tokenizer_digest, registered.template_digest) == (text.tokenizer_digest, text.template_digest)
    await eventually(lambda: kinds(told) == [WorkerRegistered, WorkerDraining, WorkerLeft])
    assert await agent.until_ended() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_of_one_phase_is_registered_as_one(broker: Broker, log: EventLog, role: str) -> None:
    arguments = ("--role", role, "--trtllm.cache_transceiver_config.backend", "NIXL")
    async with fleet_events(log) as told, running_agent(WORKER, broker.url, *ENGINE, *arguments):
        await eventually(lambda: told)
    registered = told[0]
    assert isinstance(registered, WorkerRegistered)
    component = {"prefill": "prefill", "decode": "backend"}[role]
    assert (registered.role, registered.endpoint) == (role, f"dynamo.{component}.generate")


@pytest.mark.asyncio
async def test_an_encoder_lives_without_events_and_ends_like_the_others(broker: Broker, log: EventLog) -> None:
    beats: list[bytes] = []

    async def on_beat(message: LogMessage) -> None:
        beats.append(message.data)

    await log.listen(f"kv.v1.heartbeat.{subjects.model_slug('sim-8b')}.{WORKER}.0", on_beat)
    arguments = ("--engine", "trtllm", "--model", "none", "--served-name", "sim-8b", "--set", "engine.text=byte")
    images = ("--set", "images.placeholder=^", "--set", "images.token_id=94")
    async with (
        fleet_events(log) as told,
        running_agent(WORKER, broker.url, *arguments, *images, "--role", "encode") as agent,
    ):
        base_url = (await agent.line_with(f"worker {WORKER} on")).split()[3]
        await eventually(lambda: told and len(beats) >= 2)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base_url}/v1/kv/position") as response:
                (rank,) = (await response.json())["ranks"]
            async with session.get(f"{base_url}/metrics") as response:
                assert f'kvrouter_engine_dead{{worker="{WORKER}"}} 0.0' in (await response.text()).splitlines()
    registered, beat = told[0], fleet.decode_heartbeat(beats[-1])
    assert isinstance(registered, WorkerRegistered)
    assert (registered.role, registered.event_source, registered.endpoint) == (
        "encode",
        "none",
        "dynamo.encode.generate",
    )
    assert (rank["seq"], beat.last_seq, beat.stale) == (0, 0, "")
    assert await agent.until_ended() == 0


@pytest.mark.asyncio
async def test_bad_engine_arguments_end_it_with_2_and_all_their_problems(broker: Broker) -> None:
    bad = ("--trtllm.max_num_tokens", "few", "--trtllm.max_batch_size", "many")
    async with running_agent(WORKER, broker.url, *ENGINE, *bad) as agent:
        assert await agent.until_ended() == 2
    assert "--trtllm.max_num_tokens" in agent.output
    assert "--trtllm.max_batch_size" in agent.output


@pytest.mark.asyncio
async def test_an_argument_that_the_engine_refuses_ends_it_with_1_and_its_place(broker: Broker) -> None:
    async with running_agent(WORKER, broker.url, *ENGINE, "--trtllm.stream_interval", "0") as agent:
        assert await agent.until_ended() == 1
    assert "  --trtllm.stream_interval: stream_interval: Input should be greater than 0" in agent.output


@pytest.mark.asyncio
async def test_the_simulated_engine_takes_no_engine_arguments(broker: Broker) -> None:
    async with running_agent(WORKER, broker.url, "--kv-block-size", "8", "--trtllm.max_seq_len", "9") as agent:
        assert await agent.until_ended() == 2
    for flag in ("--kv-block-size", "--trtllm.max_seq_len"):
        assert f"{flag}: expected options of this command" in agent.output


@pytest.mark.asyncio
async def test_an_engine_that_cannot_be_loaded_was_never_in_the_fleet(broker: Broker, log: EventLog) -> None:
    async with (
        fleet_events(log) as told,
        running_agent(WORKER, broker.url, *ENGINE, start_failure="CUDA out of memory") as agent,
    ):
        assert await agent.until_ended() == 1
    assert "worker-agent: the engine cannot be loaded: RuntimeError: CUDA out of memory" in agent.output
    assert told == []


@pytest.mark.asyncio
async def test_without_the_package_the_extra_is_named(broker: Broker) -> None:
    agent = agent_process(WORKER, broker.url, *ENGINE)
    async with asyncio.TaskGroup() as group:
        await agent.start(group)
        assert await agent.until_ended() == 1
    needed = "worker-agent: the engine trtllm needs kv-router[trtllm]: pip install 'kv-router[trtllm]'"
    assert needed in agent.output.splitlines()


@pytest.mark.asyncio
@pytest.mark.parametrize("role", ["aggregated", "decode"])
async def test_an_idle_engine_is_asked_for_a_token_now_and_then(broker: Broker, log: EventLog, role: str) -> None:
    canary = ("--role", role, "--set", "worker.canary_wait_s=0.05", "--set", "worker.canary_timeout_s=5")
    async with fleet_events(log) as told, running_agent(WORKER, broker.url, *ENGINE, *canary) as agent:
        base_url = (await agent.line_with(f"worker {WORKER} on")).split()[3]
        await eventually(lambda: told)
        asked = 0.0
        async with aiohttp.ClientSession() as session:
            while asked < 3:
                async with session.get(f"{base_url}/metrics") as response:
                    lines = (await response.text()).splitlines()
                head = f'kvrouter_engine_canaries_total{{outcome="ok",worker="{WORKER}"}} '
                asked = max([asked, *(float(line.removeprefix(head)) for line in lines if line.startswith(head))])
    await eventually(lambda: kinds(told) == [WorkerRegistered, WorkerDraining, WorkerLeft])


@pytest.mark.asyncio
async def test_an_engine_that_dies_idle_ends_the_process_and_the_fleet_hears_why(broker: Broker, log: EventLog) -> None:
    canary = ("--set", "worker.canary_wait_s=0.02")
    async with (
        fleet_events(log) as told,
        running_agent(WORKER, broker.url, *ENGINE, *canary, die_at_iteration=20) as agent,
    ):
        await agent.line_with("worker_registered")
        assert await agent.until_ended() == 1
    assert "worker-agent: the engine is dead: " in agent.output
    assert kinds(told) == [WorkerRegistered, WorkerLeft], "which was never said to drain"
    left = told[-1]
    assert isinstance(left, WorkerLeft)
    assert "the engine is dead: " in left.reason


@pytest.mark.asyncio
async def test_a_prefill_worker_s_end_is_bounded_by_its_transfers(broker: Broker, log: EventLog) -> None:
    arguments = ("--role", "prefill", "--trtllm.cache_transceiver_config.backend", "NIXL")
    bounds = ("--set", "trtllm.transfer_s=0.2", "--set", "trtllm.transfer_node=3")
    async with fleet_events(log) as told, running_agent(WORKER, broker.url, *ENGINE, *arguments, *bounds) as agent:
        base_url = (await agent.line_with(f"worker {WORKER} on")).split()[3]
        body = {"model": "sim-8b", "prompt": list(range(40)), "max_tokens": 8}
        async with aiohttp.ClientSession() as session, session.post(f"{base_url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        await agent.end(signal.SIGTERM)
        assert await agent.until_ended() == 0
    assert "transfers_not_over" in agent.output
    assert kinds(told) == [WorkerRegistered, WorkerDraining, WorkerLeft]


@pytest.mark.asyncio
async def test_an_engine_that_streams_its_events_is_read_where_it_publishes(broker: Broker, tmp_path: Path) -> None:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/events"}
    arguments = {"kv_cache_config": {"use_kv_cache_manager_v2": True, "kv_events_config": config}}
    override = ("--override-engine-args", json.dumps(arguments))
    rank, asked, found = WorkerRank(WORKER, 0), 0, 0
    async with (
        running_index(broker.url) as index,
        running_agent(WORKER, broker.url, *ENGINE, *override) as agent,
        aiohttp.ClientSession() as session,
    ):
        url = (await agent.line_with(f"worker {WORKER} on")).split()[3] + "/v1/completions"
        async with asyncio.timeout(WAIT_S):
            while found < 3:  # events from before the agent has subscribed are lost: it has no replays
                asked += 1
                prompt = [asked] * (3 * BLOCK_SIZE)
                async with session.post(url, json={"model": "sim-8b", "prompt": prompt, "max_tokens": 2}) as response:
                    assert response.status == 200, await response.text()
                hashes = [sequence_hashes([each] * (3 * BLOCK_SIZE), BLOCK_SIZE) for each in range(1, asked + 1)]
                found = max(index.overlap(each, [rank])[0].overlap_blocks[0] for each in hashes)
    assert found == 3


@pytest.mark.asyncio
async def test_a_kv_block_manager_tells_of_the_worker_s_host_tier_beside_the_engine(broker: Broker) -> None:
    prompt, rank = tuple(range(4 * BLOCK_SIZE)), WorkerRank(WORKER, 0)
    async with zmq_context() as context, running_index(broker.url) as index, asyncio.TaskGroup() as group:
        publish, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for socket in (publish, replay):
            socket.bind("tcp://127.0.0.1:*")
        kvbm = PlayedSource(publish, replay)
        stored = EngineStored(
            block_hashes=(1, 2, 3, 4),
            parent_block_hash=None,
            token_ids=prompt,
            block_size=BLOCK_SIZE,
            tier=Tier.HOST,
        )
        kvbm.ring[0] = encode_payload(1.0, [stored], 0)
        answering = group.create_task(kvbm.serve())
        at = f"endpoint: {endpoint_of(publish)}, replay_endpoint: {endpoint_of(replay)}"
        async with running_agent(WORKER, broker.url, *ENGINE, "--set", f"events.sources=[{{source: kvbm, {at}}}]"):
            hashes = sequence_hashes(prompt, BLOCK_SIZE)
            await eventually(lambda: index.overlap(hashes, [rank])[0].overlap_blocks[1] == 4)
            assert index.overlap(hashes, [rank])[0].overlap_blocks[0] == 0, "the engine itself holds none of it"
        answering.cancel()


# ------------------------------------------------------------------- in this process, where the fake can be told more
@asynccontextmanager
async def serving_here(nats_url: str, *assignments: str) -> AsyncIterator[Callable[[], None]]:
    """Be where a worker is served by tasks of this process; what is yielded asks it to stop."""
    own = ("engine.kind=trtllm", "engine.served_names=[sim-8b]", "engine.text=byte", f"worker.id={WORKER}")
    settings = load_settings(AgentSettings, assignments=[*own, f"nats.url={nats_url}", *assignments])
    sources = EngineArgsSources(override='{"model": "none", "max_seq_len": 512}')
    chosen = chosen_engine(settings, sources, Circumstances(publishes_kv_events=True))
    switch_s, stop = sys.getswitchinterval(), asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(run_served(settings, chosen, stop, lambda _: None))
            yield stop.set
            stop.set()
    finally:
        sys.setswitchinterval(switch_s)


@pytest.mark.asyncio
async def test_a_worker_that_is_stopped_while_its_engine_loads_was_never_in_the_fleet(
    trtllm: Fake, broker: Broker, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, await_start = threading.Event(), trtllm.control.await_start

    def begun() -> None:
        loads.set()
        await_start()

    monkeypatch.setattr(trtllm.control, "await_start", begun)
    trtllm.control.delay_start()
    async with fleet_events(log) as told:
        async with serving_here(broker.url) as stop:
            await eventually(loads.is_set)
            stop()
        trtllm.control.finish_start()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert (told, trtllm.control.executors) == ([], [])


@pytest.mark.asyncio
async def test_an_engine_that_hangs_is_out_of_the_fleet_until_it_answers_again(
    trtllm: Fake, broker: Broker, log: EventLog
) -> None:
    canary = ("worker.canary_wait_s=0.05", "worker.canary_timeout_s=0.2")
    async with fleet_events(log) as told, serving_here(broker.url, *canary):
        await eventually(lambda: told)
        trtllm.control.hold()
        await eventually(lambda: kinds(told) == [WorkerRegistered, WorkerLeft])
        left = told[1]
        assert isinstance(left, WorkerLeft)
        assert left.reason == "canary at rank 0: no token within 0.2 s"
        trtllm.control.release()
        await eventually(lambda: kinds(told) == [WorkerRegistered, WorkerLeft, WorkerRegistered])
        assert told[2] == told[0], "the same worker, which had not begun anew"


@pytest.mark.asyncio
async def test_a_worker_whose_log_is_not_there_loads_no_engine(trtllm: Fake) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        async with serving_here("nats://127.0.0.1:1"):
            await asyncio.Event().wait()
    assert failed.group_contains(BrokerUnavailable)
    assert trtllm.control.executors == []


@pytest.mark.asyncio
async def test_a_port_that_is_used_ends_the_engine_again(trtllm: Fake, broker: Broker) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        async with serving_here(broker.url, f"worker.port={broker.port}"):
            await asyncio.Event().wait()
    assert failed.group_contains(PortUsed)
    assert trtllm.control.executors == []
