"""The users of a soak: each has one request at a time, over and over."""

import asyncio
import time
from collections import Counter
from io import BytesIO

import aiohttp
import psutil

from bench.soak.answers import AS_DUE, AnswerOutcome, SoakAnswer, Tally, judged, judged_when_left
from bench.soak.requests import SoakRequest, User

_DETAIL_BYTES = 300
_KEPT_S = 3600.0
"""A connection without requests stays open over the quiet moments."""
_HEADERS = {"content-type": "application/json"}


class Clients:
    """All users, between entering and leaving the block; `url` is the router's."""

    def __init__(self, url: str, *, users: int, seed: int, patience_s: float) -> None:
        self._url = url
        timeout = aiohttp.ClientTimeout(total=patience_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
        self._session = aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=_HEADERS)
        self._users = [User(seed, number) for number in range(users)]
        self._pending: dict[int, SoakAnswer] = {}
        """Answers on their way, by the user's number."""
        self._killed: dict[int, set[str]] = {}
        """Workers that were killed meanwhile. The head of an answer may still be on its way from the router then."""
        self._left, self.begun = 0, 0
        self._milestone: tuple[int, asyncio.Event] | None = None
        self.tally = Tally()

    @property
    def open_connections(self) -> int:
        """Return how many connections to the router are open."""
        port = int(self._url.rpartition(":")[2])
        opened = psutil.Process().net_connections("tcp")
        return sum((each.status, *each.raddr[1:]) == (psutil.CONN_ESTABLISHED, port) for each in opened)

    async def send(self, requests: int) -> None:
        """Send so many requests; return when all have ended."""
        self._left = requests
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._users)):
                group.create_task(self._go(number))
        if self._milestone is not None:
            self._milestone[1].set()

    async def until_begun(self, requests: int) -> None:
        """Return when so many requests have begun since the start, or no more will; one may wait at a time."""
        if self.begun < requests:
            self._milestone = requests, asyncio.Event()
            await self._milestone[1].wait()
            self._milestone = None

    def answers_by_worker(self) -> Counter[str]:
        """Return how many answers of each worker are on their way."""
        return Counter(answer.worker for answer in self._pending.values() if answer.worker)

    def hit(self, worker: str) -> None:
        """Mark the pending answers of a worker that is killed now."""
        for number in self._pending:
            self._killed[number].add(worker)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _go(self, number: int) -> None:
        while self._left > 0:
            self._left -= 1
            self.begun += 1
            if self._milestone is not None and self.begun >= self._milestone[0]:
                self._milestone[1].set()
            await self._send_one(number, self._users[number].next())

    async def _send_one(self, number: int, request: SoakRequest) -> None:
        began_s = time.perf_counter()
        answer, killed = SoakAnswer(), set[str]()
        self._pending[number], self._killed[number] = answer, killed
        outcome = await self._outcome(request, answer)
        del self._pending[number]
        self.tally.add(
            request.kind,
            outcome,
            tokens=request.tokens * request.kind.choices,
            took_s=time.perf_counter() - began_s,
            was_hit=answer.worker in killed,
            detail="" if outcome in AS_DUE else _detail(answer, request),
        )

    async def _outcome(self, request: SoakRequest, answer: SoakAnswer) -> AnswerOutcome:
        try:
            async with self._session.post(
                request.path, data=BytesIO(request.body), headers=request.headers
            ) as response:
                answer.status, answer.headers = response.status, response.headers
                async for data in response.content.iter_any():
                    answer.payload += data
                    if request.leaves_after and answer.events >= request.leaves_after and not response.content.at_eof():
                        response.close()
                        return judged_when_left(request, answer)
        except TimeoutError:
            return AnswerOutcome.HUNG
        except aiohttp.ClientResponseError:  # what came is no HTTP
            return AnswerOutcome.WRONG
        except aiohttp.ClientError:
            return AnswerOutcome.CUT
        return judged(request, answer)


def _detail(answer: SoakAnswer, request: SoakRequest) -> str:
    payload, expected = bytes(answer.payload[-_DETAIL_BYTES:]), [text[-64:] for text in request.texts]
    return f"{answer.status} {dict(answer.headers)} ... {payload!r}, expected {request.status} {expected}"
