"""The agent's HTTP on a simulated engine: what clients get, and what the engine is spared when they go away."""

import asyncio
import base64
import threading
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from kv_protocol.decode_time import DECODE_HEADER
from kv_runtime.clock import Clock
from kv_runtime.text.byte_model import ByteText
from tests.support.engine_description import described
from tests.support.manual_clock import ManualClock
from tests.system.integration.agent_http import CHAT, COMPLETIONS, HELLO, Agent, Answered, serving
from tests.system.integration.broker import eventually
from tests.system.integration.scripted_engine import ScriptedEngine
from worker_agent.api import app as agent_api
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.tokens import TokenSource
from worker_agent.port.types import EngineOutput, EngineRequest

ENGINE = described(total_kv_blocks=2048, max_num_batched_tokens=512, max_seq_len=4096, dp_ranks=(0, 1))
ENDLESS_TOKENS = 4000
WAIT_S = 10.0


@dataclass
class Worker(Agent):
    """An agent whose engine is a simulated one."""

    engine: SimulatedEngine
    simulator: Simulator

    async def used_blocks(self) -> int:
        """Return how many blocks running requests hold, once another request has ended."""
        self.engine.iteration_stats(0)
        assert (await self.ask(COMPLETIONS, {"prompt": [1], "max_tokens": 1}, x_dp_rank="0")).status == 200
        newest = [row for row in self.engine.iteration_stats(0) if row["attentionDpRank"] == 0][-1]
        used: int = newest["kvCacheStats"]["usedNumBlocks"]
        return used


class _Failing(SimulatedEngine):
    """An engine with a fault of ours in it."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        yield EngineOutput(token_ids=(97,), cached_tokens=0)
        raise KeyError(request.request_id)


class _HeldText(ByteText):
    """Text whose `token_bytes`, which log probabilities need, wait until the test lets them go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_rendered, self.may_go_on = threading.Event(), threading.Event()

    def token_bytes(self, token_id: int) -> bytes | None:
        self.is_rendered.set()
        assert self.may_go_on.wait(WAIT_S)
        return super().token_bytes(token_id)


