"""Attention windows: the widest counts, whichever source names it, and whenever."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker_agent.trtllm_json import (
    BLOCK_SIZE,
    Json,
    block,
    created,
    event,
    gone,
    numbered,
    of_rank_0,
    removed,
    store,
    stored,
)
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineCleared, EngineStored, RankEvent


def windowed(*windows_and_data: tuple[int, Json], first: int = 0) -> list[Json]:
    return [event(first + at, data, window_size=window) for at, (window, data) in enumerate(windows_and_data)]


# -------------------------------------------------------------------- known by `created`
@pytest.mark.parametrize("windows", [(128, 1024, 512), (1024, 512, 128), (128, 512, 1024)])
def test_only_events_of_the_widest_created_window_are_published(rules: TrtllmRules, windows: tuple[int, ...]) -> None:
    pools = [(window, created()) for window in windows]
    changes = [(128, stored(block(1))), (512, removed(1)), (1024, stored(block(2))), (1024, removed(2))]
    assert rules.translate(windowed(*pools, *changes)) == of_rank_0(store(2), gone(2))
    assert (rules.counts["created"], rules.counts["window_filtered"]) == (3, 2)
    assert (rules.counts["stored"], rules.counts["removed"]) == (1, 1)


def test_the_first_store_is_judged_like_any_other(rules: TrtllmRules) -> None:
    assert rules.translate(windowed((128, created()), (1024, created()), (128, stored(block(1))))) == []
    assert rules.counts["window_changes"] == 0


def test_a_partial_block_of_a_narrow_window_is_not_remembered(rules: TrtllmRules) -> None:
    events = windowed((1024, created()), (128, stored(block(2, (5,)))), (1024, removed(2)))
    assert rules.translate(events) == of_rank_0(gone(2))


def test_windows_are_known_for_each_rank_apart(rules: TrtllmRules) -> None:
    events = [
        event(at, data, window_size=window, attention_dp_rank=dp_rank)
        for dp_rank, window in ((0, 128), (1, 1024))
        for at, data in enumerate((created(), stored(block(1))))
    ]
    assert rules.translate(events) == [RankEvent(0, store(1)), RankEvent(1, store(1))]


def test_of_layer_groups_those_with_the_widest_window_count(rules: TrtllmRules) -> None:
    groups = [(0, 128), (1, 1024), (2, 1024)]
    pools = [event(group, created(), window_size=window, layer_group_id=group) for group, window in groups]
    changes = [event(3 + group, stored(block(1)), window_size=window, layer_group_id=group) for group, window in groups]
    assert rules.translate([*pools, *changes]) == of_rank_0(store(1, group_idx=1), store(1, group_idx=2))


def test_a_wider_window_created_later_clears_what_was_published_of_the_narrower(rules: TrtllmRules) -> None:
    events = windowed((128, created()), (128, stored(block(1))), (1024, created()), (128, stored(block(2))))
    assert rules.translate(events) == of_rank_0(store(1), EngineCleared())
    assert rules.counts["window_changes"] == 1


def test_a_narrower_window_created_later_changes_nothing(rules: TrtllmRules) -> None:
    events = windowed((1024, created()), (1024, stored(block(1))), (128, created()), (1024, removed(1)))
    assert rules.translate(events) == of_rank_0(store(1), gone(1))


def test_without_windows_nothing_waits_for_created(rules: TrtllmRules) -> None:
    assert rules.translate(numbered(stored(block(1)), first=70)) == of_rank_0(store(1))


def test_an_event_without_a_window_is_of_the_widest(rules: TrtllmRules) -> None:
    events = [*windowed((128, created())), event(1, stored(block(2))), *windowed((128, removed(1)), first=2)]
    assert rules.translate(events) == of_rank_0(store(2))
    assert rules.counts["window_filtered"] == 1


# -------------------------------------------------------------------- `created` was lost
def test_before_any_window_is_known_the_first_event_s_counts_until_a_wider_one_comes(rules: TrtllmRules) -> None:
    narrow, wide = (128, stored(block(1))), (1024, stored(block(2)))
    assert rules.translate(windowed(narrow, wide, (128, removed(1)), first=9)) == of_rank_0(
        store(1), EngineCleared(), store(2)
    )
    assert (rules.counts["windows_assumed"], rules.counts["window_changes"]) == (1, 1)
    assert rules.counts["window_filtered"] == 1


def test_a_window_that_the_first_event_was_right_about_stays(rules: TrtllmRules) -> None:
    events = windowed((1024, stored(block(2))), (128, created()), (1024, created()), (1024, removed(2)))
    assert rules.translate(events) == of_rank_0(store(2), gone(2))
    assert rules.counts["window_changes"] == 0


def test_a_jump_ahead_keeps_the_window(rules: TrtllmRules) -> None:
    rules.translate(windowed((1024, created())))
    events = windowed((1024, stored(block(1))), (128, stored(block(2))), first=9)
    assert rules.translate(events) == of_rank_0(EngineCleared(), store(1))


def test_a_jump_back_is_another_life_with_its_own_windows(rules: TrtllmRules) -> None:
    rules.translate(windowed((1024, created()), (1024, stored(block(1)))))
    events = windowed((256, created()), (256, stored(block(2))))
    assert rules.translate(events) == of_rank_0(EngineCleared(), store(2))


# -------------------------------------------------------------------- configured
def test_a_configured_window_counts_until_created_or_a_wider_event_says_another() -> None:
    narrow, wide = (128, stored(block(1))), (1024, stored(block(2)))
    small, confirmed = (256, created()), [(1024, stored(block(1))), (128, created()), (1024, removed(1))]
    for configured, events, published in (
        (1024, windowed(narrow, wide, first=9), [store(2)]),
        (4096, windowed(small, (256, stored(block(1)))), [store(1)]),  # `created` takes its place
        (1024, windowed(*confirmed, first=9), [store(1), gone(1)]),  # but not of one that an event confirmed
        (128, windowed(narrow, wide), [store(1), EngineCleared(), store(2)]),
    ):
        rules = TrtllmRules(BLOCK_SIZE, attention_window=configured)
        assert rules.translate(events) == of_rank_0(*published), configured


# -------------------------------------------------------------------- all of it
WINDOWS, BLOCKS = (128, 512, 1024), 20
MAYBE_CONFIGURED = [None, 128, 512, 1024]


def windows_held(seed: int, first: int, configured: int | None) -> list[int]:
    """Return the windows of the blocks that a reader holds in the end, where reading begins with event `first`.

    Pools are created, and then each of many blocks is stored in every window, in any order: the block's hash tells
    which.
    """
    random = Random(seed)
    changes = [(window, created()) for window in random.sample(WINDOWS, 3)]
    for number in range(BLOCKS):
        changes += [(window, stored(block(number << 16 | window))) for window in random.sample(WINDOWS, 3)]
    held: set[int] = set()
    for _, each in TrtllmRules(BLOCK_SIZE, attention_window=configured).translate(windowed(*changes)[first:]):
        if isinstance(each, EngineCleared):
            held.clear()
        elif isinstance(each, EngineStored):
            held.update(each.block_hashes)
    return [block_hash & 0xFFFF for block_hash in held]


@given(seed=st.integers(0, 2**32), first=st.integers(0, 5), configured=st.sampled_from(MAYBE_CONFIGURED))
def test_wherever_reading_begins_what_stands_in_the_end_is_of_the_widest_window(
    seed: int, first: int, configured: int | None
) -> None:
    held = windows_held(seed, first, configured)
    assert set(held) == {1024}
    assert BLOCKS - 1 <= len(held) <= BLOCKS
