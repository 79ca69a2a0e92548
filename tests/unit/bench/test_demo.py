"""What the demonstration shows of a run."""

import pytest

from bench.demo.command import BLOCK_SIZE, LATE_SHARE, SPEED, Run, rows
from bench.streaming_client import Measured

LATE = "not measured"


def run(*, p90_s: float = 0.001, p99_s: float = 0.001, mode: str = "kv") -> Run:
    """Ten requests with 100 ms to the first token, ten with 400 ms, and one that failed."""
    measured = [
        Measured(0.0, "w0", "", 100 * BLOCK_SIZE, 75 * BLOCK_SIZE, 75, ttft_s, 1.0) for ttft_s in [0.1] * 11 + [0.4] * 9
    ]
    measured.append(Measured(0.0, "", "", 0, 0, 0, 60.0, 60.0, error="status 503"))
    cpu_s = dict.fromkeys(("router", "nats-server", "workers"), 1.0)
    return Run(mode, measured, {0.90: p90_s, 0.99: p99_s}, cpu_s, "")


def cells(shown: Run) -> dict[str, str]:
    return {name: row[0] for name, row in rows([shown])}


def test_times_are_simulated_ones_of_requests_that_were_answered() -> None:
    shown = cells(run())
    assert shown["TTFT p50, simulated ms"] == f"{100 * SPEED:.0f}"
    assert shown["TTFT p90, simulated ms"] == f"{400 * SPEED:.0f}"
    assert (shown["requests"], shown["errors"], shown["hit rate"]) == ("21", "1", "75.0%")
    assert shown["overlap predicted exactly"] == "20 of 21"


@pytest.mark.parametrize(
    ("p90_s", "p99_s", "p50", "p90"),
    [
        (LATE_SHARE * 0.1, LATE_SHARE * 0.4, "50", "200"),
        (LATE_SHARE * 0.11, LATE_SHARE * 0.4, LATE, "200"),
        (LATE_SHARE * 0.1, LATE_SHARE * 0.41, "50", LATE),
    ],
)
def test_a_quantile_is_not_shown_if_a_process_was_late_by_more_than_a_tenth_of_it(
    p90_s: float, p99_s: float, p50: str, p90: str
) -> None:
    shown = cells(run(p90_s=p90_s, p99_s=p99_s))
    assert (shown["TTFT p50, simulated ms"], shown["TTFT p90, simulated ms"]) == (p50, p90)


def test_the_sentence_has_no_time_that_was_not_measured() -> None:
    assert run().sentence.endswith("the median time to first token was 50 simulated ms.")
    assert run(p90_s=0.05).sentence == (
        "kv: 75% of the prompt tokens came from a cache; this machine was too busy to measure the time to first token."
    )


def test_a_mode_that_does_not_read_the_overlap_has_no_predictions() -> None:
    assert cells(run(mode="round-robin"))["overlap predicted exactly"] == "not asked for"
