"""`worker-agent serve --engine trtllm` as a process of its own: what the fleet is told, and how it ends."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft, WorkerRegistered
from kv_runtime.config.loading import load_settings
from kv_runtime.event_log import BrokerUnavailable, EventLog
from kv_runtime.http.acceptor import PortUsed
from kv_runtime.text.loading import load_text
from tests.support.processes import BLOCK_SIZE, ENGINE, agent_process, running, running_agent
from tests.support.trtllm import Fake
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.fleet_events import fleet_events
from worker_agent.commands.engine_choice import chosen_engine
from worker_agent.commands.serve import ServedWorker
from worker_agent.config import AgentSettings
from worker_agent.engine_args.arguments import EngineOptions

WORKER = "trtllm-0"


def kinds(told: list[FleetEvent]) -> list[type[FleetEvent]]:
    return [type(event) for event in told]


async def test_the_fleet_is_told_what_the_loaded_engine_is(broker: Broker, log: EventLog, tmp_path: Path) -> None:
    arguments = ("--served-name", "chat", "--endpoint", "dyn://a.b.c", "--enable-attention-dp")
    sizes = ("--tensor-parallel-size", "2", "--max-num-tokens", "4000")
    lora = ("--set", f"trtllm.loras={{law: {tmp_path}}}", "--trtllm.enable_lora", "true")
    async with (
        fleet_events(log) as told,
        running_agent(WORKER, broker.url, *ENGINE, *arguments, *sizes, *lora, model={"gpu_blocks": 77}) as agent,
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


async def test_bad_engine_arguments_end_it_with_2_and_all_their_problems(broker: Broker) -> None:
    bad = ("--trtllm.max_num_tokens", "few", "--trtllm.max_batch_size", "many")
    async with running_agent(WORKER, broker.url, *ENGINE, *bad) as agent:
        assert await agent.until_ended() == 2
    assert "--trtllm.max_num_tokens" in agent.output
    assert "--trtllm.max_batch_size" in agent.output


async def test_an_engine_that_cannot_be_loaded_was_never_in_the_fleet(broker: Broker, log: EventLog) -> None:
    async with (
        fleet_events(log) as told,
        running_agent(WORKER, broker.url, *ENGINE, start_failure="CUDA out of memory") as agent,
    ):
        assert await agent.until_ended() == 1
    assert "worker-agent: the engine cannot be loaded: RuntimeError: CUDA out of memory" in agent.output
    assert told == []


async def test_without_the_package_the_extra_is_named(broker: Broker) -> None:
    async with running(agent_process(WORKER, broker.url, *ENGINE)) as agent:
        assert await agent.until_ended() == 1
    needed = "worker-agent: the engine trtllm needs kv-router[trtllm]: pip install 'kv-router[trtllm]'"
    assert needed in agent.output.splitlines()


# ------------------------------------------------------------------- in this process, where the fake can be told more
@asynccontextmanager
async def serving_here(nats_url: str, *assignments: str) -> AsyncIterator[Callable[[], None]]:
    """Be where a worker is served by tasks of this process; what is yielded asks it to stop."""
    own = ("engine.kind=trtllm", "engine.served_names=[sim-8b]", "engine.text=byte", f"worker.id={WORKER}")
    settings = load_settings(AgentSettings, assignments=[*own, f"nats.url={nats_url}", *assignments])
    override = '{"model": "none", "max_seq_len": 512}'
    chosen = chosen_engine(settings, EngineOptions(override=override, publishes_kv_events=True))
    switch_s, stop = sys.getswitchinterval(), asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(ServedWorker(settings, chosen).run(stop, lambda _: None))
            yield stop.set
            stop.set()
    finally:
        sys.setswitchinterval(switch_s)


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


async def test_a_worker_whose_log_is_not_there_waits_and_loads_no_engine(trtllm: Fake) -> None:
    async def stopped_while_it_waits() -> None:
        async with serving_here("nats://127.0.0.1:1") as stop:
            await eventually(lambda: any(each["event"] == "log_awaited" for each in logs))
            stop()

    with capture_logs() as logs, pytest.raises(ExceptionGroup) as failed:
        await stopped_while_it_waits()
    assert failed.group_contains(BrokerUnavailable)
    assert trtllm.control.executors == []


async def test_a_port_that_is_used_ends_the_engine_again(trtllm: Fake, broker: Broker) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        async with serving_here(broker.url, f"worker.port={broker.port}"):
            await asyncio.Event().wait()
    assert failed.group_contains(PortUsed)
    assert trtllm.control.executors == []
