"""Whatever goes wrong between engines and index: nothing is invented on the way, and all is known in the end."""

from collections import Counter
from collections.abc import Iterable
from functools import cache

import msgspec
import pytest

from indexer.core.fold import FoldStatistics
from indexer.core.follower import FollowerCounts
from tests.simulation.setup import Kind
from tests.simulation.world import World

SEEDS: dict[Kind, int] = {"faulty": 100, "restless": 40, "silent": 30, "calm": 5}
CI_SEEDS = 600
"""Of each kind, 100 a test."""


@cache
def lived(kind: Kind, seed: int) -> World:
    """Return a world that has been run; its failure names the seed."""
    world = World(kind, seed)
    try:
        world.run()
    except Exception as error:
        again = f".venv/bin/python -m tests.simulation.world {kind} {seed}"
        raise AssertionError(f"seed {seed} of kind {kind}: {error!r}\nrun it again: {again}") from error
    return world


def index_statistics(worlds: Iterable[World]) -> list[FoldStatistics]:
    return [life.fold.statistics() for world in worlds for life in world.index_lives]


def totals(structs: Iterable[msgspec.Struct]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for struct in structs:
        counted.update(
            {name: value for name, value in msgspec.structs.asdict(struct).items() if isinstance(value, int)}
        )
    return counted


@pytest.mark.parametrize("kind", ["faulty", "restless", "silent"])
def test_in_the_end_the_index_is_what_the_engines_hold(kind: Kind) -> None:
    for seed in range(SEEDS[kind]):
        lived(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["faulty", "restless", "silent"])
@pytest.mark.parametrize("first", range(SEEDS["faulty"], SEEDS["faulty"] + CI_SEEDS, 100))
def test_in_the_end_the_index_is_what_the_engines_hold_with_many_more_seeds(kind: Kind, first: int) -> None:
    for seed in range(first, first + 100):
        lived.__wrapped__(kind, seed)


def assert_calm(world: World) -> None:
    for statistics in index_statistics([world]):
        for rank, stream in statistics.streams.items():
            assert stream.counts == FollowerCounts(applied=stream.cursor), rank
        assert statistics.refused_messages_total == statistics.index.parked_blocks_total == 0


def test_without_faults_every_batch_is_applied_once_and_nothing_is_asked() -> None:
    for seed in range(SEEDS["calm"]):
        assert_calm(lived("calm", seed))


def test_the_same_seed_gives_the_same_world() -> None:
    again = World("faulty", 1)
    again.run()
    assert index_statistics([again]) == index_statistics([lived("faulty", 1)])


def test_everything_that_is_meant_to_go_wrong_goes_wrong() -> None:
    worlds = [lived("faulty", seed) for seed in range(SEEDS["faulty"])]
    agents = [agent for world in worlds for agent in world.agent_lives]
    ranks = [rank for agent in agents for rank in agent.core.statistics().ranks.values()]
    statistics = index_statistics(worlds)
    seen = totals(stream.counts for each in statistics for stream in each.streams.values())
    seen += totals(statistics) + totals(counts for rank in ranks for counts in rank.counts.values()) + totals(ranks)
    seen += totals(agent.engine.rules.counts for agent in agents)
    for name in ("gaps_total", "lost_total", "duplicates_total"):
        seen[f"hop_a_{name}"] += sum(getattr(agent.cursor, name) for agent in agents)
    wanted = {
        *("duplicates", "gaps", "resyncs", "restarts", "other_epoch", "kept_lost", "refused_messages_total"),
        *("deduplicated", "unknown_parent", "unknown_removal", "cleared_events", "dropped_batches_total"),
        *("partial_blocks_dropped", "event_id_gaps"),
        *("hop_a_gaps_total", "hop_a_lost_total", "hop_a_duplicates_total"),
    }
    assert {name for name in wanted if not seen[name]} == set()


def test_digests_find_what_nothing_else_finds() -> None:
    statistics = index_statistics(lived("silent", seed) for seed in range(SEEDS["silent"]))
    assert totals(stream.counts for each in statistics for stream in each.streams.values())["digest_mismatches"] > 0
