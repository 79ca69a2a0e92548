"""One rank's blocks: partial, oversize and nameless ones, tiers and attention groups."""

import pytest

from kv_protocol.events import Tier
from tests.unit.worker_agent.trtllm_json import (
    Json,
    block,
    diff,
    event,
    gone,
    named,
    numbered,
    of_rank,
    of_rank_0,
    removed,
    store,
    stored,
    updated,
)
from worker_agent.events.dialects import trtllm
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineCleared

TO_HOST, TO_GPU = diff(0, 1), diff(1, 0)


# -------------------------------------------------------------------- partial, oversize and nameless blocks
def test_a_partial_block_ends_its_chain_and_is_not_published(rules: TrtllmRules) -> None:
    assert rules.translate(numbered(stored(block(1), block(2, (5, 6))))) == of_rank_0(store(1))
    assert rules.counts["partial_blocks_dropped"] == 1
    assert rules.stale(0) == ""


def test_blocks_behind_a_partial_one_are_dropped_and_put_the_block_size_in_doubt(rules: TrtllmRules) -> None:
    data = stored(block(1), block(2, (5, 6)), block(3), block(4))
    assert rules.translate(numbered(data, removed(4, 3, 2, 1))) == of_rank_0(store(1), gone(1))
    assert rules.counts["under_withheld_dropped"] == 2
    assert rules.stale(0) == (
        "engine event not read: block of 2 tokens within a chain, engine.block_size is 4: "
        "is it the engine's tokens_per_block?"
    )


def test_the_removal_of_a_partial_block_is_not_published_and_the_rest_is(rules: TrtllmRules) -> None:
    events = numbered(stored(block(1), block(2, (5,))), removed(2, 1))
    assert rules.translate(events) == of_rank_0(store(1), gone(1))


def test_a_partial_block_is_remembered_until_its_removal_and_no_longer(rules: TrtllmRules) -> None:
    assert rules.translate(numbered(stored(block(2, (5,))), removed(2), removed(2))) == of_rank_0(gone(2))


def test_the_negative_spelling_of_a_partial_block_is_the_same_block(rules: TrtllmRules) -> None:
    assert rules.translate(numbered(stored(block(-2, (5,))), removed(2**64 - 2))) == []


def test_blocks_under_a_partial_one_are_dropped_and_those_under_them_too(rules: TrtllmRules) -> None:
    events = numbered(stored(block(2, (5,))), stored(block(3), parent=2), stored(block(4), parent=3), removed(3, 4))
    assert rules.translate(events) == []
    assert rules.counts["under_withheld_dropped"] == 2


def test_a_jump_forgets_the_rank_s_partial_blocks_for_their_removals_may_be_lost(rules: TrtllmRules) -> None:
    rules.translate([event(0, stored(block(2, (5,))))])
    assert rules.translate([event(2, removed(2))]) == of_rank_0(EngineCleared(), gone(2))


def test_beyond_a_bound_the_oldest_partial_blocks_are_forgotten(
    rules: TrtllmRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtllm, "WITHHELD_MAX", 2)
    partial = [stored(block(number, (5,))) for number in (1, 2, 3)]
    assert rules.translate(numbered(*partial, removed(1, 2, 3))) == of_rank_0(gone(1))
    assert rules.counts["withheld_forgotten"] == 1


def test_a_store_with_an_oversize_block_is_dropped_whole_and_puts_the_block_size_in_doubt(rules: TrtllmRules) -> None:
    events = numbered(stored(block(1), block(2, range(5))), stored(block(3)), removed(1, 2))
    assert rules.translate(events) == of_rank_0(store(3))
    assert rules.counts["oversize_dropped"] == 1
    assert rules.stale(0).startswith("engine event not read: block of 5 tokens, engine.block_size is 4")


def test_a_block_that_was_dropped_and_is_stored_anew_is_published_and_so_is_its_removal(rules: TrtllmRules) -> None:
    events = numbered(stored(block(1), block(2, range(5))), stored(block(1)), removed(1))
    assert rules.translate(events) == of_rank_0(store(1), gone(1))


def test_a_block_without_a_name_ends_the_walk_for_what_follows_hangs_under_it(rules: TrtllmRules) -> None:
    data = stored(block(1), block(None), block(3))
    events = numbered(data, stored(block(4), parent=3), removed(None, 3, 4, 1))
    assert rules.translate(events) == of_rank_0(store(1), gone(1))
    assert (rules.counts["nameless_blocks_dropped"], rules.counts["under_withheld_dropped"]) == (2, 2)
    assert rules.stale(0) == ""


