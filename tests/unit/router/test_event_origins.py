"""Event addresses that were swapped between two engines are found by where the blocks of requests appear."""

import pytest

from kv_protocol.ids import WorkerRank
from router.feeds.watch import VOTES, EventOrigins
from router.fleet.trust import Disparity
from tests.unit.router.samples import FakeIndex, rank, registered, route
from tests.unit.router.test_routing import Bench

OWN, OTHER = rank("w0/0"), rank("w1/0")
NAMED = (Disparity("kv_events", "those of w1/0", "those of w0/0"),)


class Watched(Bench):
    """Two workers, of which each request goes to w0, and what is found of their events."""

    def __init__(self, stale: str = "") -> None:
        super().__init__(registered("w0"), registered("w1"), stale=stale)
        self.blocks = FakeIndex()
        self.origins = EventOrigins(self.routing, self.blocks)

    async def send(self, times: int, *appears_at: WorkerRank, after_s: float = 2.0) -> None:
        """New prompts go to w0, and their blocks appear somewhere."""
        for number in range(times):
            self.blocks.held.clear()
            self.take(route(64, decision_id=f"d{number}", pinned_worker="w0"))
            await self.clock.advance(after_s)
            self.blocks.held |= dict.fromkeys(appears_at, 9)
            self.origins.look()


async def test_a_worker_whose_blocks_appear_at_another_one_is_named_with_it() -> None:
    watched = Watched()
    await watched.send(VOTES - 1, OTHER)
    assert watched.origins.differs("w0") == ()
    await watched.send(1, OTHER)
    assert (watched.origins.differs("w0"), watched.origins.differs("w1")) == (NAMED, ())


async def test_a_worker_whose_blocks_appear_at_itself_is_not_named_any_more() -> None:
    watched = Watched()
    await watched.send(VOTES, OTHER)
    await watched.send(1, OWN, OTHER)
    assert watched.origins.differs("w0") == ()
    await watched.send(VOTES, OTHER)
    assert watched.origins.differs("w0") == (), "its stream is known to be its own"


@pytest.mark.parametrize(
    ("stale", "appears_at", "after_s"), [("source", (OTHER,), 2.0), ("", (), 31.0), ("", (OTHER,), 1.0)],
    ids=["its stream is in doubt", "nothing appears", "it is too early"],
)  # fmt: skip
async def test_nothing_is_said_where_requests_show_nothing(
    stale: str, appears_at: tuple[WorkerRank, ...], after_s: float
) -> None:
    watched = Watched(stale)
    await watched.send(VOTES, *appears_at, after_s=after_s)
    assert watched.origins.differs("w0") == ()
