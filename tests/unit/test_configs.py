"""Every file in `configs/` loads, for the process that its name names."""

import os
import subprocess
from pathlib import Path

import click
import pytest

from bench.sweep.command import sweep
from indexer.config import IndexerSettings
from kv_runtime.config.loading import load_settings
from kv_runtime.config.sections import Settings
from router.__main__ import main
from router.config import RouterSettings
from tests.support.paths import ROOT
from worker_agent.config import AgentSettings

CONFIGS = ROOT / "configs"
BATCH_JOB = CONFIGS / "slurm" / "sweep.sbatch"
KINDS: dict[str, type[Settings]] = {
    "router": RouterSettings,
    "worker": AgentSettings,
    "indexer": IndexerSettings,
}


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_it_loads(file: Path) -> None:
    kind = KINDS[file.stem.partition("-")[0]]
    assert isinstance(load_settings(kind, file=file), kind)


def test_there_are_some() -> None:
    assert len(list(CONFIGS.glob("*.yaml"))) >= 4


def called(script: Path, directory: Path, *arguments: str, **variables: str) -> list[str]:
    """Return the arguments that a script gives to `router`."""
    (directory / "router").write_text('#!/bin/sh\nfor each in "$@"; do echo "$each"; done\n')
    (directory / "router").chmod(0o755)
    environment = {"PATH": f"{directory}:{os.environ['PATH']}", **variables}
    command = ["/bin/sh", str(script), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_the_script_of_attached_engines_calls_the_router_with_flags_that_it_has(tmp_path: Path) -> None:
    flags = called(CONFIGS / "launch" / "attached.sh", tmp_path, "--port", "0", TEXT="/model")
    assert flags[-2:] == ["--port", "0"]
    assert isinstance(main.make_context("", list(flags)), click.Context)


@pytest.mark.parametrize(
    ("variables", "url", "gpus"),
    [({}, "", 1), ({"URL": "http://node7:8000", "GPUS": "8"}, "http://node7:8000", 8)],
)
def test_the_batch_job_calls_the_sweep_with_flags_that_it_has(
    tmp_path: Path, variables: dict[str, str], url: str, gpus: int
) -> None:
    bench, command, *flags = called(BATCH_JOB, tmp_path, "--isl", "512", OUT="/runs", **variables)
    given = sweep.make_context("sweep", flags).params
    assert (bench, command, str(given["out"]), given["isl"]) == ("bench", "sweep", "/runs", (512,))
    assert (given["url"], given["gpus"]) == (url, gpus)


def test_the_batch_job_without_a_directory_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        called(BATCH_JOB, tmp_path)
    assert "OUT: the directory of the runs" in failed.value.stderr


def test_what_slurm_reads_of_the_batch_job_stands_before_its_first_command() -> None:
    lines = BATCH_JOB.read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert len(options) >= 5
    assert max(options) < first_command
