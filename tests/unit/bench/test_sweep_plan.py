"""Which runs a sweep has, which of them are left, what they send, and what was written of them."""

from pathlib import Path

from bench.sweep import results
from bench.sweep.results import left
from tests.unit.bench.sweep_runs import inputs, record


def test_what_is_written_is_read_and_what_was_half_written_is_not(tmp_path: Path) -> None:
    one, other = record(inputs()), record(inputs(concurrency=0, rate=2.5, prefix_share=0.25))
    for each in (one, other):
        results.write(tmp_path, each)
    (tmp_path / ".x.part").write_text('{"format": 1, "inp')
    assert results.read(tmp_path) == {each.inputs.name: each for each in (one, other)}
    assert left([one.inputs, other.inputs], {name: each.inputs for name, each in results.read(tmp_path).items()}) == []
