"""Users of a soak: each sends one request at a time, and every answer is compared with the expected text.

| outcome | is |
|---|---|
| right | complete, and every choice has the expected text |
| refused | a 4xx was expected, and came with an error body |
| left | the client closed its connection; what it had received is right |
| turned away | 429 or 503 with `Retry-After` |
| error event | the stream ended with an error event; the part before it is right |
| failed | not the expected status |
| cut | the connection was lost before the answer was complete, without an error |
| wrong | complete, with other content |
| hung | not complete in time |
"""

import asyncio
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from enum import StrEnum
from io import BytesIO
from typing import Any

import aiohttp
import msgspec
import psutil

from bench.soak.requests import Kind, SoakRequest, User

_EVENT = b"data: "
_DONE = b"[DONE]"
_OK = 200
_UNREADABLE = (msgspec.DecodeError, KeyError, TypeError, AttributeError)


class AnswerOutcome(StrEnum):
    """How a request ended."""

    RIGHT = "right"
    REFUSED = "refused"
    LEFT = "left"
    TURNED_AWAY = "turned away"
    ERROR_EVENT = "error event"
    FAILED = "failed"
    CUT = "cut"
    WRONG = "wrong"
    HUNG = "hung"


AS_DUE = (AnswerOutcome.RIGHT, AnswerOutcome.REFUSED, AnswerOutcome.LEFT)
"""Outcomes as expected."""


class SoakAnswer:
    """One answer, as far as it has come."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        """Empty until its head has come."""
        self.payload = bytearray()

    @property
    def worker(self) -> str:
        """The worker that answers; empty: it is not known."""
        return self.headers.get("x-worker-instance-id", "")

    @property
    def events(self) -> int:
        """How many events of a stream have begun."""
        return self.payload.count(_EVENT)


class _ParsedAnswer:
    """A parsed answer: the texts of its choices, their finish reasons, and how the answer ended."""

    def __init__(self, choices: int) -> None:
        self._parts: defaultdict[int, list[str]] = defaultdict(list)
        self._choices = choices
        self.finished: dict[int, str] = {}
        self.completion_tokens: int | None = None
        self.has_error = self.is_done = False

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple("".join(self._parts[choice]) for choice in range(self._choices))

    def take(self, body: dict[str, Any]) -> None:
        """Add an answer's body, or that of one event."""
        self.has_error |= "error" in body
        for choice in body.get("choices", ()):
            parsed = choice.get("delta") or choice.get("message") or choice
            self._parts[choice["index"]].append(parsed.get("content", parsed.get("text")) or "")
            if choice.get("finish_reason"):
                self.finished[choice["index"]] = choice["finish_reason"]
        if usage := body.get("usage"):
            self.completion_tokens = usage["completion_tokens"]

    def is_right(self, request: SoakRequest) -> bool:
        """Whether nothing is missing, and nothing differs."""
        tokens = request.tokens * request.kind.choices if request.has_usage else None
        lengths = dict.fromkeys(range(request.kind.choices), "length")
        return (self.texts, self.finished, self.completion_tokens) == (request.texts, lengths, tokens)

    def begins(self, request: SoakRequest) -> bool:
        """Whether the texts so far are prefixes of the expected texts."""
        return all(expected.startswith(part) for expected, part in zip(request.texts, self.texts, strict=True))


def judged(request: SoakRequest, answer: SoakAnswer) -> AnswerOutcome:
    """Return the outcome of a request with a complete answer."""
    if answer.status != request.status:
        is_turned_away = answer.status in {429, 503} and answer.headers.get("retry-after")
        return AnswerOutcome.TURNED_AWAY if is_turned_away else AnswerOutcome.FAILED
    try:
        parsed = _parsed(request, answer)
    except _UNREADABLE:
        return AnswerOutcome.WRONG
    if request.status != _OK:
        return AnswerOutcome.REFUSED if parsed.has_error else AnswerOutcome.WRONG
    if parsed.has_error:
        return AnswerOutcome.ERROR_EVENT if parsed.is_done and parsed.begins(request) else AnswerOutcome.WRONG
    is_ended = parsed.is_done or not request.kind.is_stream
    return AnswerOutcome.RIGHT if is_ended and parsed.is_right(request) else AnswerOutcome.WRONG


def judged_when_left(request: SoakRequest, answer: SoakAnswer) -> AnswerOutcome:
    """Return the outcome of a request after its client closed the connection during the answer."""
    try:
        return AnswerOutcome.LEFT if _parsed(request, answer).begins(request) else AnswerOutcome.WRONG
    except _UNREADABLE:
        return AnswerOutcome.WRONG


