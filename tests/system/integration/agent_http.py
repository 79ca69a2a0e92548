"""An agent's HTTP that runs, over any engine, and a client of it."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kv_runtime.clock import Clock
from kv_runtime.http.server import HttpServer
from kv_runtime.supervise import Part, until
from kv_runtime.telemetry import new_registry
from kv_runtime.text.byte_model import ByteText
from kv_runtime.text.loading import load_text
from kv_runtime.text.model import Text
from tests.support.engine_description import described
from tests.support.manual_clock import ManualClock
from tests.support.parts import at_work
from worker_agent.api.app import AgentApi
from worker_agent.api.completions import Completions
from worker_agent.api.parsers.families import PLAIN, AnswerFormat
from worker_agent.api.prompts import EnginePrompts
from worker_agent.engines.simulated.engine import SimulatedEngine
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.tokens import ScriptedSource
from worker_agent.media.config import MediaSection
from worker_agent.media.loader import MediaLoader
from worker_agent.port.types import Engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
CREATED = 1_700_000_000
SIMULATED = described(block_size=16, total_kv_blocks=2000, max_num_batched_tokens=1024, max_seq_len=8192)
"""An engine that takes long answers."""
TEXT = ByteText()


@dataclass
class Answered:
    """What came, and when it was whole: all of it."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the closing mark is a text."""
        events = self.data.split(b"\n\n")
        assert events.pop() == b""
        assert all(event.startswith(b"data: ") for event in events)
        texts = [event.removeprefix(b"data: ") for event in events]
        return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]

    def said(self, choice: int = 0) -> Any:
        """Return what came of a choice, streamed or not, as a whole answer's choice; the text under "text"."""
        if not self.headers["Content-Type"].startswith("text/event-stream"):
            told = self.body["choices"][choice]
            return {**told, "text": told["message"]["content"] if "message" in told else told["text"]}
        chunks = [each for event in self.events if event != "[DONE]" for each in event.get("choices", [])]
        mine = [each for each in chunks if each["index"] == choice]
        text = "".join(each["delta"].get("content", "") if "delta" in each else each["text"] for each in mine)
        return {**mine[-1], "text": text}

    @property
    def usage(self) -> Any:
        """The usage: a stream's has an event of its own."""
        if not self.headers["Content-Type"].startswith("text/event-stream"):
            return self.body["usage"]
        (usage,) = [event["usage"] for event in self.events if event != "[DONE]" and event.get("usage")]
        return usage


@dataclass
class Agent:
    """An agent's HTTP that runs, and a client of it."""

    api: AgentApi
    session: aiohttp.ClientSession
    port: int

    async def ask(self, path: str, body: Any, **headers: str) -> Answered:
        data = body if isinstance(body, bytes) else json.dumps({"model": "m", **body}).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(path, data=io.BytesIO(data), headers=named) as response:
            return Answered(response.status, dict(response.headers), await response.read())

    async def open(
        self, path: str, body: Any, headers: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request, with these header lines besides; return its connection, of which nothing was read."""
        data = json.dumps({"model": "m", **body}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n" % (
            path.encode(),
            headers,
            len(data),
        )
        writer.write(head + data)
        return reader, writer

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            return response.status, await response.json()


async def nowhere() -> dict[int, tuple[int, int]]:
    return {}


@asynccontextmanager
async def serving(
    engine: Engine,
    *,
    drive: bool = True,
    inflight: int = 100,
    body_bytes: int = 1 << 20,
    position: Any = nowhere,
    clock: Clock | None = None,
    text: Text | None = None,
    fault: Callable[[], str | None] = lambda: None,
    **options: Any,
) -> AsyncIterator[Agent]:
    """Be where an agent with the model "m" serves the engine, which runs if it is driven.

    Without `text` its tokenizer is the byte tokenizer.
    """
    if drive:
        await engine.start()
    ids, text = iter(f"id{number}" for number in range(1_000_000)), text or load_text("byte")
    completions = Completions(
        engine,
        text,
        EnginePrompts(text, MediaLoader(MediaSection()), None),
        served_names=("m",),
        default_max_tokens=16,
        clock=clock or ManualClock(wall_ns=CREATED * 10**9),
        new_id=lambda: next(ids),
        **options,
    )
    api = AgentApi(
        completions,
        inflight_requests_max=inflight,
        position=position,
        status=lambda: {"log": "connected"},
        fault=fault,
    )
    app = api.app(new_registry(), token="", body_bytes_max=body_bytes)
    server = HttpServer(app, "127.0.0.1", 0, drain_s=0.2, handler_cancellation=True)
    await server.start()

    async def run_engine(stop: asyncio.Event) -> None:
        await until(stop, engine.run() if drive else asyncio.Event().wait())

    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", raise_for_status=False) as session,
        at_work(Part("http", server.run), Part("engine", run_engine, 1)),
    ):
        yield Agent(api, session, server.port)


@asynccontextmanager
async def saying(answer: str, answer_format: AnswerFormat = PLAIN, **options: Any) -> AsyncIterator[Agent]:
    """Serve an engine that says `answer` to everything."""
    source = ScriptedSource(script=(*TEXT.encode(answer), *TEXT.eos_ids))
    engine = SimulatedEngine(Simulator(SIMULATED, token_source=source), Clock(), speed=1000.0)
    async with serving(engine, answer_format=answer_format, **options) as agent:
        yield agent
