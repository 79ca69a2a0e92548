"""The simulation itself is tested: each of these bugs must make it fail, and soon."""

from collections.abc import Callable, Collection, Iterator
from typing import cast

import pytest

from indexer.follow.follower import StreamFollower
from indexer.service.retention import Retention
from kv_protocol.events import Batch
from kv_protocol.recovery import Answer, RecoverRequest, ReplayChunk
from router.decision.routing import Lease, Routing
from router.decision.verdict import Verdict
from tests.dumped import dump_chunks
from tests.simulation.setup import Kind
from tests.simulation.world import World
from worker_agent.events.consolidation import Consolidation
from worker_agent.events.outbox import Outbox
from worker_agent.events.source_cursor import Delivery, SourceCursor


class AppliesOverGaps(StreamFollower):
    """Takes the next batch that comes for the next one."""

    def on_batch(self, batch: Batch, now_s: float) -> None:
        if self._phase == "live" and batch.epoch == self._epoch and batch.seq > self._cursor:
            self._step(batch, now_s)
        else:
            super().on_batch(batch, now_s)


class DumpsAllButOne(Consolidation):
    """Leaves a block out."""

    def recover(self, dp_rank: int, request: RecoverRequest) -> Iterator[Answer]:
        outbox, (first, *_) = self.outboxes[dp_rank], super().recover(dp_rank, request)
        if isinstance(first, ReplayChunk) or first.buckets:
            return super().recover(dp_rank, request)
        blocks = list(self.mirrors[dp_rank].dump())
        return iter(dump_chunks(request.request_id, outbox.epoch, outbox.last_seq, blocks[:-1]))


class GoesBackWithoutOne(Outbox):
    """Takes one of several unconfirmed messages for confirmed."""

    def go_back(self) -> None:
        if len(self._in_flight) > 1:
            del self._in_flight[min(self._in_flight)]
        super().go_back()


class JumpsHoles(SourceCursor):
    """Reads on behind a hole."""

    def on_live(self, sequence: int, payload: bytes, now_s: float) -> Delivery:
        self.expected = max(self.expected, sequence)
        return super().on_live(sequence, payload, now_s)


class NeverEnds:
    """The lease of a request that ended is kept."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def __getattr__(self, name: str) -> object:
        return getattr(self._lease, name)

    def end(self, *_: object, **__: object) -> None:
        """Do nothing."""


class LeaksEnded(Routing):
    """Keeps the leases of requests that ended."""

    def take(self, verdict: Verdict) -> Lease:
        return cast("Lease", NeverEnds(super().take(verdict)))


class PurgesOneTooMany(Retention):
    """Lets go of the first message that no snapshot covers, too."""

    def purge_up_to(self, verified: Collection[str]) -> int:
        up_to = super().purge_up_to(verified)
        return up_to and up_to + 1


PLANTED: list[tuple[str, Callable[..., object], Kind, int]] = [
    ("indexer.follow.fold.StreamFollower", AppliesOverGaps, "faulty", 20),
    ("tests.simulation.agent.Consolidation", DumpsAllButOne, "faulty", 20),
    ("worker_agent.events.consolidation.Outbox", GoesBackWithoutOne, "torn", 40),
    ("tests.simulation.intake.SourceCursor", JumpsHoles, "faulty", 20),
    ("indexer.service.snapshots.Retention", PurgesOneTooMany, "calm", 20),
    ("tests.simulation.router.Routing", LeaksEnded, "faulty", 20),
]
"""Where it is planted, the bug, and the kind of worlds of whose first seeds, so many, one must fail."""


def is_found(world: World) -> bool:
    try:
        world.run()
    except Exception:  # noqa: BLE001 - a bug may show as any error
        return True
    return False


@pytest.mark.parametrize(("place", "bug", "kind", "within"), PLANTED, ids=[bug.__name__ for _, bug, _, _ in PLANTED])
@pytest.mark.planted
def test_the_simulation_fails_on_a_planted_bug(
    place: str, bug: object, kind: Kind, within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, bug)
    assert any(is_found(World(kind, seed)) for seed in range(within))