def test_nulls_among_removals_are_skipped(rules: TrtllmRules) -> None:
    assert rules.translate(numbered(removed(1, None, 2), removed(None))) == of_rank_0(gone(1, 2))


# -------------------------------------------------------------------- tiers
def test_a_move_to_the_host_is_a_store_there_by_name_then_a_removal_from_the_gpu(rules: TrtllmRules) -> None:
    events = numbered(stored(block(1)), updated(1, TO_HOST))
    assert rules.translate(events) == of_rank_0(store(1), named(1, tier=Tier.HOST), gone(1))
    assert rules.counts["tier_moves"] == 1


def test_a_removal_is_published_on_the_tier_where_the_block_is(rules: TrtllmRules) -> None:
    rules.translate(numbered(stored(block(1), block(2)), updated(1, TO_HOST)))
    events = numbered(removed(1, 2), removed(1), first=2)
    assert rules.translate(events) == of_rank_0(gone(2), gone(1, tier=Tier.HOST), gone(1))


def test_a_move_to_where_the_block_is_already_is_none(rules: TrtllmRules) -> None:
    events = numbered(stored(block(1)), updated(1, TO_GPU), updated(1, TO_HOST), updated(1, TO_HOST))
    assert rules.translate(events) == of_rank_0(store(1), named(1, tier=Tier.HOST), gone(1))


@pytest.mark.parametrize("data", [stored(block(1, (5,))), stored(block(1, range(5)))])
def test_moves_of_a_block_that_was_not_published_are_not_published(rules: TrtllmRules, data: Json) -> None:
    assert rules.translate(numbered(data, updated(1, TO_HOST), removed(1))) == []


def test_the_move_of_a_block_without_a_name_is_none(rules: TrtllmRules) -> None:
    assert rules.translate(numbered(updated(None, TO_HOST))) == []


def test_a_new_priority_is_counted_only(rules: TrtllmRules) -> None:
    assert rules.translate(numbered(stored(block(1)), updated(1, None, diff(35, 80)))) == of_rank_0(store(1))
    assert (rules.counts["priority_changes"], rules.counts["tier_moves"]) == (1, 0)


def test_a_store_on_several_tiers_goes_out_in_runs_each_under_the_block_before_it(rules: TrtllmRules) -> None:
    levels = [block(number, cache_level=level) for number, level in ((1, 0), (2, 1), (3, 1), (4, 0))]
    keys = [{"type": "mm_key", "hash": "0" * 63 + "1"}]
    levels[3]["mm_keys"] = keys
    assert rules.translate(numbered(stored(*levels, parent=9), removed(1, 2, 3, 4))) == of_rank_0(
        store(1, parent=9),
        store(2, 3, parent=1, tier=Tier.HOST),
        store(4, parent=3, mm_hashes=((0,),)),
        gone(1, 4),
        gone(2, 3, tier=Tier.HOST),
    )


def test_a_block_on_the_host_that_is_stored_on_the_gpu_leaves_the_host(rules: TrtllmRules) -> None:
    events = numbered(stored(block(1, cache_level=1), block(2, cache_level=1)), stored(block(1)), removed(1, 2))
    assert rules.translate(events) == of_rank_0(
        store(1, 2, tier=Tier.HOST), store(1), gone(1, tier=Tier.HOST), gone(1), gone(2, tier=Tier.HOST)
    )


def test_a_jump_forgets_where_blocks_are(rules: TrtllmRules) -> None:
    rules.translate(numbered(stored(block(1)), updated(1, TO_HOST)))
    assert rules.translate([event(9, removed(1))]) == of_rank_0(EngineCleared(), gone(1))


def test_tiers_are_remembered_for_each_rank_and_layer_group_apart(rules: TrtllmRules) -> None:
    places = [(dp_rank, group) for dp_rank in (0, 1) for group in (0, 1)]
    for dp_rank, group in places:
        place = {"attention_dp_rank": dp_rank, "layer_group_id": group}
        rules.translate([event(group, stored(block(1)), **place)])
    rules.translate([event(2, updated(1, TO_HOST), attention_dp_rank=1, layer_group_id=1)])
    published = [
        rules.translate(
            [event(2 + group + (dp_rank == 1), removed(1), attention_dp_rank=dp_rank, layer_group_id=group)]
        )
        for dp_rank, group in places
    ]
    assert published == [
        of_rank(0, gone(1)),
        of_rank(0, gone(1, group_idx=1)),
        of_rank(1, gone(1)),
        of_rank(1, gone(1, tier=Tier.HOST, group_idx=1)),
    ]
