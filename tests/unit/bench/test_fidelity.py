from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.fidelity.command import FIGURES, compare, main
from bench.fidelity.recording import FleetFigures
from tests.unit.bench.fleets import calibration_json, fleet_json, slowed
from worker_agent.engines.simulated.timing import H200_8B_MIXED, EngineTiming

REAL = FleetFigures(0.5, 100.0, 0.1, 0.2, 0.01)


@cache
def fleet_bytes(timing: EngineTiming) -> bytes:
    return msgspec.json.encode(fleet_json(timing))


def arguments(path: Path, timing: EngineTiming = H200_8B_MIXED) -> list[str]:
    (path / "fleet.json").write_bytes(fleet_bytes(timing))
    (path / "calibration.json").write_bytes(msgspec.json.encode(calibration_json()))
    return ["--fleet", str(path / "fleet.json"), "--calibration", str(path / "calibration.json")]


def told(given: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*given, "--json"]) == 0
    found: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
    return found


def test_a_fleet_of_simulated_engines_is_like_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(arguments(tmp_path), capsys)
    assert found["verdict"] == ("15 of 15 figures within their bounds, 5 of 5 rankings of the placements the same")
    assert max(abs(each["difference"]) for each in found["compared"]) < 0.02


def test_a_fleet_twice_as_slow_has_the_same_hit_rates_and_other_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(arguments(tmp_path, slowed(2.0)), capsys)
    assert {each["figure"] for each in found["compared"] if not each["is_within"]} == {
        "requests/s",
        "TTFT p50",
        "TTFT p90",
        "ITL p50",
    }
    assert [ranking["real"] == ranking["simulated"] for ranking in found["rankings"]] == [True] * 5


@pytest.mark.parametrize(
    ("field", "within", "beyond"),
    [
        ("hit_ratio", 0.519, 0.521),
        ("hit_ratio", 0.481, 0.479),
        ("requests_per_s", 124.9, 125.1),
        ("requests_per_s", 75.1, 74.9),
        ("ttft_p50_s", 0.1249, 0.1251),
        ("ttft_p90_s", 0.1501, 0.1499),
        ("itl_p50_s", 0.01249, 0.01251),
    ],
)
def test_bounds_hold_on_both_sides(field: str, within: float, beyond: float) -> None:
    found = [
        compare({"rr": REAL}, {"rr": REAL._replace(**{field: value})}).compared[REAL._fields.index(field)].is_within
        for value in (within, beyond)
    ]
    assert found == [True, False]


def test_each_figure_ranks_by_what_is_best() -> None:
    real = {"good": REAL, "bad": FleetFigures(0.4, 90.0, 0.2, 0.3, 0.02)}
    turned = {"good": real["bad"], "bad": real["good"]}
    rankings = compare(real, turned).rankings
    assert [(each.real, each.simulated, each.is_same) for each in rankings] == [
        (("good", "bad"), ("bad", "good"), False)
    ] * len(FIGURES)
