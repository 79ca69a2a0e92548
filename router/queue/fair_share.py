"""Deficit round robin between tenants: none can starve another.

    quantum        of a key = `quantum_tokens` x its weight: tokens that it may be served per round
    round          each key whose head may go now gets its quantum; while its deficit covers its head, it is served
    served         the head's cost is subtracted from its deficit
    nothing waits  the key is forgotten, with its deficit: idle keys save nothing up
    head may not go now    the key is skipped; its deficit does not change

So while two keys always have a request that may go, their shares differ from the ratio of their weights by no more than
a quantum and the largest request of each. A head of cost c goes after at most ceil(c / quantum) rounds, whatever others
send.

Rounds that would serve no key are not simulated: all keys get the smallest number of quanta after which a head is
covered at once, so that a turn checks every waiting key once, however large the requests. Source: Shreedhar and
Varghese, "Efficient fair queuing using deficit round robin", SIGCOMM 1995.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec


class FairShareLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a round of a key with weight 1, and the weights of keys that have another (> 0)."""

    quantum_tokens: int = 2048
    weights: Mapping[str, float] = {}


class _Share:
    __slots__ = ("deficit_tokens", "is_at_its_turn", "quantum_tokens")

    def __init__(self, quantum_tokens: float) -> None:
        self.quantum_tokens = quantum_tokens
        self.deficit_tokens = 0.0
        self.is_at_its_turn = False  # it has this round's quantum, and is first in the ring

    def rounds(self, cost_tokens: int) -> int:
        """Return how many quanta it needs, at least one, to cover the cost."""
        return max(1, math.ceil((cost_tokens - self.deficit_tokens) / self.quantum_tokens))


class FairShare:
    """The ring of keys with waiting requests; the caller keeps the requests."""

    def __init__(self, limits: FairShareLimits | None = None) -> None:
        self._limits = limits or FairShareLimits()
        self._ring: OrderedDict[str, _Share] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._ring

    def __len__(self) -> int:
        return len(self._ring)

    def waits(self, key: str) -> None:
        """A request of the key waits; a new key comes last in the ring."""
        if key not in self._ring:
            self._ring[key] = _Share(self._limits.quantum_tokens * self._limits.weights.get(key, 1.0))

    def waits_no_more(self, key: str) -> None:
        """No request of the key waits any more; an unknown key is ignored."""
        self._ring.pop(key, None)

    def take_turn(self, cost_tokens: Callable[[str], int | None]) -> str | None:
        """Charge and return the key whose turn it is; None if no head may go now.

        `cost_tokens(key)` is the cost of the key's head, 1 or more, or None if it may not go now.
        """
        turn = self._same_turn(cost_tokens)
        if turn is not None:
            return turn
        able = [(key, share, cost) for key, share in self._ring.items() if (cost := cost_tokens(key)) is not None]
        if not able:
            return None
        needed = [share.rounds(cost) for _, share, cost in able]
        rounds = min(needed)
        first = needed.index(rounds)
        for place, (_, share, _) in enumerate(able):
            share.deficit_tokens += share.quantum_tokens * (rounds if place <= first else rounds - 1)
        key, share, cost = able[first]
        share.is_at_its_turn = True
        share.deficit_tokens -= cost
        while (passed := next(iter(self._ring))) != key:
            self._ring.move_to_end(passed)
        return key

    def _same_turn(self, cost_tokens: Callable[[str], int | None]) -> str | None:
        """Return the ring's first, where it is its turn still; else its turn is over."""
        for key, share in self._ring.items():
            if not share.is_at_its_turn:
                return None
            cost = cost_tokens(key)
            if cost is not None and cost <= share.deficit_tokens:
                share.deficit_tokens -= cost
                return key
            share.is_at_its_turn = False
            self._ring.move_to_end(key)
            return None
        return None