def _parsed(request: SoakRequest, answer: SoakAnswer) -> _ParsedAnswer:
    parsed = _ParsedAnswer(request.kind.choices)
    if not request.kind.is_stream:
        parsed.take(msgspec.json.decode(answer.payload))
        return parsed
    for event in bytes(answer.payload).split(b"\n\n")[:-1]:
        _, found, data = event.partition(_EVENT)
        if data == _DONE:
            parsed.is_done = True
        elif found:
            parsed.take(msgspec.json.decode(data))
    return parsed


_EXAMPLES_MAX = 5


class Tally:
    """Counts of requests. A request was *hit* if its worker was killed before the answer had ended."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[Kind, AnswerOutcome]] = Counter()
        self.hit: Counter[tuple[Kind, AnswerOutcome]] = Counter()
        """As `outcomes`, for hit requests only."""
        self.tokens = 0
        """Tokens of right answers."""
        self.examples: defaultdict[AnswerOutcome, list[str]] = defaultdict(list)
        self.latencies_s = array("d")

    @property
    def requests(self) -> int:
        """How many requests have ended."""
        return self.outcomes.total()

    def add(
        self, kind: Kind, outcome: AnswerOutcome, *, tokens: int, took_s: float, was_hit: bool, detail: str
    ) -> None:
        """Count a request that has ended; `detail` is shown if `outcome` is not in `AS_DUE`."""
        self.outcomes[kind, outcome] += 1
        self.hit[kind, outcome] += was_hit
        self.latencies_s.append(took_s)
        if outcome is AnswerOutcome.RIGHT:
            self.tokens += tokens
        elif outcome not in AS_DUE and len(self.examples[outcome]) < _EXAMPLES_MAX:
            self.examples[outcome].append(f"{kind.name}: {detail}")

    def total(self, outcome: AnswerOutcome) -> int:
        """Return how many requests have this outcome."""
        return sum(count for (_, each), count in self.outcomes.items() if each is outcome)

    def excused(self) -> int:
        """Return how many requests ended with an error event because their worker died and they could not migrate."""
        return sum(
            count
            for (kind, outcome), count in self.hit.items()
            if outcome is AnswerOutcome.ERROR_EVENT and not kind.can_migrate
        )

    def lost(self) -> Counter[AnswerOutcome]:
        """Return how many requests have each outcome that is not in `AS_DUE`, without the excused ones."""
        lost = Counter({outcome: self.total(outcome) for outcome in AnswerOutcome if outcome not in AS_DUE})
        lost[AnswerOutcome.ERROR_EVENT] -= self.excused()
        return +lost

    def saved(self) -> int:
        """Return how many requests are right although their worker was killed during the answer."""
        return sum(count for (_, outcome), count in self.hit.items() if outcome is AnswerOutcome.RIGHT)

    def rows(self) -> Iterator[tuple[str, dict[AnswerOutcome, int]]]:
        """Yield each kind of request, and its requests by outcome."""
        by_kind: defaultdict[str, dict[AnswerOutcome, int]] = defaultdict(dict)
        for (kind, outcome), count in self.outcomes.items():
            by_kind[kind.name][outcome] = count
        yield from by_kind.items()


_DETAIL_BYTES = 300
_KEPT_S = 3600.0
"""How long a connection stays open without requests."""
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
        """All workers killed during each answer: the worker that answers is known only once the answer's head came."""
        self._unsent, self.begun = 0, 0
        self._milestone: tuple[int, asyncio.Event] | None = None
        self.tally = Tally()

    @property
    def open_connections(self) -> int:
        """How many connections to the router are open."""
        port = int(self._url.rpartition(":")[2])
        opened = psutil.Process().net_connections("tcp")
        return sum((each.status, *each.raddr[1:]) == (psutil.CONN_ESTABLISHED, port) for each in opened)

    async def send(self, requests: int) -> None:
        """Send this many requests; return when all have ended."""
        self._unsent = requests
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._users)):
                group.create_task(self._go(number))
        if self._milestone is not None:
            self._milestone[1].set()

    async def until_begun(self, requests: int) -> None:
        """Return once `requests` have begun since the start, or no more will. For one caller at a time."""
        if self.begun < requests:
            self._milestone = requests, asyncio.Event()
            await self._milestone[1].wait()
            self._milestone = None

    def answers_by_worker(self) -> Counter[str]:
        """Return how many answers of each worker are on their way."""
        return Counter(answer.worker for answer in self._pending.values() if answer.worker)

    def hit(self, worker: str) -> None:
        """Note for every pending answer that this worker is killed now."""
        for number in self._pending:
            self._killed[number].add(worker)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _go(self, number: int) -> None:
        while self._unsent > 0:
            self._unsent -= 1
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
            detail=f"{answer.status} {dict(answer.headers)} ... {bytes(answer.payload[-_DETAIL_BYTES:])!r}, "
            f"expected {request.status} {[text[-64:] for text in request.texts]}",
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
