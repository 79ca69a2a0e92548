"""Engine hashes in, sequence hashes out: what a rank holds, whatever its engine says and how often."""

from collections import Counter

import msgspec
import pytest

from kv_protocol.events import Cleared, Removed, Stored, Tier
from kv_protocol.hashing import Namespace, chain, local_block_hashes, sequence_hashes
from worker_agent.events import mirror as mirror_module
from worker_agent.events.engine_events import EngineCleared, EngineRemoved, EngineStored
from worker_agent.events.metrics import MIRROR_COUNTS
from worker_agent.events.mirror import (
    ENGINE,
    FORMER_NAMES_MAX,
    MirrorBlock,
    RankMirror,
    SourceNames,
)

BLOCK_SIZE = 2
TOKENS = tuple(range(20))
CHAIN = tuple(sequence_hashes(TOKENS, BLOCK_SIZE))
"""CHAIN[i] is our name of block i of TOKENS; the engine's is 100 + i, and 200 + i another of the same block."""
GPU_1, HOST_1 = 1 << Tier.GPU, 1 << Tier.HOST


def store(
    first: int = 0,
    count: int = 1,
    *,
    base: int = 100,
    parent: int | None = None,
    tier: Tier = Tier.GPU,
    **namespace: str,
) -> EngineStored:
    """Return a store of blocks `first`.. of TOKENS, under the block before them."""
    return EngineStored(
        block_hashes=tuple(base + first + at for at in range(count)),
        parent_block_hash=(base + first - 1 if first else None) if parent is None else parent,
        token_ids=TOKENS[first * BLOCK_SIZE : (first + count) * BLOCK_SIZE],
        block_size=BLOCK_SIZE,
        tier=tier,
        namespace=Namespace(**namespace),
    )


def remove(*hashes: int, tier: Tier = Tier.GPU) -> EngineRemoved:
    return EngineRemoved(block_hashes=hashes, tier=tier)


def mirror_of(*events: EngineStored | EngineRemoved | EngineCleared) -> RankMirror:
    mirror = RankMirror(BLOCK_SIZE)
    for event in events:
        mirror.apply(event)
    return mirror


def held(mirror: RankMirror) -> dict[int, int]:
    return {block.sequence_hash: block.tier_bits for block in mirror.dump()}


def counts(mirror: RankMirror) -> Counter[str]:
    assert set(mirror.counts[ENGINE]) <= {*MIRROR_COUNTS, "cleared_events"}, "a count is no metric"
    return mirror.counts[ENGINE]


# -------------------------------------------------------------------- stores


def test_a_store_that_names_no_adapter_and_no_salt_has_its_parent_s() -> None:
    mirror = mirror_of(store(0, 2, lora_name="a", cache_salt="s"))
    named = tuple(sequence_hashes(TOKENS[:8], BLOCK_SIZE, lora_name="a", cache_salt="s"))
    assert mirror.apply(store(2)) == [Stored((named[2],), named[1], 2)]
    assert mirror.apply(store(3)) == [Stored((named[3],), named[2], 3)]


def test_a_block_stored_again_says_nothing_new() -> None:
    mirror = mirror_of(store(0, 3))
    assert mirror.apply(store(0, 3)) == []
    assert counts(mirror) == Counter(stored=3, duplicate=3)


def test_only_what_is_new_of_a_store_is_told_each_run_under_its_own_parent() -> None:
    mirror = mirror_of(store(0, 5), remove(101), remove(104))
    assert mirror.apply(store(0, 7)) == [Stored((CHAIN[1],), CHAIN[0], 1), Stored(CHAIN[4:7], CHAIN[3], 4)]


def test_a_store_under_an_unknown_parent_is_dropped_and_never_a_root() -> None:
    mirror = RankMirror(BLOCK_SIZE)
    assert mirror.apply(store(2, 3)) == []
    assert held(mirror) == {}
    assert counts(mirror) == Counter(unknown_parent=3)


def test_blocks_of_another_size_are_dropped() -> None:
    other = EngineStored(block_hashes=(1,), parent_block_hash=None, token_ids=(1, 2, 3), block_size=3)
    mirror = RankMirror(BLOCK_SIZE)
    assert mirror.apply(other) == []
    assert counts(mirror) == Counter(unfit=1)


def test_a_store_that_names_a_block_twice_or_as_its_own_parent_says_nothing() -> None:
    twice = EngineStored(block_hashes=(1, 1), parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=BLOCK_SIZE)
    mirror = mirror_of(store(0), twice)
    assert mirror.apply(store(0, parent=100)) == []  # its own parent
    assert counts(mirror) == Counter(stored=1, ambiguous=3)


# -------------------------------------------------------------------- removals


def test_an_unknown_removal_is_counted_and_costs_the_others_nothing() -> None:
    mirror = mirror_of(store(0, 2))
    assert mirror.apply(remove(7, 101, 101)) == [Removed((CHAIN[1],))]
    assert counts(mirror) == Counter(stored=2, removed=1, unknown_removal=2)


# -------------------------------------------------------------------- tiers and clears


def test_a_clear_is_told_for_each_tier_that_held_something() -> None:
    mirror = mirror_of(store(0, 2), store(0, tier=Tier.DISK))
    assert mirror.apply(EngineCleared()) == [Cleared(Tier.GPU), Cleared(Tier.DISK)]
    assert (held(mirror), mirror.digests()) == ({}, ())
    assert mirror.apply(EngineCleared()) == []
    assert counts(mirror)["cleared_events"] == 2
    assert mirror.apply(store(1)) == []


