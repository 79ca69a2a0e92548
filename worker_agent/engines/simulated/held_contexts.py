"""Contexts that a prefill engine holds until their KV was fetched.

hold        a name: the request's `transfer_id`, else the next number of this engine's own that is free
holds       whether a name and the state that was said with it are those of a context here
give_up     it is held no more: it was fetched
expired     what nobody fetched within `timeout_s`, which count from the beginning of its last iteration
"""

from typing import NamedTuple

from worker_agent.engines.simulated.blocks import BlockTable
from worker_agent.engines.simulated.transfer import state_of


class HeldContext(NamedTuple):
    """A computed prompt, the blocks it has at a rank, and what says that an asker means it."""

    dp_rank: int
    table: BlockTable
    prompt: tuple[int, ...]
    state: bytes
    until_s: float


class HeldContexts:
    """One engine's, of all its ranks; as many as their blocks allow."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[int, HeldContext] = {}
        self._number = 0
        self.endpoint: str | None = None
        """Where they are fetched, once that is known."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """How many tokens' KV is held."""
        return sum(len(each.prompt) for each in self._held.values())

    @property
    def next_expiry_s(self) -> float | None:
        """When the next one is given up; None where nothing is held."""
        return min((each.until_s for each in self._held.values()), default=None)

    def count_at(self, dp_rank: int) -> int:
        """Return how many lie at a rank."""
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
        """Return whether so many tokens of the context are here."""
        held = self._held.get(transfer_id)
        return held is not None and held.state == state and 0 < tokens <= len(held.prompt)

    def give_up(self, transfer_id: int) -> HeldContext | None:
        """Return the context, whose blocks are the caller's to release; None where it is not here."""
        return self._held.pop(transfer_id, None)

    def expired(self, now_s: float) -> list[HeldContext]:
        """Return what nobody fetched in time, likewise."""
        late = [name for name, each in self._held.items() if each.until_s <= now_s]
        return [self._held.pop(name) for name in late]
