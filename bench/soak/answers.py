"""Answers read from bytes as they arrive, and compared with the expected text; and the tally of all. Pure.

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

from collections import Counter, defaultdict
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from bench.soak.requests import Kind, SoakRequest

_HEAD_END = b"\r\n\r\n"
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


class AnswerInvalid(Exception):
    """Bytes that are not an HTTP/1.1 answer; the message has what was found."""


class AnswerReader:
    """One answer of HTTP/1.1: its head, and its payload without the framing."""

    __slots__ = ("_buffer", "_left", "events", "head", "payload", "status")

    def __init__(self) -> None:
        self._buffer = b""
        self._left: int | None = None
        self.status, self.events = 0, 0
        self.head = b""
        """In lower case; empty until it is complete."""
        self.payload = bytearray()

    def feed(self, data: bytes) -> bool:
        """Return whether the answer is complete; raise `AnswerInvalid`."""
        data = self._buffer + data
        self._buffer = b""
        if not self.head:
            head, found, rest = data.partition(_HEAD_END)
            if not found:
                self._buffer = data
                return False
            self._read_head(head.lower() + b"\r\n")
            data = rest
        if self._left is None:
            return self._take_chunks(data)
        self.payload += data
        self._left -= len(data)
        if self._left < 0:
            raise AnswerInvalid(f"{-self._left} bytes behind the answer")
        return not self._left

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, empty where there is none."""
        _, _, behind = self.head.partition(b"\r\n" + name + b":")
        return behind.partition(b"\r\n")[0].strip()

    def _read_head(self, head: bytes) -> None:
        self.head = head
        try:
            self.status = int(head[9:12])
            if self.header(b"transfer-encoding") != b"chunked":
                self._left = int(self.header(b"content-length"))
        except ValueError:
            raise AnswerInvalid(f"head {head!r}") from None

    def _take_chunks(self, data: bytes) -> bool:
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            try:
                size = int(data[at:end], 16)
            except ValueError:
                raise AnswerInvalid(f"chunk size {data[at:end]!r}") from None
            begin, behind = end + 2, end + 2 + size + 2
            if len(data) < behind:
                break
            if not size:
                if data[begin:] != b"\r\n":
                    raise AnswerInvalid(f"{data[begin:]!r} behind the last chunk")
                return True
            chunk = data[begin : behind - 2]
            self.payload += chunk
            self.events += chunk.count(_EVENT)
            at = behind
        self._buffer = data[at:]
        return False


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


def judged(request: SoakRequest, answer: AnswerReader) -> AnswerOutcome:
    """Return the outcome of a request with a complete answer."""
    if answer.status != request.status:
        is_turned_away = answer.status in {429, 503} and answer.header(b"retry-after")
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


def judged_when_left(request: SoakRequest, answer: AnswerReader) -> AnswerOutcome:
    """Return the outcome of a request after its client closed the connection during the answer."""
    try:
        return AnswerOutcome.LEFT if _parsed(request, answer).begins(request) else AnswerOutcome.WRONG
    except _UNREADABLE:
        return AnswerOutcome.WRONG


def _parsed(request: SoakRequest, answer: AnswerReader) -> _ParsedAnswer:
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
_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Tally:
    """Counts of requests. A request was *hit* if its worker was killed before the answer had ended."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[Kind, AnswerOutcome]] = Counter()
        self.hit: Counter[tuple[Kind, AnswerOutcome]] = Counter()
        """The hit requests among them."""
        self.tokens = 0
        """Tokens of right answers."""
        self.examples: defaultdict[AnswerOutcome, list[str]] = defaultdict(list)
        self._latencies: Counter[float] = Counter()

    @property
    def requests(self) -> int:
        """Return how many requests have ended."""
        return self.outcomes.total()

    def add(
        self, kind: Kind, outcome: AnswerOutcome, *, tokens: int, took_s: float, was_hit: bool, detail: str
    ) -> None:
        """Count a request that has ended; `detail` is shown where it should have ended otherwise."""
        self.outcomes[kind, outcome] += 1
        self.hit[kind, outcome] += was_hit
        self._latencies[next((bound for bound in _BUCKETS_S if took_s <= bound), float("inf"))] += 1
        if outcome is AnswerOutcome.RIGHT:
            self.tokens += tokens
        elif outcome not in AS_DUE and len(self.examples[outcome]) < _EXAMPLES_MAX:
            self.examples[outcome].append(f"{kind.name}: {detail}")

    def total(self, outcome: AnswerOutcome) -> int:
        """Return how many requests ended so."""
        return sum(count for (_, each), count in self.outcomes.items() if each is outcome)

    def excused(self) -> int:
        """Return how many requests ended with an error event because their worker died and they could not migrate."""
        return sum(
            count
            for (kind, outcome), count in self.hit.items()
            if outcome is AnswerOutcome.ERROR_EVENT and not kind.can_migrate
        )

    def lost(self) -> Counter[AnswerOutcome]:
        """Return how many requests did not end as they must, by how they ended, without those that are excused."""
        lost = Counter({outcome: self.total(outcome) for outcome in AnswerOutcome if outcome not in AS_DUE})
        lost[AnswerOutcome.ERROR_EVENT] -= self.excused()
        return +lost

    def saved(self) -> int:
        """Return how many requests are right though their worker was killed in the midst of the answer."""
        return sum(count for (_, outcome), count in self.hit.items() if outcome is AnswerOutcome.RIGHT)

    def quantile_s(self, quantile: float) -> float:
        """Return the upper bound of the histogram's bucket in which the quantile of the latencies lies."""
        wanted, seen = quantile * self.requests, 0
        for bound in (*_BUCKETS_S, float("inf")):
            seen += self._latencies[bound]
            if seen >= wanted:
                return bound
        return 0.0

    def rows(self) -> Iterator[tuple[str, dict[AnswerOutcome, int]]]:
        """Yield each kind of request, and how many of it ended how."""
        by_kind: defaultdict[str, dict[AnswerOutcome, int]] = defaultdict(dict)
        for (kind, outcome), count in self.outcomes.items():
            by_kind[kind.name][outcome] = count
        yield from by_kind.items()
