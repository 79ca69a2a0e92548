"""Reading traces, changing them, and making them up."""

import json
from pathlib import Path
from typing import Any

from bench.routing.synthetic import SyntheticShape, synthetic_trace
from bench.routing.trace import TraceRequest, at_rate, load_trace, spread, without_sharing
from tests.unit.bench.traces import random_trace, request


def line(**changed: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8], **changed}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + "\n")
    return path


def test_a_trace_is_read_as_it_is_written_with_ids_numbered_anew(tmp_path: Path) -> None:
    file = written(tmp_path / "t", line(), line(timestamp=1500, input_length=1024, hash_ids=[7, -3], more="x"))
    assert load_trace(file) == [TraceRequest(0.0, 600, 5, (0, 1)), TraceRequest(1.5, 1024, 5, (0, 2))]


def test_without_sharing_sizes_and_times_stay_and_no_id_comes_twice() -> None:
    trace = random_trace(seed=3)
    alone = without_sharing(trace)
    ids = [each for request in alone for each in request.block_ids]
    assert [each._replace(block_ids=()) for each in alone] == [each._replace(block_ids=()) for each in trace]
    assert [len(each.block_ids) for each in alone] == [len(each.block_ids) for each in trace]
    assert len(ids) == len(set(ids))


def test_at_twice_the_rate_all_requests_come_in_half_the_time() -> None:
    assert at_rate([request(0.0, 1), request(3.0, 2)], 2.0) == [request(0.0, 1), request(1.5, 2)]


def test_spread_requests_come_in_order_between_their_moment_and_the_next() -> None:
    trace = [request(0.0, 1), request(0.0, 2), request(3.0, 3), request(3.0, 4), request(5.0, 5)]
    times_s = [each.arrival_s for each in spread(trace, seed=1)]
    assert [each.block_ids for each in spread(trace, seed=1)] == [each.block_ids for each in trace]
    assert 0.0 < times_s[0] < times_s[1] < 3.0 < times_s[2] < times_s[3] < 5.0 == times_s[4]
    assert spread(trace, seed=1) == spread(trace, seed=1) != spread(trace, seed=2)


SHAPE = SyntheticShape(sessions=60, system_tokens=1000, systems=3)


def test_a_made_up_trace_is_in_order_and_has_a_block_for_every_512_tokens() -> None:
    trace = synthetic_trace(SHAPE, 5)
    assert [each.arrival_s for each in trace] == sorted(each.arrival_s for each in trace)
    assert [len(each.block_ids) for each in trace] == [-(-each.isl_tokens // 512) for each in trace]
    assert min(each.isl_tokens for each in trace) > 1024
