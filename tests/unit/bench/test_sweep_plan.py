"""Which runs a sweep has, which of them are left, what they send, and what was written of them."""

from itertools import islice
from pathlib import Path

import pytest

from bench.sweep import results
from bench.sweep.plan import SweepAxes, difference, left, runs_of, time_left
from bench.sweep.prompts import arrivals_s, prompts
from bench.sweep.results import ResultInvalid
from tests.unit.bench.sweep_runs import inputs, record

FLEETS = (("kv", "4a", 4), ("round-robin", "4a", 4), ("kv", "1p3d", 4))
AXES = SweepAxes(FLEETS, (1, 8), (), (512, 1024), (16,), (0.0, 0.5))


def test_every_combination_is_a_run_with_a_name_of_its_own() -> None:
    runs = runs_of(AXES, inputs())
    assert len(runs) == 3 * 2 * 2 * 2
    assert len({each.name for each in runs}) == len(runs)
    assert runs[0].name == "kv-4a-isl512-osl16-share0-c1"
    assert [each.load for each in runs[:4]] == ["c1", "c8"] * 2


def test_rates_take_the_place_of_users() -> None:
    runs = runs_of(AXES._replace(concurrencies=(), rates=(0.5, 2.0)), inputs())
    assert [(each.load, each.concurrency) for each in runs[:2]] == [("r0.5", 0), ("r2", 0)]


def test_a_run_with_equal_inputs_is_not_left_and_one_with_others_is() -> None:
    one, other = inputs(), inputs(concurrency=16)
    assert left([one, other], {}) == [one, other]
    assert left([one, other], {one.name: one}) == [other]
    longer = inputs(requests=20)
    assert longer.name == one.name
    assert left([longer], {one.name: one}) == [longer]
    assert difference(longer, one) == "requests (found 10, wanted 20)"


def test_the_time_left_is_that_of_runs_of_the_same_load() -> None:
    took_s = {inputs(concurrency=1): 100.0, inputs(concurrency=8): 10.0}
    assert time_left({}, [inputs()]) == "1 left"
    assert time_left(took_s, []) == "0 left"
    assert time_left(took_s, [inputs(mode="round-robin", concurrency=1)]) == "1 left, about 2 min"
    assert time_left(took_s, [inputs(mode="round-robin", concurrency=8)]) == "1 left, about 10 s"
    assert time_left(took_s, [inputs(concurrency=64)]) == "1 left, about 55 s"


def test_prompts_have_their_length_and_their_share_in_common() -> None:
    sent = list(islice(prompts(inputs()), 30))
    assert {len(each) for each in sent} == {100}
    assert len({tuple(each[:50]) for each in sent}) == 3
    assert len({tuple(each[50:]) for each in sent}) == 30
    assert all(32 <= token <= 126 for each in sent for token in each)


@pytest.mark.parametrize(("share", "different"), [(0.0, 20), (1.0, 3)])
def test_a_share_of_nothing_and_of_all(share: float, different: int) -> None:
    assert len({tuple(each) for each in islice(prompts(inputs(prefix_share=share)), 20)}) == different


def test_modes_and_layouts_get_the_same_prompts_and_other_loads_share_nothing() -> None:
    def first(**changed: object) -> list[list[int]]:
        return list(islice(prompts(inputs(**changed)), 5))

    assert first() == first(mode="round-robin", layout="1p3d") == first(url="http://h")
    assert first() != first(seed=2)
    assert not {tuple(each[:50]) for each in first()} & {tuple(each[:50]) for each in first(concurrency=16)}


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", r"x.json: found no run of a sweep .*, allowed what the sweep writes"),
        ("{", r"x.json: found no run of a sweep .*, allowed what the sweep writes"),
        ("\ud800", r"x.json: found no run of a sweep .*, allowed what the sweep writes"),
    ],
)
def test_a_file_that_is_no_run_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ResultInvalid, match=words):
        results.read(tmp_path)


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    file = results.write(tmp_path, record(inputs()))
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ResultInvalid, match=r"format: found 2, allowed 1"):
        results.read(tmp_path)
