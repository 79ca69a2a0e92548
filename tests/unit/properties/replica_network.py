"""Several routers' ledgers and replications on a network that loses, doubles, delays and reorders, in virtual time.

One seed decides all. Messages travel as bytes. Nothing but the replications keeps the ledgers alike.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import LedgerApplied
from kv_protocol.ledger import (
    Cancelled,
    Finished,
    FirstToken,
    LeaseEvent,
    LedgerEvent,
    Renewed,
    Routed,
    decode_replica,
    encode_replica,
)
from kv_protocol.splitmix import choice_index
from router.decision.state import RankLoad, RouterState
from router.replicas.replication import Effect, Replication
from tests.unit.router.samples import chain, state

RANKS = tuple(WorkerRank(f"w{number}", 0) for number in range(3))
TICK_S = 0.1
LATENCY_S = 0.02


def chain_of(path: Iterable[int]) -> bytes:
    """Return the chain whose blocks are named by the way to them."""
    return chain(*accumulate(path, lambda before, step: 10 * before + step))


class Message(NamedTuple):
    """On its way to one router."""

    at_s: float
    number: int
    to: int
    data: bytes


def apply(to: RouterState, event: LedgerEvent, now_s: float) -> None:
    """The event happens to a lease of the router itself."""
    to.apply(LedgerApplied(now_s=now_s, event=event))


class Router:
    """One life of one router."""

    def __init__(self, name: str, life: int) -> None:
        self.name = name
        self.state = state()
        self.replication = Replication(name, life)
        self.own: dict[str, LeaseEvent] = {}

    def does(self, event: LeaseEvent, now_s: float) -> None:
        """The event happens to an own lease."""
        apply(self.state, event, now_s)
        self.replication.on_lease_event(event)
        if isinstance(event, Routed):
            self.own[event.lease_id] = event
        elif not isinstance(event, FirstToken | Renewed):
            self.own.pop(event.lease_id, None)

    def sums(self) -> tuple[dict[WorkerRank, RankLoad], int]:
        """Return the promised load of each rank, and how many leases there are."""
        loads = {rank: load for rank, load in self.state.loads().items() if load != RankLoad()}
        return loads, self.state.core.open_leases


class Network:
    """The routers, and what is on its way between them."""

    def __init__(self, seed: int, routers: int) -> None:
        self._seed, self._draws = seed, 0
        self.now_s = 0.0
        self.is_troubled = True
        self.routers: list[Router | None] = [Router(f"r{number}", 1) for number in range(routers)]
        self._lives = [1] * routers
        self._on_its_way: list[Message] = []
        self._leases = self._messages = 0

    def draw(self, count: int) -> int:
        """Return the next number below `count`."""
        self._draws += 1
        return choice_index(self._seed, count, self._draws)

    def alive(self) -> list[Router]:
        """Return the routers that are there."""
        return [router for router in self.routers if router is not None]

    def die(self, number: int) -> None:
        """The router is gone, without a word."""
        self.routers[number] = None

    def restart(self, number: int) -> None:
        """The router begins anew and knows nothing."""
        self._lives[number] += 1
        self.routers[number] = Router(f"r{number}", self._lives[number])

    def busy(self, steps: int) -> None:
        """Requests come and go, for so many ticks."""
        for _ in range(steps):
            for router in self.alive():
                for _ in range(self.draw(4)):
                    router.does(self._event(router), self.now_s)
            self.step()

    def _event(self, router: Router) -> LeaseEvent:
        own = list(router.own)
        if not own or self.draw(5) < 2:
            rank, path = RANKS[self.draw(len(RANKS))], (1 + self.draw(2) for _ in range(self.draw(5)))
            self._leases += 1
            return Routed(
                lease_id=f"{router.name}-{self._leases}",
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                blocks=chain_of(path),
                uncached_tokens=self.draw(100),
                extra_blocks=self.draw(2),
            )
        kinds = (FirstToken, FirstToken, Renewed, Finished, Finished, Cancelled)
        return kinds[self.draw(len(kinds))](lease_id=own[self.draw(len(own))])

    def quiet(self, seconds: float) -> None:
        """For so many seconds no router has news, and the network works as it should."""
        self.is_troubled = False
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.step()

    def step(self) -> None:
        """One tick passes: what is due arrives, routers let time pass."""
        end_s = self.now_s + TICK_S
        for router in self.alive():
            self._effect(router, router.replication.tick(self.now_s))
        while due := [message for message in self._on_its_way if message.at_s <= end_s]:
            first = min(due)
            self._on_its_way.remove(first)
            receiver = self.routers[first.to]
            if receiver is not None:
                heard = receiver.replication.on_message(decode_replica(first.data), first.at_s)
                self._effect(receiver, heard, at_s=first.at_s)
        self.now_s = end_s

    def _effect(self, router: Router, effects: Sequence[Effect], at_s: float | None = None) -> None:
        at_s = self.now_s if at_s is None else at_s
        for effect in effects:
            if isinstance(effect, LedgerApplied):
                router.state.apply(effect)
                continue
            to = range(len(self.routers)) if not effect.to else [int(effect.to[1:])]
            for each in to:  # its own echo, too
                self._send(each, encode_replica(effect.message), at_s)

    def _send(self, to: int, data: bytes, at_s: float) -> None:
        copies, delay_s = 1, LATENCY_S
        if self.is_troubled:
            copies = (0, 1, 1, 1, 2)[self.draw(5)]
        for _ in range(copies):
            if self.is_troubled:
                delay_s = 0.01 * (1 + self.draw(30))
            self._messages += 1
            self._on_its_way.append(Message(at_s + delay_s, self._messages, to, data))
