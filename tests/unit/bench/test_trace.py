"""Reading traces, changing them, and making them up."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.routing.synthetic import SyntheticShape, synthetic_trace
from bench.routing.trace import TraceInvalid, TraceRequest, at_rate, load_trace, spread, totals, without_sharing
from tests.unit.bench.traces import random_trace, request


def line(**changed: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8], **changed}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + "\n")
    return path


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in line().items() if name != field}


def test_a_trace_is_read_as_it_is_written_with_ids_numbered_anew(tmp_path: Path) -> None:
    file = written(tmp_path / "t", line(), line(timestamp=1500, input_length=1024, hash_ids=[7, -3], more="x"))
    assert load_trace(file) == [TraceRequest(0.0, 600, 5, (0, 1)), TraceRequest(1.5, 1024, 5, (0, 2))]


def test_only_the_first_requests_are_read(tmp_path: Path) -> None:
    assert len(load_trace(written(tmp_path / "t", line(), line(), "not looked at"), 2)) == 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (line(timestamp=-1), "t:2: timestamp: found -1, allowed ms, a number of 0 or more"),
        (line(timestamp=None), "t:2: timestamp: found None, allowed ms, a number of 0 or more"),
        (line(timestamp=3), "t:2: timestamp: found 3.0, allowed 5.0 or more: lines come in order of arrival"),
        (line(input_length=0), "t:2: input_length: found 0, allowed tokens, an integer of 1 or more"),
        (line(input_length=2.5), "t:2: input_length: found 2.5, allowed tokens, an integer of 1 or more"),
        (line(output_length="9"), "t:2: output_length: found '9', allowed tokens, an integer of 1 or more"),
        (line(hash_ids=[1, "b"]), "t:2: hash_ids: found [1, 'b'], allowed a list of integers"),
        (line(timestamp=5), "t:2: hash_ids: found '2 ids', allowed 3, one for every 512 of 1025 tokens"),
        (without("output_length"), "t:2: output_length: found None, allowed tokens, an integer of 1 or more"),
        ([1], "t:2: line: found [1], allowed a JSON object"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path: Path, second: Any, message: str) -> None:
    if "1025" in message:
        second["input_length"] = 1025
    with pytest.raises(TraceInvalid) as refused:
        load_trace(written(tmp_path / "t", line(timestamp=5), second))
    assert str(refused.value) == message


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "\x00"])
def test_a_line_that_is_no_json_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceInvalid, match=r"^t:2: line: found .*, allowed a JSON object"):
        load_trace(written(tmp_path / "t", line(), text))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(TraceInvalid, match=r"^t: requests: found 0, allowed 1 or more$"):
        load_trace(tmp_path / "t")


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


def test_totals_count_distinct_blocks_once() -> None:
    told = totals([request(1.0, 1, 2), request(4.0, 1, 3, short_by=12)])
    assert told._asdict() == {
        "requests": 2,
        "span_s": 3.0,
        "prompt_tokens": 2036,
        "answer_tokens": 8,
        "distinct_tokens": 3 * 512,
    }


SHAPE = SyntheticShape(sessions=60, system_tokens=1000, systems=3)


def test_a_made_up_trace_is_a_function_of_its_seed() -> None:
    assert synthetic_trace(SHAPE, 5) == synthetic_trace(SHAPE, 5)
    assert synthetic_trace(SHAPE, 5) != synthetic_trace(SHAPE, 6)


def test_a_made_up_trace_is_in_order_and_has_a_block_for_every_512_tokens() -> None:
    trace = synthetic_trace(SHAPE, 5)
    assert [each.arrival_s for each in trace] == sorted(each.arrival_s for each in trace)
    assert [len(each.block_ids) for each in trace] == [-(-each.isl_tokens // 512) for each in trace]
    assert min(each.isl_tokens for each in trace) > 1024


def test_a_made_up_turn_begins_with_the_full_blocks_of_the_turn_before() -> None:
    trace = synthetic_trace(SHAPE._replace(sessions=1, turns=8.0), 7)
    assert len(trace) > 1
    for before, after in pairwise(trace):
        full_blocks = before.isl_tokens // 512
        assert after.block_ids[:full_blocks] == before.block_ids[:full_blocks]
        assert not set(after.block_ids[full_blocks:]) & set(before.block_ids)
        assert after.isl_tokens > before.isl_tokens + before.osl_tokens
