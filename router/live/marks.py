"""What happened in the fleet: workers that came and went, trust that changed, recoveries, policies.

Two looks are compared: what changed and changed back between them is not seen. Beyond `MARKS_OF_A_LOOK` changes of one
look, a last mark tells how many others there were.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from kv_protocol.ids import WorkerRank
from router.fleet.trust import Trust

MARKS_OF_A_LOOK = 50
MarkKind = Literal[
    "router_started",
    "worker_joined",
    "worker_left",
    "worker_draining",
    "worker_silent",
    "worker_heard",
    "trust",
    "policy",
    "resync",
    "log_lost",
    "log_found",
    "others",
]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """One event, at a Unix time; of a worker or a rank, if these are named."""

    at_s: float
    kind: MarkKind
    text: str
    worker_id: str = ""
    dp_rank: int | None = None


class Looked(NamedTuple):
    """The fleet at one look. `workers`: instance, whether it drains, whether it is silent."""

    workers: Mapping[str, tuple[str, bool, bool]]
    trust: Mapping[WorkerRank, Trust]
    resyncs: Mapping[WorkerRank, int]
    policy: Mapping[str, object]
    is_log_connected: bool


def marks_of(last: Looked | None, now: Looked, at_s: float) -> list[Mark]:
    """Return what happened since the last look; without one, that the router started."""
    if last is None:
        return [Mark(at_s=at_s, kind="router_started", text="the router began to watch")]
    found = list(_changes(last, now, at_s))
    if len(found) > MARKS_OF_A_LOOK:
        others = len(found) - MARKS_OF_A_LOOK
        found[MARKS_OF_A_LOOK:] = [Mark(at_s=at_s, kind="others", text=f"{others} other changes")]
    return found


def _changes(last: Looked, now: Looked, at_s: float) -> Iterator[Mark]:
    if last.is_log_connected != now.is_log_connected:
        yield (
            Mark(at_s=at_s, kind="log_found", text="the event log is connected again")
            if now.is_log_connected
            else Mark(at_s=at_s, kind="log_lost", text="the event log is away")
        )
    changed = [
        f"{name} {last.policy.get(name)} -> {value}"
        for name, value in now.policy.items()
        if value != last.policy.get(name)
    ]
    if changed:
        yield Mark(at_s=at_s, kind="policy", text=", ".join(changed))
    yield from _of_workers(last, now, at_s)
    for rank, trust in now.trust.items():
        was = last.trust.get(rank)
        if was is not None and was != trust:
            reason = f": {trust.reason}" if trust.reason else ""
            yield _of_rank(rank, "trust", f"{rank} {was.state} -> {trust.state}{reason}", at_s)
    for rank, count in now.resyncs.items():
        if count > last.resyncs.get(rank, count):
            yield _of_rank(rank, "resync", f"{rank}: the index took a complete dump", at_s)


def _of_workers(last: Looked, now: Looked, at_s: float) -> Iterator[Mark]:
    for worker_id in last.workers.keys() - now.workers.keys():
        yield Mark(at_s=at_s, kind="worker_left", text=f"{worker_id} left", worker_id=worker_id)
    for worker_id, (instance, is_draining, is_silent) in now.workers.items():
        was = last.workers.get(worker_id)
        if was is None or was[0] != instance:
            text = f"{worker_id} joined" if was is None else f"{worker_id} joined again, as another instance"
            yield Mark(at_s=at_s, kind="worker_joined", text=text, worker_id=worker_id)
            continue
        if is_draining and not was[1]:
            yield Mark(at_s=at_s, kind="worker_draining", text=f"{worker_id} drains", worker_id=worker_id)
        if is_silent != was[2]:
            kind: MarkKind = "worker_silent" if is_silent else "worker_heard"
            text = f"{worker_id} is silent" if is_silent else f"{worker_id} is heard again"
            yield Mark(at_s=at_s, kind=kind, text=text, worker_id=worker_id)


def _of_rank(rank: WorkerRank, kind: MarkKind, text: str, at_s: float) -> Mark:
    return Mark(at_s=at_s, kind=kind, text=text, worker_id=rank.worker_id, dp_rank=rank.dp_rank)
