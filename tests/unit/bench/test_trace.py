"""Reading traces, changing them, and making them up."""

import json
from pathlib import Path
from typing import Any

from bench.routing.trace import TraceRequest, at_rate, load_trace
from tests.unit.bench.traces import request


def line(**changed: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8], **changed}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + "\n")
    return path


def test_a_trace_is_read_as_it_is_written_with_ids_numbered_anew(tmp_path: Path) -> None:
    file = written(tmp_path / "t", line(), line(timestamp=1500, input_length=1024, hash_ids=[7, -3], more="x"))
    assert load_trace(file) == [TraceRequest(0.0, 600, 5, (0, 1)), TraceRequest(1.5, 1024, 5, (0, 2))]


def test_at_twice_the_rate_all_requests_come_in_half_the_time() -> None:
    assert at_rate([request(0.0, 1), request(3.0, 2)], 2.0) == [request(0.0, 1), request(1.5, 2)]
