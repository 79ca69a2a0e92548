"""The progress of a hand-over, as `GET /v1/workers/{id}/drain` shows it."""

from collections import Counter
from typing import Literal

import msgspec

from kv_protocol.fleet import WorkerRegistered

SHOWN_MAX = 32
"""Prefixes of a list that are shown."""

State = Literal["looking", "warming", "waiting", "over"]
WarmingOutcome = Literal["warmed", "failed", "skipped"]
OUTCOMES: tuple[WarmingOutcome, ...] = ("warmed", "failed", "skipped")


class PrefixStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix of the list, and its outcome, empty until it is known; `reason` says why it was not warmed."""

    model: str
    tokens: int
    blocks: int
    new_blocks: int
    heat: float
    held_blocks: int
    elsewhere_blocks: int
    outcome: WarmingOutcome | Literal[""] = ""
    worker: str = ""
    reason: str = ""


class HandoverStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a hand-over. `prompts`: prompts in the last pass; `reason`: why nothing is handed over."""

    state: State
    reason: str
    prompts: int
    listed: int
    warmed: int
    failed: int
    skipped: int
    budget_tokens: int
    spent_tokens: int
    within_s: float
    seconds: float
    prefixes: tuple[PrefixStatus, ...]
    """The first `SHOWN_MAX`."""


class HandoverRun:
    """One worker's running hand-over; `Handover` writes it."""

    def __init__(self, registration: WorkerRegistered, budget_tokens: int, within_s: float, now_s: float) -> None:
        self.registration, self.budget_tokens = registration, budget_tokens
        self.within_s, self.began_s = within_s, now_s
        self.state: State = "looking"
        self.reason = ""
        self.prompts = self.listed = self.spent_tokens = 0
        self.counts: Counter[WarmingOutcome] = Counter()
        self.shown: list[PrefixStatus] = []
        self.warmed: set[int] = set()
        """The hashes of the last blocks of prefixes that were warmed."""
        self.ended_s: float | None = None

    def left_s(self, now_s: float) -> float:
        """Return the remaining time."""
        return self.began_s + self.within_s - now_s

    def warmed_blocks(self, chain: bytes) -> int:
        """Return how many leading blocks of a chain were warmed: their events may not have come yet."""
        blocks = enumerate(memoryview(chain).cast("Q"), 1) if self.warmed else ()
        return max((count for count, block in blocks if block in self.warmed), default=0)

    def settle(self, at: int, outcome: WarmingOutcome, worker: str, reason: str) -> None:
        """Set the outcome of the prefix at an index of the list."""
        self.counts[outcome] += 1
        if at < SHOWN_MAX:
            self.shown[at] = msgspec.structs.replace(self.shown[at], outcome=outcome, worker=worker, reason=reason)

    def status_at(self, now_s: float) -> HandoverStatus:
        """Return the present status."""
        return HandoverStatus(
            state=self.state,
            reason=self.reason,
            prompts=self.prompts,
            listed=self.listed,
            warmed=self.counts["warmed"],
            failed=self.counts["failed"],
            skipped=self.counts["skipped"],
            budget_tokens=self.budget_tokens,
            spent_tokens=self.spent_tokens,
            within_s=self.within_s,
            seconds=(now_s if self.ended_s is None else self.ended_s) - self.began_s,
            prefixes=tuple(self.shown),
        )
