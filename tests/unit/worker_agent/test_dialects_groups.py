"""Attention groups: the kind that a store gives its group is remembered, and only main kinds count."""

from tests.unit.worker_agent.wire_words import GOOD_MAP, ignored, read, stored, stored_array, stored_map
from worker_agent.events.dialects.batches import MAIN_KINDS, BatchDecoder
from worker_agent.events.engine_events import EngineRemoved

OTHER_KINDS = (
    *("sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention", "encoder_only_attention"),
    *("cross_attention", "FULL_ATTENTION", "never heard of", ""),
)


def removed(group_idx: int) -> EngineRemoved:
    return EngineRemoved(block_hashes=(9,), group_idx=group_idx)


def test_a_main_kind_counts_in_any_group_and_is_remembered() -> None:
    for kind in MAIN_KINDS:
        for group_idx in (0, 3, 255):
            decoder = BatchDecoder()
            taught = stored_map(group_idx=group_idx, kv_cache_spec_kind=kind)
            assert read(taught, decoder=decoder).events == (stored(7, group_idx=group_idx),)
            later = read(stored_map(group_idx=group_idx), GOOD_MAP | {"group_idx": group_idx}, decoder=decoder)
            assert later.events == (stored(7, group_idx=group_idx), removed(group_idx))


def test_another_kind_is_ignored_with_all_that_its_group_says_later() -> None:
    for kind in OTHER_KINDS:
        for group_idx in (0, 3):
            decoder = BatchDecoder()
            read(stored_map(group_idx=group_idx, kv_cache_spec_kind=kind), decoder=decoder)
            later = read(stored_map(group_idx=group_idx), GOOD_MAP | {"group_idx": group_idx}, decoder=decoder)
            assert (later.events, later.refused, ignored(decoder)) == ((), (), 3)


def test_of_groups_never_described_only_the_first_counts() -> None:
    for group, counted in (({}, 2), ({"group_idx": 0}, 2), ({"group_idx": 1}, 0)):
        assert len(read(stored_map(**group), GOOD_MAP | group).events) == counted


def test_a_removal_does_not_teach_what_its_group_is() -> None:
    batch = read(GOOD_MAP | {"group_idx": 3, "kv_cache_spec_kind": "full_attention"}, GOOD_MAP | {"group_idx": 3})
    assert (batch.events, batch.refused) == ((removed(3),), ())


def test_a_remote_store_does_not_teach_what_its_group_is() -> None:
    remote = stored_map(group_idx=3, kv_cache_spec_kind="full_attention", locality="REMOTE")
    assert read(remote, stored_map(group_idx=3)).events == ()


def test_a_kind_without_a_group_decides_for_its_event_alone() -> None:
    batch = read(stored_map(kv_cache_spec_kind="mamba"), stored_map(), stored_map(group_idx=0))
    assert (batch.events, batch.refused) == ((stored(7), stored(7)), ())


def test_the_last_kind_of_a_group_is_its_kind() -> None:
    batch = read(
        stored_map(group_idx=1, kv_cache_spec_kind="mamba"),
        stored_map(group_idx=1, kv_cache_spec_kind="mla_attention"),
        GOOD_MAP | {"group_idx": 1},
    )
    assert (batch.events, batch.refused) == ((stored(7, group_idx=1), removed(1)), ())


def test_a_tail_names_group_and_kind_by_position_or_by_type() -> None:
    kind, tails = "full_attention", dict[str, tuple[object, ...]]()
    tails["legacy"] = (3, kind)
    tails["legacy with a window"] = (3, kind, 128)
    tails["legacy with items"] = ([None], 3, kind, 128)
    tails["legacy with no items"] = (None, 3, kind, None)
    tails["fixed"] = (3, kind, None, None)
    tails["fixed with a locality"] = (3, kind, 128, "LOCAL")
    tails["fixed and newer"] = (3, kind, None, None, None, None, 5, "newer")
    for name, tail in tails.items():
        store, removal = stored_array(None, "GPU", None, None, *tail), [*GOOD_MAP.values(), "GPU", *tail]
        assert read(store, removal).events == (stored(7, group_idx=3), removed(3)), name


def test_a_legacy_tail_may_stop_anywhere() -> None:
    kind = "full_attention"
    tails: tuple[tuple[object, ...], ...] = ((), (None,), (3,), (None, None, 3), (kind,), (None, kind), (None,) * 5)
    for tail in tails:
        decoder = BatchDecoder()
        read(stored_map(group_idx=3, kv_cache_spec_kind=kind), decoder=decoder)
        event = stored_array(None, None, None, None, *tail)
        assert read(event, decoder=decoder).events == (stored(7, group_idx=3 if 3 in tail else 0),), tail
