"""Figures of runs, their summary, and the command that prints and plots them."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bench.streaming_client import Measured
from bench.sweep import results
from bench.sweep.command import sweep
from bench.sweep.report_command import NAME, SummaryRow, on_frontier, read_export, report
from bench.sweep.results import RunFigures, RunInputs, RunRecord, figures, left
from tests.support.paths import ROOT

BASE: dict[str, Any] = {
    "model": "m",
    "mode": "kv",
    "layout": "4a",
    "workers": 4,
    "concurrency": 8,
    "isl_tokens": 100,
    "osl_tokens": 5,
    "prefix_share": 0.5,
    "prefixes": 3,
    "requests": 10,
    "warmup": 2,
    "seed": 1,
}


def inputs(**changed: Any) -> RunInputs:
    return RunInputs(**BASE | changed)


def answered(**changed: Any) -> Measured:
    """Return an answer of 5 tokens to 100, of which 40 were cached: 0.1 s a token with the defaults."""
    told: dict[str, Any] = {"sent_s": 0.0, "ttft_s": 0.1, "duration_s": 0.5, "prompt_tokens": 100, "cached_tokens": 40}
    told |= {"output_tokens": 5, "worker": "w0", "decision_id": "d", "predicted_blocks": 0}
    return Measured(**told | changed)


def measured_figures(*, lag_p99_s: float | None = 0.005, **changed: Any) -> RunFigures:
    return figures([answered(**changed)], workers=4, lag_p99_s=lag_p99_s)


def record(run: RunInputs, found: RunFigures | None = None, machine: str = "a machine") -> RunRecord:
    return RunRecord(
        inputs=run,
        figures=found or measured_figures(),
        versions={"kv-router": "1"},
        machine=machine,
        began="2026-01-01T00:00:00+00:00",
        took_s=10.0,
    )


EXPORT = ROOT / "tests" / "golden" / "aiperf_export.json"
PNG = b"\x89PNG"


def row(tokens_s_worker: float, tokens_s_user: float, load: str = "c8", fleet: str = "kv-4a") -> SummaryRow:
    found = msgspec.structs.replace(measured_figures(), tokens_s_worker=tokens_s_worker, tokens_s_user=tokens_s_user)
    return SummaryRow(name=f"{fleet}-{load}", fleet=fleet, workload="w", load=load, workers=4, figures=found)


def test_the_figures_of_a_run() -> None:
    found = figures([answered(), answered(sent_s=1.5)], workers=4)
    assert (found.requests, found.failed, found.span_s, found.requests_s) == (2, 0, 2.0, 1.0)
    assert (found.output_tokens_s, found.tokens_s_worker) == (5.0, 1.25)
    assert found.itl_s[0] == pytest.approx(0.1)
    assert found.tokens_s_user == pytest.approx(10.0)
    assert (found.hit_rate, found.isl_tokens, found.osl_tokens) == (0.4, 100.0, 5.0)


def test_a_failed_request_counts_in_no_latency_and_its_reason_is_kept() -> None:
    found = figures([answered(), *[answered(ttft_s=9.0, duration_s=9.0, error="status 503")] * 2], workers=1)
    assert (found.requests, found.failed, found.reasons) == (3, 2, ("2 x status 503",))
    assert found.ttft_s == (0.1, 0.1, 0.1)
    assert found.requests_s == pytest.approx(1 / 9)


def test_an_answer_of_one_token_has_no_itl() -> None:
    assert figures([answered(output_tokens=1)], workers=1).tokens_s_user == 0.0


def test_a_run_that_served_badly_is_not_on_the_frontier() -> None:
    best = row(100, 10, "c16")
    lagging = msgspec.structs.replace(row(200, 9, "c32"), figures=measured_figures(lag_p99_s=0.025))
    failing = msgspec.structs.replace(row(200, 9, "c64"), figures=figures([answered(), answered(error="x")], workers=1))
    other = row(50, 20, "c8", "round-robin-4a")
    beaten = row(40, 20, "c4")
    assert on_frontier({"kv": [best, lagging, failing, beaten], "rr": [other]}) == ["kv-4a-c16", "round-robin-4a-c8"]


def test_an_export_of_aiperf_is_read() -> None:
    """The file is what aiperf 0.13.0 wrote of 81 requests of a trace, without the metrics that are not read."""
    run = read_export(EXPORT, (), 4)
    assert (run.load, run.versions) == ("fixed-schedule", {"aiperf": "0.13.0"})
    found = run.figures
    assert (found.requests, found.failed) == (81, 0)
    assert found.ttft_s == pytest.approx((0.08010, 0.18684, 0.24655), abs=1e-5)
    assert found.hit_rate == pytest.approx(0.15657, abs=1e-5)
    assert found.tokens_s_worker == pytest.approx(145.0126 / 4, abs=1e-4)
    assert found.tokens_s_user == pytest.approx(1 / 0.0059198, rel=1e-4)
    assert found.isl_tokens == pytest.approx(264269 / 81)


@pytest.mark.parametrize(("phase", "load"), [({"concurrency": 8}, "c8"), ({"rate": 2.5, "concurrency": 9}, "r2.5")])
def test_the_load_of_an_export_is_named_as_a_sweeps(tmp_path: Path, phase: dict[str, float], load: str) -> None:
    export = json.loads(EXPORT.read_bytes())
    export["input_config"]["phases"] = [{"type": "warmup", "concurrency": 1}, {"type": "x"} | phase]
    export["error_summary"] = [{"error_details": {"type": "T", "message": "m"}, "count": 3}]
    (tmp_path / NAME).write_text(json.dumps(export))
    run = read_export(tmp_path / NAME, (), 1)
    assert (run.load, run.figures.requests, run.figures.failed) == (load, 84, 3)
    assert run.figures.reasons == ("3 x T: m",)


def test_fleets_behind_endpoints_share_a_plot_in_tokens_of_a_gpu(tmp_path: Path) -> None:
    """A sweep's fleets have the names and GPUs of their runs, aiperf's those of their directories and `--gpus`."""
    for fleet, gpus in (("agg", 2), ("disagg", 3)):
        results.write(tmp_path, record(inputs(url="http://a", layout=fleet, mode="", workers=gpus)))
        for users in ("c1", "c8"):
            (tmp_path / fleet / users).mkdir(parents=True)
            shutil.copy(EXPORT, tmp_path / fleet / users / NAME)
    ran = CliRunner().invoke(report, [str(tmp_path), "--gpus", "2", "--gpus", "disagg=3"])
    assert ran.exit_code == 0, ran.output
    runs = json.loads((tmp_path / "report" / "summary.json").read_bytes())["runs"]
    aiperf = [("aiperf-agg", 2)] * 2 + [("aiperf-disagg", 3)] * 2
    assert [(each["fleet"], each["workers"]) for each in runs] == [("agg", 2), ("disagg", 3), *aiperf]
    assert runs[-1]["figures"]["tokens_s_worker"] == pytest.approx(145.0126 / 3, abs=1e-4)
    for workload, fleets in (("isl100-osl5-share0.5", ("agg", "disagg")), ("aiperf", ("aiperf-agg", "aiperf-disagg"))):
        plot = (tmp_path / "report" / f"pareto-{workload}.svg").read_text()
        assert all(fleet in plot for fleet in fleets)


@pytest.mark.parametrize("found", ["0", "agg=", "agg=few"])
def test_gpus_that_are_no_number_are_refused(tmp_path: Path, found: str) -> None:
    ran = CliRunner().invoke(report, [str(tmp_path), "--gpus", found])
    assert (ran.exit_code, f"found {found!r}, allowed a whole number above 0" in ran.output) == (2, True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--fleet", "agg"), "found --fleet without --url"),
        (("--gpus", "2"), "found --gpus without --url"),
        (("--url", "http://a", "--fleet", "a/b"), "found 'a/b'"),
    ],
)
def test_a_fleet_s_name_and_gpus_are_those_of_an_endpoint(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    ran = CliRunner().invoke(sweep, ["--out", str(tmp_path), *flags])
    assert (ran.exit_code, said in ran.output) == (2, True)


def test_the_command_writes_tables_a_summary_and_plots(tmp_path: Path) -> None:
    runs, base = tmp_path / "runs", tmp_path / "base"
    for each in (runs / "trace", base):
        each.mkdir(parents=True)
    shutil.copy(EXPORT, runs / "trace" / NAME)
    for mode in ("kv", "round-robin"):
        for users in (1, 8):
            results.write(runs, record(inputs(mode=mode, concurrency=users)))
    results.write(base, record(inputs(concurrency=8), measured_figures(ttft_s=0.2)))
    ran = CliRunner().invoke(report, [str(runs), "--base", str(base), "--gpus", "4"])
    assert ran.exit_code == 0, ran.output
    assert "### Fleet kv-4a: isl100-osl5-share0.5" in ran.output
    assert "| kv-4a-isl100-osl5-share0.5-c8 | TTFT p50, ms | 200 | 100 | 0.50 |" in ran.output
    written = runs / "report"
    assert (written / "summary.md").read_text() == ran.output
    summary = json.loads((written / "summary.json").read_bytes())
    assert [each["fleet"] for each in summary["runs"]] == ["kv-4a"] * 2 + ["round-robin-4a"] * 2 + ["aiperf-trace"]
    assert set(summary["frontier"]) == {"isl100-osl5-share0.5", "aiperf"}
    for plot in ("pareto", "ttft"):
        svg, png = (written / f"{plot}-isl100-osl5-share0.5.{kind}" for kind in ("svg", "png"))
        assert "round-robin-4a" in svg.read_text()
        assert png.read_bytes().startswith(PNG)


def test_what_is_written_is_read_and_what_was_half_written_is_not(tmp_path: Path) -> None:
    one, other = record(inputs()), record(inputs(concurrency=0, rate=2.5, prefix_share=0.25))
    for each in (one, other):
        results.write(tmp_path, each)
    (tmp_path / ".x.part").write_text('{"format": 1, "inp')
    assert results.read(tmp_path) == {each.inputs.name: each for each in (one, other)}
    assert left([one.inputs, other.inputs], {name: each.inputs for name, each in results.read(tmp_path).items()}) == []