# -------------------------------------------------------------------- proof and dump


def test_a_dump_is_of_the_moment_when_it_was_taken_whatever_changes_then() -> None:
    mirror = mirror_of(store(0, 3))
    dump = mirror.dump()
    mirror.apply(EngineCleared())
    mirror.apply(store(0, base=200, tier=Tier.HOST))
    assert len(dump) == 3
    assert [(row.sequence_hash, row.tier_bits) for row in dump] == [(block, GPU_1) for block in CHAIN[:3]]
    assert held(mirror) == {CHAIN[0]: HOST_1}


def test_a_block_on_two_tiers_is_one_held_block() -> None:
    mirror = mirror_of(store(0, 2), store(0, tier=Tier.HOST), remove(101))
    assert mirror.held_blocks == 1


# -------------------------------------------------------------------- copies, groups, sources
def test_a_block_is_held_while_any_source_holds_it() -> None:
    mirror = mirror_of(store(0, 2))
    assert mirror.apply(store(0, 2, base=200), "host") == []
    assert mirror.apply(remove(100, 101)) == []
    assert mirror.apply(remove(201), "host") == [Removed((CHAIN[1],))]
    assert mirror.counts["host"] == Counter(removed=1, deduplicated=2)


def test_a_parent_may_be_known_from_another_source() -> None:
    mirror = mirror_of(store(0, 2))
    assert mirror.apply(store(2, tier=Tier.HOST), "host") == [Stored((CHAIN[2],), CHAIN[1], 2, Tier.HOST)]


# -------------------------------------------------------------------- stores by name
def by_name(*hashes: int) -> EngineStored:
    return EngineStored(block_hashes=hashes, parent_block_hash=None, token_ids=(), block_size=0, tier=Tier.HOST)


def test_a_block_evicted_just_before_its_offload_is_told_is_described_unless_its_parent_is_gone_too() -> None:
    mirror = mirror_of(store(0, 2), remove(101))
    assert mirror.apply(by_name(101)) == [Stored((CHAIN[1],), CHAIN[0], 1, Tier.HOST)]
    mirror = mirror_of(store(0, 2), remove(101, 100))
    assert mirror.apply(by_name(101)) == []
    assert counts(mirror)["unknown_name"] == 1


def test_an_undescribed_bare_name_is_counted_and_dropped() -> None:
    mirror = mirror_of(store(0))
    assert mirror.apply(by_name(7, 100)) == [Stored((CHAIN[0],), tier=Tier.HOST)]
    assert counts(mirror) == Counter(stored=2, unknown_name=1)


def test_former_names_are_bounded() -> None:
    names = SourceNames()
    for engine_hash in range(FORMER_NAMES_MAX + 1):
        names.store(engine_hash, MirrorBlock(engine_hash, None, 0, Namespace()), Tier.GPU, 0)
        names.remove(engine_hash, Tier.GPU, 0)
    assert [names.meaning(each) is None for each in (0, 1, FORMER_NAMES_MAX)] == [True, False, False]


# -------------------------------------------------------------------- multimodal hashes, bigrams
def test_multimodal_hashes_are_part_of_our_hashes() -> None:
    event = msgspec.structs.replace(store(0, 2), mm_hashes=((7,), ()))
    (stored,) = RankMirror(BLOCK_SIZE).apply(event)
    assert stored == Stored(tuple(chain(local_block_hashes(TOKENS[:4], BLOCK_SIZE, mm_hashes=((7,), ())))))
    assert isinstance(stored, Stored)
    assert not set(stored.sequence_hashes) & set(CHAIN)


def test_bigram_blocks_are_hashed_with_the_token_that_follows_them() -> None:
    event = EngineStored(
        block_hashes=(1, 2), parent_block_hash=None, token_ids=TOKENS[:5], block_size=BLOCK_SIZE, is_eagle=True
    )
    expected = tuple(chain(local_block_hashes(TOKENS[:5], BLOCK_SIZE, is_eagle=True)))
    assert RankMirror(BLOCK_SIZE, is_eagle=True).apply(event) == [Stored(expected)]


def test_bigrams_where_tokens_are_expected_are_dropped_and_named() -> None:
    event = EngineStored(
        block_hashes=(1,), parent_block_hash=None, token_ids=TOKENS[:3], block_size=BLOCK_SIZE, is_eagle=True
    )
    mirror = RankMirror(BLOCK_SIZE)
    assert (mirror.apply(event), mirror.unfit(event)) == ([], "token_ids: found bigrams, allowed tokens")
    assert RankMirror(BLOCK_SIZE, is_eagle=True).unfit(store(0)) == "token_ids: found tokens, allowed bigrams"
    assert counts(mirror) == Counter(unfit=1)


@pytest.mark.parametrize("further", [store(2), store(base=200), store(2, base=200, parent=101)])
def test_beyond_so_many_names_stores_are_refused_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch, further: EngineStored
) -> None:
    monkeypatch.setattr(mirror_module, "NAMES_MAX", 2)
    mirror = mirror_of(store(count=2))
    assert (mirror.unfit(further), mirror.apply(further)) == ("block_hashes: found more than 2 blocks of the rank", [])
    assert counts(mirror)["unfit"] == 1
    mirror.apply(remove(101))
    assert mirror.unfit(further) == ""
