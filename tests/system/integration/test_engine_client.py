"""Questions to an engine over real sockets: every way in which it does not answer has a name, and is counted."""

import socket

import msgspec
import pytest

from tests.system.integration.engine_doubles import (
    DOUBLES,
    EngineDouble,
    Fault,
    SglangDouble,
    TrtllmServeDouble,
    VllmDouble,
)
from worker_agent.attached import client as client_module
from worker_agent.attached.client import EngineClient, EngineUnanswered, FetchOutcome
from worker_agent.engines.servers import SERVERS
from worker_agent.engines.servers.base import EngineFacts

FAULTS: list[tuple[FetchOutcome, Fault]] = [
    ("status", Fault(status=500)),
    ("status", Fault(status=302)),
    ("oversize", Fault(body=b"x" * 4097)),
    ("slow", Fault(hangs=True)),
    ("unreachable", Fault(cuts=True)),
]


@pytest.mark.parametrize(("outcome", "fault"), FAULTS)
async def test_an_answer_that_cannot_be_used_says_why(
    monkeypatch: pytest.MonkeyPatch, outcome: FetchOutcome, fault: Fault
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_S", 1.0 if outcome == "slow" else 10.0)
    async with VllmDouble().serving() as engine, EngineClient(engine.url) as client:
        engine.faults["/metrics"] = fault
        with pytest.raises(EngineUnanswered) as unanswered:
            await client.get("metrics", "/metrics", bytes, bytes_max=4096)
        assert unanswered.value.outcome == outcome
        assert client.requests_total == {("metrics", outcome): 1}
        del engine.faults["/metrics"]
        assert await client.get("metrics", "/metrics", bytes) == engine.metrics_text().encode()
        assert client.requests_total["metrics", "ok"] == 1


async def test_an_engine_that_is_gone_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with EngineClient(f"http://127.0.0.1:{port}/") as client:
        with pytest.raises(EngineUnanswered):
            await client.get("health", "/health", bytes)
        assert client.requests_total == {("health", "unreachable"): 1}


async def surveyed(kind: str, engine: EngineDouble) -> tuple[EngineFacts | None, EngineClient]:
    async with EngineClient(engine.url, kind=kind) as client:
        return await client.query(), client


@pytest.mark.parametrize("kind", SERVERS)
async def test_every_engine_is_recognized_and_says_its_facts(kind: str) -> None:
    async with DOUBLES[kind]().serving() as engine:
        engine.compute()
        assert (await surveyed("", engine))[0] == engine.facts


async def test_vllm_says_its_adapters_and_before_033_no_publishers() -> None:
    double = VllmDouble(faults={"/kv_event_sources": Fault(status=404)})
    double.adapters = ("law",)
    async with double.serving() as engine:
        said, _ = await surveyed("vllm", engine)
    assert said == msgspec.structs.replace(double.facts, publish_endpoint="", loras=("law",))


async def test_an_old_sglang_says_it_under_another_path() -> None:
    double = SglangDouble(faults={"/server_info": Fault(status=404)})
    double.is_old = True
    async with double.serving() as engine:
        assert (await surveyed("sglang", engine))[0] == double.facts


async def test_trtllm_serve_says_its_cache_once_it_has_iterated() -> None:
    async with TrtllmServeDouble().serving() as engine:
        said, _ = await surveyed("trtllm-serve", engine)
    assert said == EngineFacts(
        kind="trtllm-serve", served_names=("m",), version="1.2.0", api_endpoints=("chat", "completions")
    )


async def test_an_engine_that_is_not_healthy_is_not_asked() -> None:
    async with VllmDouble(is_healthy=False).serving() as engine:
        assert (await surveyed("vllm", engine))[0] is None
        assert engine.asked == {"/health": 1}
