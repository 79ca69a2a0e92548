"""What a world does: nothing where nothing is wrong, all that is meant to go wrong, and the same with the same seed."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

from indexer.follow.fold import FoldStatistics
from indexer.follow.status import FollowerCounts
from tests.simulation.broker import EVENTS
from tests.simulation.seeds import TEST_SEEDS, failure, kind_of, lived
from tests.simulation.timeline import Timeline
from tests.simulation.world import World
from tests.support.paths import ROOT

CALM_SEEDS = 6
_FINGERPRINT = """
from tests.simulation.test_simulation import fingerprint, lived
print(fingerprint(lived("torn", 4)))
"""


@pytest.fixture(scope="module")
def calm() -> list[World]:
    return [lived("calm", seed) for seed in range(CALM_SEEDS)]


def index_statistics(world: World) -> list[FoldStatistics]:
    return [life.fold.statistics() for life in world.index_lives]


def totals(structs: Iterable[msgspec.Struct]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for struct in structs:
        counted.update(
            {name: value for name, value in msgspec.structs.asdict(struct).items() if isinstance(value, int)}
        )
    return counted


def fingerprint(world: World) -> str:
    seen = [stream for each in index_statistics(world) for stream in each.streams.items()]
    return f"{world.timeline.steps} {world.random.random()} {seen}"


def seen_in(world: World) -> Counter[str]:
    agents, statistics = world.agent_lives, index_statistics(world)
    counts = [counts for agent in agents for n in agent.dp_ranks for counts in agent.core.mirrors[n].counts.values()]
    seen = totals(stream.counts for each in statistics for stream in each.streams.values())
    seen += totals(statistics)
    for count in (*counts, *(agent.engine.rules.counts for agent in agents)):
        seen += count
    for agent in agents:
        seen["dropped_batches_total"] += sum(agent.core.outboxes[n].dropped_batches_total for n in agent.dp_ranks)
        for name in ("gaps_total", "lost_total", "duplicates_total"):
            seen[f"hop_a_{name}"] += getattr(agent.intake.cursor, name)
    for router in world.router_lives:
        seen += router.outcomes
        seen["load_reports"] += router.reports
    for index in world.index_lives:
        seen += index.keeper.counts
    seen["dropped_messages"] += world.broker.streams[EVENTS].dropped
    return seen + world.broker.counts


def test_without_faults_every_batch_is_applied_once_and_nothing_is_asked(calm: list[World]) -> None:
    for world in calm:
        assert [life.traffic.questions for life in world.index_lives] == [0] * len(world.index_lives)
        for statistics in index_statistics(world)[:-1]:
            for rank, stream in statistics.streams.items():
                assert stream.counts == FollowerCounts(applied=stream.cursor), rank
            assert statistics.refused_messages_total == 0


def test_without_faults_every_request_is_answered(calm: list[World]) -> None:
    outcomes = {outcome for world in calm for life in world.router_lives for outcome in life.outcomes}
    assert outcomes == {"ok", "cancelled"}


def test_without_faults_a_late_indexer_needs_nothing_but_a_snapshot_and_the_rest_of_the_log(calm: list[World]) -> None:
    purged = [world for world in calm if world.broker.streams[EVENTS].first_seq > 1]
    assert purged
    for world in purged:
        late = world.index_lives[-1]
        assert late.keeper.counts["snapshots_restored"] == 1
        assert (late.traffic.questions, late.traffic.replayed, late.traffic.dumped) == (0, 0, 0)
        assert late.traffic.blocks < world.truth.published_blocks()


def test_the_same_seed_gives_the_same_world() -> None:
    assert fingerprint(lived("faulty", 1)) == fingerprint(lived("faulty", 1))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_world_to_another_process() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", _FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            cwd=ROOT,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1


def test_whatever_goes_wrong_in_the_end_all_is_known_and_everything_that_may_go_wrong_does() -> None:
    seen: Counter[str] = Counter()
    for seed in range(TEST_SEEDS):
        seen += seen_in(lived(kind_of(seed), seed))
    wanted = {
        *("duplicates", "gaps", "holes_closed", "replays", "repairs", "resyncs", "restarts", "digest_mismatches"),
        *("implausible", "other_epoch", "kept_lost", "refused_messages_total"),
        *("deduplicated", "unknown_parent", "unknown_removal", "cleared_events", "dropped_batches_total"),
        *("partial_blocks_dropped", "event_id_gaps"),
        *("hop_a_gaps_total", "hop_a_lost_total", "hop_a_duplicates_total"),
        *("ok", "cancelled", "failed", "no_worker", "expired", "load_reports"),
        *("deduplicated_messages", "dropped_messages", "purges", "snapshots_written", "snapshots_restored"),
    }
    assert {name for name in wanted if not seen[name]} == set()


def test_a_world_that_goes_round_in_circles_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrive_again(world: World) -> None:
        world.timeline.after(0.0, world.arrive)

    monkeypatch.setattr(World, "arrive", arrive_again)
    assert "livelock" in failure(0)


def test_a_failure_names_its_seed_and_kind_and_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timeline, "run", lambda *_: 1 / 0)
    said = failure(1)
    assert "seed 1 of kind torn" in said
    assert ".venv/bin/python -m tests.simulation.world torn 1" in said
