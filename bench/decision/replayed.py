"""`router bench replay`: the CPU time in which a journal is read and its decisions are taken again.

The journal is that of a busy fleet (`fleet.py`): each request is decided, begins and ends, with heartbeats between.
Reading is decoding, counting records, folding, deciding and comparing, on one thread, without the event log.
"""

import json
from collections import deque
from time import process_time
from typing import NamedTuple

import click
import msgspec

from bench.decision.fleet import DecisionFleet, DecisionShape
from bench.report import machine_line
from bench.routing.virtual_worker import TEXT
from kv_protocol.journal import JournalBegan, WorkerHeard, decode_journal
from router.decision.recorders import Applied
from router.decision.routing import Lease
from router.decision.state_settings import StateSettings
from router.journal.continuity import Continuity
from router.journal.encoder import JournalEncoder
from router.journal.replay import Redecided, Replay

TARGET_S_PER_100000 = 4.0
"""At 8 ranks and 128 blocks."""
_IN_FLIGHT, _HEARTBEATS_EVERY = 16, 1000


class ReplayTime(NamedTuple):
    """How many decisions were taken again, how many of them came out equal, and the CPU seconds."""

    decisions: int
    equal: int
    cpu_s: float

    @property
    def s_per_100000(self) -> float:
        """CPU seconds of 100,000 decisions."""
        return self.cpu_s / self.decisions * 100_000


class _Journal:
    """A recorder that keeps the messages of a journal."""

    def __init__(self) -> None:
        self._encoder = JournalEncoder(1)
        self.messages: list[bytes] = []

    def record(self, what: Applied) -> None:
        self._encoder.add(what, 1, 0.0)
        if len(self._encoder) >= _IN_FLIGHT:
            self.cut()

    def cut(self) -> None:
        while len(self._encoder):
            self.messages.append(self._encoder.cut().data)


def journal_of(shape: DecisionShape, decisions: int, seed: int = 1) -> list[bytes]:
    """Return the messages of the journal of a fleet that takes `decisions` decisions, beside those to fill it."""
    journal, leases = _Journal(), deque[Lease]()
    settings = msgspec.to_builtins(StateSettings(text=TEXT))
    journal.record(JournalBegan(now_s=0.0, router="bench", started_ns=1, settings=settings))
    fleet = DecisionFleet(shape, seed, journal)
    for number, request in enumerate(fleet.requests(decisions)):
        if number % _HEARTBEATS_EVERY == 0:
            _beat(fleet)
        lease = fleet.routing.take(fleet.routing.decide(request))
        lease.first_token()
        leases.append(lease)
        fleet.clock.now_s += 1e-3
        if len(leases) > _IN_FLIGHT:
            leases.popleft().end("ok", 0, 16)
    journal.cut()
    return journal.messages


def _beat(fleet: DecisionFleet) -> None:
    for worker in fleet.state.fleet.workers():
        told = worker.registration
        heard = WorkerHeard(now_s=fleet.clock.now_s, worker_id=told.worker_id, instance=told.instance)
        fleet.routing.apply(heard)


def replay_time(messages: list[bytes]) -> ReplayTime:
    """Return the CPU time of a replay of these messages."""
    continuity, replay, decisions, equal = Continuity(), Replay(), 0, 0
    began_s = process_time()
    for data in messages:
        for record in continuity.records(decode_journal(data)):
            found = replay.take(record)
            if isinstance(found, Redecided):
                decisions += 1
                equal += found.equal
    return ReplayTime(decisions, equal, process_time() - began_s)


@click.command()
@click.option("--decisions", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=8, show_default=True)
@click.option("--blocks", type=click.IntRange(2), default=128, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print the figures as one JSON object")
def replay(*, decisions: int, ranks: int, blocks: int, as_json: bool) -> None:
    """Replay: the CPU time in which the decisions of a journal are taken again."""
    found = replay_time(journal_of(DecisionShape(ranks, blocks), decisions))
    figures = {**found._asdict(), "s_per_100000": found.s_per_100000}
    if as_json:
        click.echo(json.dumps({"machine": machine_line(), **figures}))
        return
    click.echo(f"{machine_line()}; {ranks} ranks, {blocks} blocks")
    click.echo(f"{found.decisions} decisions, {found.equal} of them equal, in {found.cpu_s:.2f} s of CPU time")
    click.echo(f"{found.s_per_100000:.1f} s for 100,000 (target at 8 ranks, 128 blocks: {TARGET_S_PER_100000:.0f} s)")
