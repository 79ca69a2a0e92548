"""Which runs a sweep has, which of them are left, what they send, and what was written of them."""

from itertools import islice
from pathlib import Path

import pytest

from bench.sweep import results
from bench.sweep.plan import SweepAxes, left, runs_of
from bench.sweep.prompts import arrivals_s, prompts
from tests.unit.bench.sweep_runs import inputs, record

FLEETS = (("kv", "4a", 4), ("round-robin", "4a", 4), ("kv", "1p3d", 4))
AXES = SweepAxes(FLEETS, (1, 8), (), (512, 1024), (16,), (0.0, 0.5))


def test_every_combination_is_a_run_with_a_name_of_its_own() -> None:
    runs = runs_of(AXES, inputs())
    assert len(runs) == 3 * 2 * 2 * 2
    assert len({each.name for each in runs}) == len(runs)
    assert runs[0].name == "kv-4a-isl512-osl16-share0-c1"
    assert [each.load for each in runs[:4]] == ["c1", "c8"] * 2


def test_prompts_have_their_length_and_their_share_in_common() -> None:
    sent = list(islice(prompts(inputs()), 30))
    assert {len(each) for each in sent} == {100}
    assert len({tuple(each[:50]) for each in sent}) == 3
    assert len({tuple(each[50:]) for each in sent}) == 30
    assert all(32 <= token <= 126 for each in sent for token in each)


@pytest.mark.parametrize(("share", "different"), [(0.0, 20), (1.0, 3)])
def test_a_share_of_nothing_and_of_all(share: float, different: int) -> None:
    assert len({tuple(each) for each in islice(prompts(inputs(prefix_share=share)), 20)}) == different


def test_arrivals_come_at_the_rate() -> None:
    at_s = list(islice(arrivals_s(inputs(concurrency=0, rate=4.0)), 4001))
    assert at_s[0] == 0.0
    assert at_s == sorted(at_s)
    assert at_s[-1] == pytest.approx(1000, rel=0.1)


def test_what_is_written_is_read_and_what_was_half_written_is_not(tmp_path: Path) -> None:
    one, other = record(inputs()), record(inputs(concurrency=0, rate=2.5, prefix_share=0.25))
    for each in (one, other):
        results.write(tmp_path, each)
    (tmp_path / ".x.part").write_text('{"format": 1, "inp')
    assert results.read(tmp_path) == {each.inputs.name: each for each in (one, other)}
    assert left([one.inputs, other.inputs], {name: each.inputs for name, each in results.read(tmp_path).items()}) == []
