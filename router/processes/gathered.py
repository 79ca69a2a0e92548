"""What the process with the index asks the serving ones for: warm prefixes, and the newest decisions."""

from typing import Any

import msgspec

from indexer.embedded import PassedRequest
from kv_protocol.errors import UNDECODABLE
from kv_runtime.clock import Clock
from router.live.passed_requests import warmth
from router.processes.links import Links

_LIMIT = 50


class _Passed(msgspec.Struct, frozen=True):
    requests: list[tuple[int, float]]


class _Decisions(msgspec.Struct, frozen=True):
    decisions: list[dict[str, Any]]


class PassedElsewhere:
    """The heat of all processes' requests; one that does not answer has none."""

    def __init__(self, links: Links, clock: Clock) -> None:
        self._links, self._clock = links, clock
        self._decode = msgspec.json.Decoder(_Passed).decode

    async def __call__(self) -> list[PassedRequest]:
        """Return the newest requests. All processes have the machine's monotonic clock."""
        answers = await self._links.all("GET", "/v1/passed-requests")
        ends: list[tuple[int, float]] = []
        for answer in answers.values():
            try:
                ends += self._decode(answer.body).requests if answer.is_ok else []
            except UNDECODABLE:
                continue  # a process of another version, while they are replaced
        return warmth(ends, self._clock.now())


class TailOfProcesses:
    """The decisions of all processes since the last call, as far as these list them."""

    def __init__(self, links: Links, clock: Clock) -> None:
        self._links, self._clock = links, clock
        self._decode = msgspec.json.Decoder(_Decisions).decode
        self._asked_s = clock.now()

    async def since(self, count_max: int) -> tuple[list[dict[str, Any]], int]:
        """Return the newest, newest first, and how many others are listed; the processes list `_LIMIT` each."""
        before_s, self._asked_s = self._asked_s, self._clock.now()
        if not count_max:
            return [], 0
        answers = await self._links.all("GET", "/v1/decisions", query=f"limit={_LIMIT}")
        found: list[dict[str, Any]] = []
        for answer in answers.values():
            try:
                found += self._decode(answer.body).decisions if answer.is_ok else []
            except UNDECODABLE:
                continue
        new = sorted(
            (each for each in found if each["age_s"] < self._asked_s - before_s), key=lambda each: each["age_s"]
        )
        return new[:count_max], len(new) - len(new[:count_max])
