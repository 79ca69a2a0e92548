"""KV transfers between simulators of one process, in virtual time.

    exchange.join("prefill-0", simulator)           # its handoffs carry this name from now on
    step = decode.step(now_s)
    exchange.begin("decode-0", step.fetches, now_s)
    ...
    for name in exchange.advance(now_s):            # when `next_s` has come, and before any step at `now_s`
        ...                                         # this engine may have work again

A transfer takes its time (`transfer.py`). Simultaneous ones are processed in the order in which they began.
"""

import heapq
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.engines.simulated.transfer import Fetch, TransferOutcome


class _Participant(NamedTuple):
    """A participant by name."""

    name: str
    simulator: Simulator


class _Transfer:
    """One fetch in progress."""

    def __init__(self, fetch: Fetch, receiver: _Participant, began_s: float) -> None:
        self.fetch, self.receiver, self.began_s = fetch, receiver, began_s
        self.sender: _Participant | None = None
        self.is_over = False


class TransferExchange:
    """Engines by name, which is the endpoint in their handoffs, and the transfers between them."""

    def __init__(self) -> None:
        self._engines: dict[str, _Participant] = {}
        self._transfers: set[_Transfer] = set()
        self._due: list[tuple[float, int, _Transfer, TransferOutcome]] = []
        self._turn = count()
        self._touched: set[str] = set()

    def join(self, name: str, simulator: Simulator) -> None:
        """Add an engine under an unused name."""
        assert name not in self._engines
        self._engines[name] = _Participant(name, simulator)
        simulator.contexts.endpoint = name

    def leave(self, name: str, now_s: float) -> None:
        """Remove an engine: its receivers lose the transfers it was sending, and transfers to it end."""
        engine = self._engines.pop(name)
        for transfer in [each for each in self._transfers if engine in (each.receiver, each.sender)]:
            self._end(transfer, "lost", now_s)

    def begin(self, name: str, fetches: Iterable[Fetch], now_s: float) -> None:
        """Begin the fetches of an engine's step that began at `now_s`."""
        receiver = self._engines[name]
        for fetch in fetches:
            transfer = _Transfer(fetch, receiver, now_s)
            self._transfers.add(transfer)
            self._at(now_s + receiver.simulator.transfers.timeout_s, transfer, "timeout")
            self._send(transfer, now_s)

    @property
    def next_s(self) -> float | None:
        """The time of the next change; None without transfers and held contexts."""
        while self._due and self._due[0][2].is_over:
            heapq.heappop(self._due)
        expiries_s = (engine.simulator.contexts.next_expiry_s for engine in self._engines.values())
        times_s = [self._due[0][0]] if self._due else []
        return min((*times_s, *(each for each in expiries_s if each is not None)), default=None)

    def advance(self, now_s: float) -> frozenset[str]:
        """Process everything due until `now_s`; return the engines affected since the last call."""
        while self._due and self._due[0][0] <= now_s:
            at_s, _, transfer, outcome = heapq.heappop(self._due)
            self._end(transfer, outcome, at_s)
        for engine in self._engines.values():
            if (expiry_s := engine.simulator.contexts.next_expiry_s) is not None and expiry_s <= now_s:
                engine.simulator.expire(now_s)
                self._touched.add(engine.name)
        touched, self._touched = frozenset(self._touched), set()
        return touched

    def _at(self, at_s: float, transfer: _Transfer, outcome: TransferOutcome) -> None:
        heapq.heappush(self._due, (at_s, next(self._turn), transfer, outcome))

    def _send(self, transfer: _Transfer, now_s: float) -> None:
        fetch = transfer.fetch
        if (sender := self._engines.get(fetch.endpoint)) is None:
            self._end(transfer, "lost", now_s)
        elif not sender.simulator.contexts.holds(fetch.transfer_id, fetch.state, fetch.tokens):
            self._end(transfer, "gone", now_s)
        else:
            transfer.sender = sender
            self._at(now_s + sender.simulator.transfers.duration_s(fetch.tokens), transfer, "done")

    def _end(self, transfer: _Transfer, outcome: TransferOutcome, now_s: float) -> None:
        if transfer.is_over:
            return
        transfer.is_over = True
        self._transfers.remove(transfer)
        fetch, receiver, sender = transfer.fetch, transfer.receiver, transfer.sender
        if outcome == "done":
            assert sender is not None
            self._touched.add(sender.name)
            outcome = "done" if sender.simulator.hand_over(fetch.transfer_id) else "gone"
        if receiver.name in self._engines:
            self._touched.add(receiver.name)
            receiver.simulator.fetch_ended(fetch, outcome, now_s - transfer.began_s)
