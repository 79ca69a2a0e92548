"""Questions to an engine over real sockets: every way in which it does not answer has a name, and is counted."""

import socket

import pytest

from tests.system.integration.engine_doubles import EngineDouble, Fault, SglangDouble, TrtllmServeDouble, VllmDouble
from worker_agent.attached.client import EngineClient, EngineUnanswered, FetchOutcome
from worker_agent.attached.survey import EngineSurvey
from worker_agent.engines.server import EngineFacts

CHATS = ("chat", "completions")
"""What the doubles list in /openapi.json."""
FAULTS: list[tuple[FetchOutcome, Fault]] = [
    ("status", Fault(status=500)),
    ("status", Fault(status=302)),
    ("oversize", Fault(body=b"x" * 4097)),
    ("slow", Fault(hangs=True)),
    ("unreachable", Fault(cuts=True)),
]


@pytest.mark.parametrize(("outcome", "fault"), FAULTS)
async def test_an_answer_that_cannot_be_used_says_why(outcome: FetchOutcome, fault: Fault) -> None:
    answer_s = 1.0 if outcome == "slow" else 10.0
    async with VllmDouble().serving() as engine, EngineClient(engine.url, answer_s=answer_s) as client:
        engine.faults["/metrics"] = fault
        with pytest.raises(EngineUnanswered) as unanswered:
            await client.get("metrics", "/metrics", bytes_max=4096)
        assert unanswered.value.outcome == outcome
        assert client.requests_total == {("metrics", outcome): 1}
        del engine.faults["/metrics"]
        assert await client.get("metrics", "/metrics") == engine.metrics_text().encode()
        assert client.requests_total["metrics", "ok"] == 1


async def test_an_engine_that_is_gone_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with EngineClient(f"http://127.0.0.1:{port}/") as client:
        with pytest.raises(EngineUnanswered):
            await client.get("health", "/health")
        assert client.requests_total == {("health", "unreachable"): 1}


async def surveyed(kind: str, engine: EngineDouble) -> tuple[EngineFacts | None, EngineClient]:
    async with EngineClient(engine.url) as client:
        return await EngineSurvey(kind, client, metrics_path="/metrics").query(), client


@pytest.mark.parametrize("is_old", [False, True])
async def test_vllm_says_its_names_adapters_cache_version_and_since_033_its_publishers(is_old: bool) -> None:
    double = VllmDouble(model="llama", total_blocks=500)
    double.adapters = ("law",)
    async with double.serving() as engine:
        if is_old:
            engine.faults["/kv_event_sources"] = Fault(status=404)
        said, _ = await surveyed("vllm", engine)
    assert said == EngineFacts(
        kind="vllm",
        directory="llama",
        publish_endpoint="" if is_old else "tcp://*:5557",
        dp_ranks=1,
        served_names=("llama",),
        loras=("law",),
        block_size=16,
        total_kv_blocks=500,
        max_seq_len=4096,
        version="0.33.0",
        api_endpoints=CHATS,
    )


@pytest.mark.parametrize("is_old", [False, True])
async def test_sglang_says_it_under_either_path(is_old: bool) -> None:
    double = SglangDouble(block_size=64)
    double.is_old = is_old
    async with double.serving() as engine:
        if is_old:
            engine.faults["/server_info"] = Fault(status=404)
        said, _ = await surveyed("sglang", engine)
    assert said == EngineFacts(
        kind="sglang",
        directory="m",
        publish_endpoint="none",
        served_names=("m",),
        block_size=64,
        total_kv_blocks=1000,
        max_num_seqs=48,
        max_num_batched_tokens=8192,
        max_seq_len=4096,
        dp_ranks=1,
        version="0.5.9",
        api_endpoints=CHATS,
    )


async def test_trtllm_serve_says_its_cache_once_it_has_iterated() -> None:
    async with TrtllmServeDouble().serving() as engine:
        assert (await surveyed("trtllm-serve", engine))[0] == EngineFacts(
            kind="trtllm-serve", served_names=("m",), version="1.2.0", api_endpoints=CHATS
        )
        engine.iterate()
        said, _ = await surveyed("trtllm-serve", engine)
    assert said == EngineFacts(
        kind="trtllm-serve",
        served_names=("m",),
        block_size=32,
        total_kv_blocks=1000,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        version="1.2.0",
        api_endpoints=CHATS,
    )


async def test_an_engine_that_is_not_healthy_is_not_asked() -> None:
    async with VllmDouble(is_healthy=False).serving() as engine:
        assert (await surveyed("vllm", engine))[0] is None
        assert engine.asked == {"/health": 1}
