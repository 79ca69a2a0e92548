from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.fidelity.recording import FleetFigures, load_recording
from tests.support.paths import CAPTURES
from tests.unit.bench.fleets import SESSIONS, fleet_json, recording

CAPTURE = CAPTURES / "h200_fleet_light.json"
FLEET = fleet_json()


def written(path: Path, said: Any) -> Path:
    file = path / "fleet.json"
    file.write_bytes(msgspec.json.encode(said))
    return file


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    said: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(FLEET))
    change(said)
    return said


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    read = load_recording(written(tmp_path, FLEET))
    assert read._replace(runs=()) == recording()
    assert [(run.policy, run.workers, run.unanswered) for run in read.runs] == [
        (policy, 3, 0) for policy in ("rr", "sticky", "random")
    ]
    assert [run.summary_differences for run in read.runs] == [(), (), ()]


def test_a_session_that_ended_early_is_cut_where_its_rows_end(tmp_path: Path) -> None:
    last_tokens = list(SESSIONS[3].prompts_tokens((320, 500)))[-1]

    def end_early(said: dict[str, Any]) -> None:
        for run in said["runs"]:
            run["rows"] = [row for row in run["rows"] if (row[0], row[6]) != (last_tokens, 3)]
            run["requests"] = len(run["rows"])
            run["req_s"] = run["requests"] / run["seconds"]

    read = load_recording(written(tmp_path, changed(end_early)))
    assert [len(each.added_tokens) for each in read.sessions] == [3 if n == 3 else 4 for n in range(len(SESSIONS))]
    assert [run.unanswered for run in read.runs] == [0, 0, 0]


def test_a_summary_that_its_rows_contradict_is_told(tmp_path: Path) -> None:
    def lie(said: dict[str, Any]) -> None:
        said["runs"][0] |= {"hit": 0.99, "ttft_ms": {"50": 1.0}, "itl_ms": {}}

    first, second, _ = load_recording(written(tmp_path, changed(lie))).runs
    assert [each.split(" ")[0] for each in first.summary_differences] == ["hit", "ttft_ms"]
    assert second.summary_differences == ()


def test_a_run_that_contradicts_itself_is_used_and_told(tmp_path: Path) -> None:
    def lie(said: dict[str, Any]) -> None:
        first, second, third = said["runs"]
        first["rows"].pop()
        second["req_s"] = 1.0
        third["rows"][2][6] = 9

    first, second, third = load_recording(written(tmp_path, changed(lie))).runs
    assert (first.unanswered, first.summary_differences[0]) == (1, "requests 56, there are 55 rows")
    assert second.summary_differences[0].startswith("req_s 1.0, requests / seconds is ")
    assert (third.unanswered, third.unplanned) == (1, 1)


@pytest.mark.skipif(not CAPTURE.exists(), reason=f"no {CAPTURE}")
def test_figures_are_defined_as_in_the_recording_of_the_real_fleet() -> None:
    runs = load_recording(CAPTURE).runs
    assert [(run.policy, run.unanswered, run.summary_differences) for run in runs] == [
        (policy, 0, ()) for policy in ("rr", "sticky", "random")
    ]
    assert runs[0].figures == FleetFigures(0.6591228970304512, 68.01, 0.0775, 0.1561, 0.0195)
