"""How old batches are, and where they became so."""

import pytest

from bench.events.stages import STAGES, Age, BatchTimes, SentBatches, ages, medians_ms, spread

MS = 1_000_000
BATCH = BatchTimes("w0/0", 2, 8, made_ns=102 * MS, stored_ns=105 * MS, delivered_ns=106 * MS, applied_ns=110 * MS)


def test_a_batch_is_as_old_as_its_own_event_and_its_message_left_with_the_first_of_its_batches() -> None:
    sent = SentBatches(flushed_ns=[90 * MS, 100 * MS, 101 * MS], handed_ns=[(1, 104 * MS), (3, 120 * MS)])
    (age,) = ages([BATCH], {"w0/0": sent})
    assert age.flushed_ns == 100 * MS
    assert age.total_s == pytest.approx(0.010)
    assert {stage: round(1e3 * each_s) for stage, each_s in age.stages_s.items()} == {
        "poll": 2,
        "to log": 3,
        "publish": 1,
        "to index": 1,
        "apply": 4,
    }
    assert age.total_s == pytest.approx(sum(each_s for stage, each_s in age.stages_s.items() if stage != "publish"))


def test_without_the_engine_s_flush_times_the_age_counts_from_the_payload() -> None:
    (age,) = ages([BATCH], {})
    assert age.total_s == pytest.approx(0.008)
    assert set(age.stages_s) == {"to log", "to index", "apply"}


def test_a_spread_is_median_tail_and_worst_in_milliseconds() -> None:
    assert spread([each / 1000 for each in range(1, 101)]) == pytest.approx({"p50": 51.0, "p99": 100.0, "max": 100.0})
    assert spread([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}


def test_medians_are_told_of_the_stages_that_are_known() -> None:
    known = [Age(0, 0.0, {"to log": each / 1000, "apply": 0.0}) for each in (1, 9, 2)]
    assert medians_ms(known) == {"to log": 2.0, "apply": 0.0}
    assert medians_ms([]) == {}
    assert set(STAGES) >= set(medians_ms(known))
