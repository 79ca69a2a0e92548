"""The harness sees what it is there to see: ghosts, losses, places that differ, readers that stand still."""

from itertools import islice
from pathlib import Path

import pytest

from kv_protocol import codec, subjects
from kv_protocol.events import Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from tests.system.faults.comparison import Held, Place, difference
from tests.system.faults.fleet import READY_S, fleet_on_one_server
from tests.system.faults.recoveries import Recoveries
from tests.system.faults.stream_reader import Stored as StoredMessage
from tests.system.faults.stream_reader import holes
from tests.system.faults.traffic import MODEL, TrafficShape, prompts

RANK = WorkerRank("w0", 0)
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


@pytest.mark.parametrize(
    ("found", "events", "expected"),
    [
        (index(ROOT, seq=1), [Stored((2,), 1, 1), Stored((2,), 1, 1, Tier.HOST)], ""),
        (index(GHOST, ROOT, CHILD, seq=0), [Removed((9,)), Stored((8,)), Removed((8,))], ""),
        (index(GHOST, seq=0), [Cleared(), Stored((1, 2)), Stored((2,), 1, 1, Tier.HOST)], ""),
        (index(ROOT, CHILD, seq=2), [Stored((2,), 1, 1)], "2 was stored, and the index had it already"),
        (index(ROOT, CHILD, seq=2), [Removed((9,))], "9 was removed, and the index had it not"),
        (index(ROOT, seq=2), [Stored((2,), 1, 1)], "1 held by the index alone"),
    ],
)
def test_an_index_that_is_behind_is_right_when_the_batches_since_make_it_so(
    found: Held, events: list[Event], expected: str
) -> None:
    since = batches(found.place.seq + 1, *events, Stored((77,)))
    why = difference(found, MIRROR, since)
    assert expected in why
    assert bool(expected) == bool(why)


def test_a_batch_that_no_message_has_is_a_hole() -> None:
    def message(*seqs: int, epoch: int = 7) -> StoredMessage:
        batches = [codec.encode_batch(Batch(epoch, seq, Removed((seq,)), 0, 0)) for seq in seqs]
        return StoredMessage(seqs[0], subjects.events(MODEL, RANK), codec.pack_message(batches), "")

    assert holes([message(1, 2), message(3)]) == {}
    assert holes([message(2), message(1, 5), message(1, epoch=8)]) == {(RANK, 7): [3, 4]}
    assert holes([message(1), message(1)]) == {}


def test_prompts_are_the_same_each_time_and_two_of_three_share_their_beginnings() -> None:
    shape = TrafficShape(system_blocks=2, question_blocks=(1, 3))
    first, again = (list(islice(prompts(shape, seed=1), 50)) for _ in range(2))
    assert first == again
    alone, sharing = first[::3], [prompt for number, prompt in enumerate(first) if number % 3]
    assert len({tuple(prompt[:32]) for prompt in sharing}) == 6
    assert len({tuple(prompt[:32]) for prompt in first}) == 6 + len(alone)
    assert len({tuple(prompt) for prompt in first}) == 50


@pytest.mark.asyncio
async def test_an_index_that_stands_still_is_not_taken_for_right(tmp_path: Path, recoveries: Recoveries) -> None:
    async with fleet_on_one_server(tmp_path) as (_, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            running.processes["index"].freeze()
            with pytest.raises(AssertionError, match="not equal within"):
                await running.until_equal(2.0, only=["index"])
            await running.until_equal(READY_S, only=["router"])
            running.processes["index"].thaw()
            recovered_s = await running.until_equal(READY_S)
            assert [await running.verified(name) for name in ("router", "index")] == [0, 0]
        assert sent.failed == []
        workers = [await running.scrape(worker_id) for worker_id in running.worker_ids]
        removed = [each.total("mirror_blocks_changed_total", kind="removed") for each in workers]
        assert min(removed) > 0, "caches are small enough to forget"
        recoveries.add("index stopped for some seconds", recovered_s, READY_S, sent)