class _Timed(ScriptedEngine):
    """An engine that makes three tokens, a quarter of a second apart by the test's clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        del request
        for reason in (None, None, "length"):
            await self._clock.advance(0.25)
            yield EngineOutput(token_ids=(97,), cached_tokens=0, finish_reason=reason)


async def never() -> dict[int, tuple[int, int]]:
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def worker(
    *, speed: float = 100.0, kind: type[SimulatedEngine] = SimulatedEngine, **options: Any
) -> AsyncIterator[Worker]:
    simulator = Simulator(ENGINE, token_source=TokenSource(seed=3))
    engine = kind(simulator, Clock(), speed=speed)
    async with serving(engine, **options) as agent:
        yield Worker(agent.api, agent.session, agent.port, engine, simulator)


# ---------------------------------------------------------------- answers


async def test_an_unstreamed_answer_says_how_long_it_took_behind_its_first_token() -> None:
    clock = ManualClock(now_s=5.0)
    async with serving(_Timed(clock), drive=False, clock=clock) as agent:
        whole = await agent.ask(CHAT, {"messages": HELLO})
        stream = await agent.ask(CHAT, {"messages": HELLO, "stream": True})
    assert whole.headers[DECODE_HEADER] == "500.000"
    assert DECODE_HEADER not in stream.headers


async def test_a_prompt_may_come_as_text_as_tokens_or_as_the_router_sends_it() -> None:
    tokens = list(b"a prompt of some length, so that blocks of it are kept")
    encoded = base64.b64encode(array("I", tokens).tobytes()).decode()
    asked = {"max_tokens": 8}
    async with worker() as running:
        answers = [
            (await running.ask(COMPLETIONS, {**asked, **each}, x_dp_rank="1")).body
            for each in (
                {"prompt": bytes(tokens).decode()},
                {"prompt": tokens},
                {"prompt": "something else", "kv_prompt_ids": encoded},
            )
        ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len(tokens)] * 3
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached == [0, len(tokens) // 4 * 4, len(tokens) // 4 * 4]


async def test_two_requests_with_the_same_id_are_two_requests() -> None:
    body = {"messages": HELLO, "max_tokens": 50}
    async with worker() as running:
        one, other = await asyncio.gather(
            running.ask(CHAT, body, x_request_id="same"), running.ask(CHAT, body, x_request_id="same")
        )
        again = await running.ask(CHAT, body, x_request_id="same")
    assert (one.status, other.status, again.status) == (200, 200, 200)
    assert len({answered.body["id"] for answered in (one, other, again)}) == 3
    assert one.body["choices"] == other.body["choices"] == again.body["choices"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x", "kv_prompt_ids": "***"}, 400, "kv_prompt_ids"),
        ({"prompt": "x", "kv_prompt_ids": "AQAAAAE="}, 400, "kv_prompt_ids"),
        ({"prompt": "x" * 5000}, 400, "prompt"),
        ({"prompt": "x", "guided_regex": "a"}, 400, "guided_regex"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"prompt": "x", "logits_processors": ["ban"]}, 400, "logits_processors"),
        ({"prompt": "x", "prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ({"prompt": "x", "model": "gpt-9"}, 404, "model"),
    ],
)
async def test_a_bad_request_is_named(body: dict[str, Any], status: int, param: str, streamed: bool) -> None:
    async with worker() as running:
        answered = await running.ask(COMPLETIONS, {**body, "stream": streamed})
        error = answered.body["error"]
        assert (answered.status, error["param"], set(error)) == (status, param, {"message", "type", "param", "code"})
        assert running.api.in_flight.requests_total == {"ok": 0, "refused": 1, "failed": 0, "cancelled": 0}


async def test_a_bad_rank_is_named() -> None:
    async with worker() as running:
        for rank in ("2", "-1", "x", "1.0", "", "9" * 5000, "\u0661", "0x1"):
            answered = await running.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, x_dp_rank=rank)
            assert (answered.status, answered.body["error"]["param"]) == (400, "x-dp-rank"), rank
            assert len(answered.body["error"]["message"]) < 200


async def test_a_body_beyond_the_bound_is_a_413_and_counted_as_refused() -> None:
    async with worker(body_bytes=100) as running:
        answered = await running.ask(COMPLETIONS, b" " * 101)
        assert (answered.status, answered.body["error"]["code"]) == (413, "body_too_large")
        assert running.api.in_flight.requests_total == {"ok": 0, "refused": 1, "failed": 0, "cancelled": 0}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        (CHAT, {"messages": HELLO, "tools": [{"a": 0}] * 40_000}, 413, "body", "allowed at most 65536"),
        (COMPLETIONS, {"prompt": "x" * 9_000_000}, 413, "prompt", "(worker.prompt_bytes_max)"),
        (COMPLETIONS, {"prompt": ["a"] * 1025}, 400, "prompt", "found 1025 prompts, allowed at most 1024"),
    ],
)
async def test_a_large_or_wrong_body_is_refused_by_name(
    path: str, body: dict[str, Any], status: int, param: str, words: str
) -> None:
    async with worker(body_bytes=16 << 20) as running:
        answered = await running.ask(path, body)
    error = answered.body["error"]
    assert (answered.status, error["param"]) == (status, param)
    assert words in error["message"]
    assert len(error["message"]) < 400


async def test_while_a_large_answer_is_rendered_other_requests_are_answered() -> None:
    text = _HeldText()
    asked = {"messages": HELLO, "n": 8, "max_tokens": 20, "logprobs": True, "top_logprobs": 20}
    async with worker(text=text) as running:
        large = asyncio.create_task(running.ask(CHAT, asked))
        assert await asyncio.to_thread(text.is_rendered.wait, WAIT_S)
        other = await running.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        assert not large.done()
        text.may_go_on.set()
        answered = await large
    assert (other.status, answered.status) == (200, 200)
    assert [len(choice["logprobs"]["content"]) for choice in answered.body["choices"]] == [20] * 8


async def test_beyond_its_bound_the_worker_says_so_at_once() -> None:
    async with worker(speed=1.0, inflight=2) as running:
        waiting = [await running.open(COMPLETIONS, {"prompt": "x", "max_tokens": ENDLESS_TOKENS}) for _ in range(2)]
        await eventually(lambda: running.api.in_flight.running == 2)
        answered = await running.ask(COMPLETIONS, {"prompt": "x"})
        assert (answered.status, answered.body["error"]["code"]) == (503, "overloaded")
        assert answered.headers["Retry-After"] == "1"
        for _, writer in waiting:
            writer.transport.abort()
        await eventually(lambda: running.api.in_flight.running == 0)


# ---------------------------------------------------------------- clients that go away


async def abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("leave", [abort, close])
@pytest.mark.parametrize(
    ("streamed", "read_until", "speed"),
    [(True, b"data: ", 5.0), (True, b"\r\n\r\n", 5.0), (True, b"", 0.05), (False, b"", 5.0), (False, b"", 0.05)],
)
async def test_a_client_that_goes_away_ends_its_generation_and_frees_its_blocks(
    streamed: bool, read_until: bytes, speed: float, leave: Any
) -> None:
    with capture_logs() as lines:
        async with worker(speed=speed) as running:
            reader, writer = await running.open(
                COMPLETIONS, {"prompt": "x" * 100, "max_tokens": ENDLESS_TOKENS - 100, "stream": streamed}
            )
            if read_until:
                await reader.readuntil(read_until)
            await eventually(lambda: running.api.in_flight.running == 1)
            await leave(writer)
            await eventually(lambda: running.api.in_flight.running == 0)
            running.engine.speed = 100.0
            assert await running.used_blocks() == 0
            await eventually(lambda: running.api.in_flight.requests_total["cancelled"] == 1)
            assert running.api.in_flight.requests_total == {"ok": 1, "refused": 0, "failed": 0, "cancelled": 1}
    assert lines == []


# ---------------------------------------------------------------- engines that stop


async def test_an_engine_that_stops_ends_a_stream_with_an_error_event() -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": ENDLESS_TOKENS, "stream": True}
    async with worker(speed=1.0) as running, running.session.post(COMPLETIONS, json=body) as response:
        first = await response.content.readuntil(b"\n\n")
        await running.engine.stop(0.0)
        answered = Answered(response.status, dict(response.headers), first + await response.read())
        await eventually(lambda: running.api.in_flight.running == 0)
        assert running.api.in_flight.requests_total == {"ok": 0, "refused": 0, "failed": 1, "cancelled": 0}
    *chunks, last = answered.events
    assert (answered.status, len(answered.said()["text"])) == (200, len(chunks))
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "engine_stopped")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_engine_that_stops_before_the_first_byte_is_a_503(streamed: bool) -> None:
    async with worker(drive=False) as running, asyncio.TaskGroup() as group:
        await running.engine.start()
        asking = group.create_task(running.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 5, "stream": streamed}))
        await eventually(lambda: running.simulator.has_requests)
        await running.engine.stop(0.0)
        answered = await asking
        assert (answered.status, answered.body["error"]["code"]) == (503, "engine_stopped")


async def test_a_fault_of_ours_in_the_middle_of_a_stream_cuts_it() -> None:
    with capture_logs() as lines:
        async with worker(kind=_Failing) as running:
            with pytest.raises(aiohttp.ClientPayloadError):
                await running.ask(COMPLETIONS, {"prompt": "x", "stream": True})
            answered = await running.ask(COMPLETIONS, {"prompt": "x"})
            assert (answered.status, answered.body["error"]["type"]) == (500, "server_error")
            assert running.api.in_flight.running == 0
            assert running.api.in_flight.requests_total == {"ok": 0, "refused": 0, "failed": 2, "cancelled": 0}
    assert [line["event"] for line in lines] == ["request_failed", "request_failed"]


# ---------------------------------------------------------------- the rest


async def test_a_position_that_does_not_come_is_a_504_and_no_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_api, "BARRIER_S", 0.05)
    with capture_logs() as lines:
        async with worker(position=never) as running:
            status, body = await running.get("/v1/kv/position")
    assert (status, body["error"]["code"], lines) == (504, "not_reached", [])


async def test_the_worker_says_what_it_serves_and_how_it_is() -> None:
    async with worker() as running:
        assert [model["id"] for model in (await running.get("/v1/models"))[1]["data"]] == ["m"]
        assert await running.get("/health") == (200, {"status": "ok", "running_requests": 0})
        assert await running.get("/status") == (200, {"status": "ok", "running_requests": 0, "log": "connected"})
        told = {"agent": version("kv-router"), "engine": "simulated", "version": "1"}
        assert await running.get("/version") == (200, told)
