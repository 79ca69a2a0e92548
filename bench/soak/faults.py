"""Which faults a soak has, and when: by the count of requests, not by time. Pure.

| fault | is |
|---|---|
| worker killed | SIGKILL, started again under its id at once |
| worker stopped | SIGTERM: its requests end, it leaves the fleet, is started again |
| worker drained | its router is requested to drain it; once that is done it is stopped, and started again |
| worker frozen | SIGSTOP for 1 to 4 s, then SIGCONT |
| nats-server killed | SIGKILL, started again on the same store |
| nats-server stopped | SIGTERM, started again on the same store |
"""

from random import Random
from typing import Literal, NamedTuple

FaultKind = Literal[
    "worker killed",
    "worker stopped",
    "worker drained",
    "worker frozen",
    "nats-server killed",
    "nats-server stopped",
]
_DECK: tuple[FaultKind, ...] = (
    "worker killed",
    "worker killed",
    "worker killed",
    "worker stopped",
    "worker stopped",
    "worker drained",
    "worker frozen",
    "worker frozen",
    "nats-server killed",
    "nats-server stopped",
)
"""Each ten faults in a row are these, in an order of their own."""
_FROZEN_S = (1.0, 4.0)


class Fault(NamedTuple):
    """A fault once `at_request` requests have begun. `frozen_s`: for a frozen worker."""

    at_request: int
    kind: FaultKind
    frozen_s: float


def schedule(seed: int, requests: int, every: int) -> list[Fault]:
    """Return a fault for each `every` requests but the last."""
    draw, faults, deck = Random(seed), list[Fault](), list[FaultKind]()  # noqa: S311 - a workload, not a secret
    for at_request in range(every, requests, every):
        if not deck:
            deck = draw.sample(_DECK, len(_DECK))
        faults.append(Fault(at_request, deck.pop(), draw.uniform(*_FROZEN_S)))
    return faults
