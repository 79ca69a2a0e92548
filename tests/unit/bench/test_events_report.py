"""What the event bench makes of its figures: tables and verdicts."""

from bench.events.cold import Cold, SnapshotCost, StartTimes
from bench.events.freshness import Freshness
from bench.events.heartbeats import HeartbeatFigures, HeartbeatResults
from bench.events.recovery import Recovery
from bench.events.results import EventResults
from bench.events.run import Busy, Cpu
from bench.events.stages import Spread
from bench.events.tables import tables, verdict_table
from bench.events.throughput import Throughput
from bench.events.verdicts import verdicts


def fresh(name: str, p50_ms: float, p99_ms: float, busy: Busy | None = None) -> Freshness:
    bare = Spread(0.5, 1.0, 2.0)
    return Freshness(name, 1000.0, 125.0, 120.0, 118.0, Spread(p50_ms, p99_ms, 90.0), {"to log": 2.0}, bare, busy=busy)


OTHER = fresh("no GC", 7.0, 70.0)._replace(is_ours=False)


def start(name: str, caught_up_s: float, proven_s: float) -> StartTimes:
    return StartTimes(name, 1_000_000, 8_000_000, 0.9, caught_up_s, proven_s, None, 3)


ALL = EventResults(
    freshness=[fresh("slow", 4.0, 49.0, Busy(Cpu(0.1, 0.2, 0.3), 0.4)), fresh("fast", 6.0, 51.0), OTHER],
    throughput=[Throughput(8, 1e5, 25, 174_000.0, Cpu(9.0, 0.3, 0.3), 8e6, Cpu(0.02, 0.07, 0.0), 3)],
    cold=Cold(
        [start("a snapshot", 1.5, 3.5), start("the log", 9.0, 9.5)],
        [SnapshotCost(1_000_000, 8_000_000, 0.03, 0.02, 0.3, 0.09)],
    ),
    recovery=[Recovery("1 batches lost", "replay", 0.002, 0.006, 51, 296, 0.001, 3)],
    pulse=HeartbeatResults(
        [
            HeartbeatFigures(1, Busy(Cpu(0.001, 0.0, 0.002), 0.1)),
            HeartbeatFigures(64, Busy(Cpu(0.0073, 0.0, 0.0083), 0.1)),
        ],
        Cpu(6.0, 2.0, 7.0),
    ),
)


def test_a_target_is_missed_by_each_cell_that_misses_it() -> None:
    assert [(row[0], row[2], row[3], row[4]) for row in verdict_table(verdicts(ALL)).rows] == [
        ("engine's flush to applied, p50", "slow", "4 ms", "ok"),
        ("engine's flush to applied, p50", "fast", "6 ms", "MISSED"),
        ("engine's flush to applied, p99", "slow", "49 ms", "ok"),
        ("engine's flush to applied, p99", "fast", "51 ms", "MISSED"),
        ("cold start, caught up", "from a snapshot", "1.5 s", "ok"),
        ("cold start, all proven", "from a snapshot", "3.5 s", "MISSED"),
        ("control: no median lag is less than a bare message's", "slow", "8x", "ok"),
        ("control: no median lag is less than a bare message's", "fast", "12x", "ok"),
        ("control: no path is faster than a bare publication", "events of 8", "80x", "ok"),
    ]


def test_what_was_not_measured_is_not_reached() -> None:
    assert {verdict.holds for verdict in verdicts(EventResults())} == {None}
    assert {row[-1] for row in verdict_table(verdicts(EventResults())).rows} == {"not measured"}
    assert tables(EventResults()) == []


def test_a_heartbeat_costs_what_each_rank_adds() -> None:
    assert tables(ALL)[-1].rows[-2] == ("one of 63 more", "100", "0", "100", "us a heartbeat")
