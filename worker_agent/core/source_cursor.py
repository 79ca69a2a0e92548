"""Reading place in one publisher's hop A stream: in order, without holes, once each.

    frame at the expected sequence     deliver, and what waited behind it
    frame above it                     keep (bounded), ask for a replay from the expected one
    frame below it                     a duplicate: nothing
    replay ended, its hole still there lost: deliver what is kept behind the last such hole, and say so
    replay ended, a younger hole there ask again: what was published after the answer is no loss
    silence                            ask for a replay from the expected one, in case the last messages were lost

Whoever forgets everything at a loss needs nothing that is older than its last hole.
At most one replay is in flight; one that does not end within `answer_s` is asked again. Answers end in the order of
their questions, so each end is held against what was known to be published by then.
"""

from collections import deque
from typing import NamedTuple

KEPT_MAX = 10_000
QUESTIONS_MAX = 16


class Delivery(NamedTuple):
    """What one input brought: payloads to apply in order, and whether earlier ones are lost for good before them."""

    payloads: tuple[tuple[int, bytes], ...] = ()
    lost: bool = False


class SourceCursor:
    """The place, and what waits beyond a hole. `ask_from` is the sequence to ask a replay from, when one is due."""

    def __init__(self, *, answer_s: float = 2.0, idle_s: float = 1.0) -> None:
        self._answer_s = answer_s
        self._idle_s = idle_s
        self._expected = 0
        self._kept: dict[int, bytes] = {}
        self._asked_at_s: float | None = None
        self._known: deque[int] = deque(maxlen=QUESTIONS_MAX)
        self._heard_at_s = float("-inf")
        self.gaps_total = self.replays_total = self.lost_total = self.duplicates_total = 0

    @property
    def expected(self) -> int:
        """The sequence that comes next."""
        return self._expected

    @property
    def has_hole(self) -> bool:
        """Whether messages wait for earlier ones."""
        return bool(self._kept)

    def on_live(self, sequence: int, payload: bytes, now_s: float) -> Delivery:
        """A published message came."""
        self._heard_at_s = now_s
        if sequence > self._expected and not self._kept:
            self.gaps_total += 1
        return self._accept(sequence, payload)

    def on_replayed(self, sequence: int, payload: bytes) -> Delivery:
        """A message of a replay came, and with it all older ones that are still there."""
        if self._known:
            self._known[0] = max(self._known[0], sequence)
        return self._accept(sequence, payload)

    def on_replay_end(self, now_s: float) -> Delivery:
        """A replay is over; what it should have brought and did not is lost."""
        self._asked_at_s = None
        self._heard_at_s = now_s
        known = self._known.popleft() if self._known else -1
        if self._expected > known:
            return Delivery()
        self.lost_total += 1
        while known - 1 in self._kept:
            known -= 1
        self._expected = known
        self._kept = {sequence: payload for sequence, payload in self._kept.items() if sequence >= known}
        return Delivery(self._drain(), lost=True)

    def ask_from(self, now_s: float) -> int | None:
        """Return the sequence to ask a replay from, once, when a replay is due."""
        if self._asked_at_s is not None and now_s - self._asked_at_s < self._answer_s:
            return None
        if self._asked_at_s is None and not self._kept and now_s - self._heard_at_s < self._idle_s:
            return None
        self._asked_at_s = now_s
        self._known.append(max(self._kept, default=-1))
        self.replays_total += 1
        return self._expected

    def _accept(self, sequence: int, payload: bytes) -> Delivery:
        if sequence < self._expected or sequence in self._kept:
            self.duplicates_total += 1
            return Delivery()
        self._kept[sequence] = payload
        if len(self._kept) > KEPT_MAX:
            self.lost_total += 1
            self._expected = min(self._kept)
            return Delivery(self._drain(), lost=True)
        return Delivery(self._drain())

    def _drain(self) -> tuple[tuple[int, bytes], ...]:
        drained = []
        while self._expected in self._kept:
            drained.append((self._expected, self._kept.pop(self._expected)))
            self._expected += 1
        return tuple(drained)
