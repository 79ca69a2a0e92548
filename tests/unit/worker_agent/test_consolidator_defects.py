"""Defects that a consolidator of two sources is known to have elsewhere, and that ours must not have.

Source: `docs/SOURCES.md` E4.5 and E7 (rows 3, 10, 13, 21, 24). That nothing is lost in silence, and that state is
rebuilt by replay after a restart, is in `test_source_cursor.py` and `test_several_publishers.py`.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from bench.capture.payloads import encode_payload
from kv_protocol.events import Tier
from tests.support.planting import inside, plant
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from worker_agent.events.mirror import RankMirror
from worker_agent.events.mirror_blocks import MirrorBlocks

BLOCK_SIZE = 2
ENGINE, HOST = Origin("engine"), Origin("host")
STORED = EngineStored(block_hashes=(11, 12), parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=BLOCK_SIZE)


@pytest.fixture
def core() -> Consolidation:
    return Consolidation((0, 1), BLOCK_SIZE, "instance", count(1000).__next__, origins=(ENGINE, HOST))


def tell(core: Consolidation, event: EngineEvent, origin: Origin = ENGINE, dp_rank: int = 0) -> None:
    core.on_payload(0, encode_payload(1.5, [event], dp_rank), origin)


def held(core: Consolidation, dp_rank: int = 0) -> set[int]:
    return {block.sequence_hash for chunk in core.dump(dp_rank, 1) for block in chunk.blocks()}


def stored(**other: Any) -> EngineStored:
    return msgspec.structs.replace(STORED, block_hashes=(21, 22), **other)


@pytest.mark.parametrize(
    "other",
    [
        stored(lora_name="adapter"),
        stored(cache_salt="tenant"),
        stored(mm_hashes=((7,), ())),
    ],
    ids=["lora", "salt", "image"],
)
def test_equal_tokens_of_other_tenants_are_other_blocks(core: Consolidation, other: EngineStored) -> None:
    tell(core, STORED)
    tell(core, other)
    assert len(held(core)) == 4
    tell(core, EngineRemoved(block_hashes=(21, 22)))
    assert len(held(core)) == 2
    assert core.statistics().ranks[0].counts["engine"].deduplicated == 0


def test_equal_tokens_of_another_rank_are_that_rank_s(core: Consolidation) -> None:
    tell(core, STORED)
    tell(core, STORED, dp_rank=1)
    tell(core, EngineRemoved(block_hashes=(11, 12)), dp_rank=1)
    assert (len(held(core, 0)), len(held(core, 1))) == (2, 0)
    tell(core, EngineCleared(), dp_rank=1)
    assert len(held(core, 0)) == 2


def test_a_block_of_an_unknown_parent_is_no_root(core: Consolidation) -> None:
    tell(core, stored(parent_block_hash=99))
    assert held(core) == set()
    assert core.statistics().ranks[0].counts["engine"].unknown_parent == 2


def test_the_removals_of_one_source_do_not_count_against_the_other_s_copies(core: Consolidation) -> None:
    tell(core, STORED)
    tell(core, STORED, HOST)
    for _ in range(3):
        tell(core, EngineRemoved(block_hashes=(11, 12)), HOST)
    assert len(held(core)) == 2
    tell(core, EngineRemoved(block_hashes=(11, 12)))
    assert held(core) == set()


def test_what_one_source_stored_twice_it_removes_twice(core: Consolidation) -> None:
    tell(core, STORED)
    tell(core, STORED)
    tell(core, EngineRemoved(block_hashes=(11, 12)))
    assert len(held(core)) == 2
    tell(core, EngineRemoved(block_hashes=(11, 12)))
    assert held(core) == set()


def test_the_host_s_first_word_of_a_block_does_not_hide_the_gpu_s(core: Consolidation) -> None:
    tell(core, msgspec.structs.replace(STORED, tier=Tier.HOST), HOST)
    tell(core, STORED)
    child = stored(parent_block_hash=12, token_ids=(5, 6, 7, 8))
    tell(core, child)
    tell(core, EngineRemoved(block_hashes=(11, 12), tier=Tier.HOST), HOST)
    assert len(held(core)) == 4


class Unscannable(dict[Any, Any]):
    """A mapping that is only ever asked for one key."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all entries were gone through")

    keys = values = items = __iter__  # type: ignore[assignment]


class UnscannableBlocks(Unscannable, MirrorBlocks):
    """The same of a mirror's blocks."""


def test_a_removal_goes_through_no_names_but_its_own() -> None:
    mirror = RankMirror(BLOCK_SIZE)
    for block in range(100):
        mirror.apply(msgspec.structs.replace(stored(), block_hashes=(2 * block, 2 * block + 1)))
    names = inside(mirror, "_names")["engine"]
    plant(names, "_names", Unscannable(inside(names, "_names")))
    blocks = UnscannableBlocks()
    blocks.update(inside(mirror, "_blocks"))
    plant(mirror, "_blocks", blocks)
    assert mirror.apply(EngineRemoved(block_hashes=(0, 1))) == []
    for block in range(1, 100):
        events = mirror.apply(EngineRemoved(block_hashes=(2 * block, 2 * block + 1)))
    assert [len(event.sequence_hashes) for event in events] == [2]  # type: ignore[union-attr]
