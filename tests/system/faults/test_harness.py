"""The harness sees what it is there to see: ghosts, losses, places that differ, readers that stand still."""

from pathlib import Path

import pytest

from kv_protocol.events import Batch, Event
from kv_protocol.recovery import HeldBlock
from tests.system.faults.fleet import READY_S, fleet_on_one_server
from tests.system.faults.proof import Held, Place, difference

ROOT, CHILD = HeldBlock(1, None, 1), HeldBlock(2, 1, 3)
MIRROR = Held(Place(7, 3), frozenset({ROOT, CHILD}))
GHOST = HeldBlock(9, None, 1)


def index(*blocks: HeldBlock, seq: int = 3, epoch: int = 7, stale: str = "") -> Held:
    return Held(Place(epoch, seq), frozenset(blocks), stale)


def batches(first_seq: int, *events: Event) -> list[Batch]:
    return [Batch(7, seq, event) for seq, event in enumerate(events, first_seq)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (index(ROOT, CHILD), ""),
        (index(ROOT, CHILD, GHOST), "1 held by the index alone"),
        (index(ROOT), "1 held by the mirror alone"),
        (index(ROOT, HeldBlock(2, None, 3)), "1 held by the index alone"),
        (index(ROOT, HeldBlock(2, 1, 1)), "1 held by the mirror alone"),
        (index(ROOT, CHILD, seq=4), "the index is at Place(epoch=7, seq=4)"),
        (index(ROOT, CHILD, epoch=8), "the index is at Place(epoch=8, seq=3)"),
        (index(ROOT, CHILD, stale="behind"), "stale: behind"),
        (index(ROOT, CHILD, seq=2), "batches 3..3: found []"),
    ],
)
def test_what_only_one_side_holds_another_place_and_doubt_are_no_equality(found: Held, expected: str) -> None:
    why = difference(found, MIRROR, [])
    assert expected in why
    assert bool(expected) == bool(why)


async def test_an_index_that_stands_still_is_not_taken_for_right(tmp_path: Path) -> None:
    async with fleet_on_one_server(tmp_path) as (_, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            running.processes["index"].freeze()
            with pytest.raises(AssertionError, match="not equal within"):
                await running.until_equal(2.0, only=["index"])
            await running.until_equal(READY_S, only=["router"])
            running.processes["index"].thaw()
            await running.until_equal(READY_S)
            assert [await running.verified(name) for name in ("router", "index")] == [0, 0]
        assert sent.failed == []
        workers = [await running.scrape(worker_id) for worker_id in running.worker_ids]
        removed = [each.total("mirror_blocks_changed_total", kind="removed") for each in workers]
        assert min(removed) > 0, "caches are small enough to forget"
