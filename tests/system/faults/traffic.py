"""Requests at a steady rate, whatever becomes of them: an open loop, like people who do not know of each other.

answered    status 200, within 10 s
waited      tries while the port of the router was closed; they go on until it is open
failed      everything else
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from random import Random
from typing import NamedTuple

import aiohttp

MODEL = "sim-8b"
BLOCK_TOKENS = 16
TENANTS = 3
_SYSTEMS = 6
_WORDS = ("the prompt", "a cache", "each block", "holds tokens", "the router", "keeps it", "for the next", "worker")
_ANSWER_TOKENS = 20
_ANSWER_S = 10.0
"""A client that waited longer has gone."""
_RETRY_S = 0.05


class TrafficShape(NamedTuple):
    """How often, and how long: prompts are a common beginning and a question of their own, in blocks."""

    requests_per_s: float = 10.0
    system_blocks: int = 6
    question_blocks: tuple[int, int] = (3, 9)


class Failed(NamedTuple):
    """A request that was not answered: when it began (the loop's clock), and why."""

    began_s: float
    reason: str


class Traffic:
    """The requests of one test. `failed` is for the test to judge."""

    def __init__(self, data_url: str, shape: TrafficShape) -> None:
        self._url = f"{data_url}/v1/completions"
        self._pause_s = 1 / shape.requests_per_s
        self._prompts = prompts(shape, seed=1)
        self.answered = 0
        self.failed: list[Failed] = []
        self.waited = 0
        self._stopped, self._changed = asyncio.Event(), asyncio.Event()

    async def more(self, answers: int = 20) -> None:
        """Return once so many more requests were answered."""
        wanted = self.answered + answers
        async with asyncio.timeout(answers * self._pause_s + _ANSWER_S):
            while self.answered < wanted:
                self._changed.clear()
                await self._changed.wait()

    def stop(self) -> None:
        """No more requests begin."""
        self._stopped.set()

    async def run(self) -> None:
        """Send until stopped; return when the last answer is there."""
        loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        due_s = loop.time()
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            while not self._stopped.is_set():
                group.create_task(self._send(session, next(self._prompts)))
                due_s += self._pause_s
                await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _send(self, session: aiohttp.ClientSession, prompt: list[int]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, body = await self._answer(session, prompt)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.failed.append(Failed(began_s, f"{type(error).__name__}: {error}"))
            return
        if status == 200:
            self.answered += 1
            self._changed.set()
        else:
            self.failed.append(Failed(began_s, f"{status}: {body}"))

    async def _answer(self, session: aiohttp.ClientSession, prompt: list[int]) -> tuple[int, str]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": _ANSWER_TOKENS}
        tenant = {"x-tenant-id": f"tenant-{prompt[0] % TENANTS}"}
        while True:
            try:
                async with session.post(self._url, json=body, headers=tenant) as response:
                    return response.status, await response.text()
            except aiohttp.ClientConnectorError:
                self.waited += 1
                await asyncio.sleep(_RETRY_S)


def prompts(shape: TrafficShape, seed: int) -> Iterator[list[int]]:
    """Yield prompts as tokens of the byte tokenizer: they share beginnings and differ in their ends.

    Every third shares nothing, so that a worker with an empty cache gets requests, too.
    """
    draw = Random(seed)
    systems = [_tokens(draw, shape.system_blocks) for _ in range(_SYSTEMS)]
    for number in count():
        begins = draw.choice(systems) if number % 3 else _tokens(draw, shape.system_blocks)
        yield begins + _tokens(draw, draw.randint(*shape.question_blocks))


def _tokens(draw: Random, blocks: int) -> list[int]:
    text = f"{draw.randrange(1 << 40)} " + " ".join(draw.choices(_WORDS, k=blocks * BLOCK_TOKENS))
    return list(text.encode()[: blocks * BLOCK_TOKENS])


@asynccontextmanager
async def traffic(data_url: str, shape: TrafficShape | None = None) -> AsyncIterator[Traffic]:
    """Requests are sent while the block runs; when it is left, all are over."""
    sent = Traffic(data_url, shape or TrafficShape())
    running = asyncio.ensure_future(sent.run())
    try:
        yield sent
    finally:
        sent.stop()
        await running
