"""Contexts that a prefill engine holds until their KV was fetched.

hold        returns a name: the request's `transfer_id`, else the next free number of this engine
holds       whether a name and its handoff's state are those of a held context
give_up     ends the hold: the context was fetched
expired     contexts that were not fetched within `timeout_s` from the beginning of their last iteration
"""

from typing import NamedTuple

from worker_agent.engines.simulated.blocks import BlockTable
from worker_agent.engines.simulated.transfer import state_of


class HeldContext(NamedTuple):
    """A computed prompt, its blocks at a rank, and the state that a fetch must present."""

    dp_rank: int
    table: BlockTable
    prompt: tuple[int, ...]
    state: bytes
    until_s: float


class HeldContexts:
    """The contexts of all ranks of one engine; the ranks' blocks bound their number."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[int, HeldContext] = {}
        self._number = 0
        self.endpoint: str | None = None
        """The address to fetch them from, once it is known."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """How many tokens' KV is held."""
        return sum(len(each.prompt) for each in self._held.values())

    @property
    def next_expiry_s(self) -> float | None:
        """When the next one expires; None if none is held."""
        return min((each.until_s for each in self._held.values()), default=None)

    def count_at(self, dp_rank: int) -> int:
        """Return how many a rank holds."""
        return sum(each.dp_rank == dp_rank for each in self._held.values())

    def hold(
        self, dp_rank: int, table: BlockTable, prompt: tuple[int, ...], now_s: float, transfer_id: int | None
    ) -> tuple[int, bytes]:
        """Return the context's name, not in use before, and its state."""
        while transfer_id is None or transfer_id in self._held:
            self._number += 1
            transfer_id = self._number
        state = state_of(prompt, transfer_id)
        self._held[transfer_id] = HeldContext(dp_rank, table, prompt, state, now_s + self._timeout_s)
        return transfer_id, state

    def holds(self, transfer_id: int, state: bytes, tokens: int) -> bool:
        """Return whether so many tokens of the context are held."""
        held = self._held.get(transfer_id)
        return held is not None and held.state == state and 0 < tokens <= len(held.prompt)

    def give_up(self, transfer_id: int) -> HeldContext | None:
        """Remove and return the context, whose blocks the caller releases; None if it is not held."""
        return self._held.pop(transfer_id, None)

    def expired(self, now_s: float) -> list[HeldContext]:
        """Remove and return the contexts that were not fetched in time, likewise."""
        late = [name for name, each in self._held.items() if each.until_s <= now_s]
        return [self._held.pop(name) for name in late]
