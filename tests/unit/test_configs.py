"""Every file in `configs/` loads, for the process that its name names."""

import os
import subprocess
from pathlib import Path

import click
import pytest

from bench.up import up
from indexer.config import IndexerSettings
from kv_runtime.config.loading import load_settings
from kv_runtime.config.sections import Settings
from router.config import RouterSettings
from tests.support.paths import ROOT
from worker_agent.config import AgentSettings
from worker_agent.engines.attached.config import ConsolidateSettings

CONFIGS = ROOT / "configs"
KINDS: dict[str, type[Settings]] = {
    "router": RouterSettings,
    "worker": AgentSettings,
    "indexer": IndexerSettings,
    "consolidator": ConsolidateSettings,
}


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_it_loads(file: Path) -> None:
    kind = KINDS[file.stem.partition("-")[0]]
    assert isinstance(load_settings(kind, file=file), kind)


def test_there_are_some() -> None:
    assert len(list(CONFIGS.glob("*.yaml"))) >= 4


@pytest.mark.parametrize("script", sorted(CONFIGS.glob("launch/*.sh")), ids=lambda script: script.name)
def test_a_launch_script_calls_router_up_with_flags_that_it_has(script: Path, tmp_path: Path) -> None:
    (tmp_path / "router").write_text('#!/bin/sh\nfor each in "$@"; do echo "$each"; done\n')
    (tmp_path / "router").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TEXT": "/model"}
    ran = subprocess.run(
        ["/bin/sh", script, "--port", "0"], env=environment, capture_output=True, text=True, check=True
    )
    command, *flags = ran.stdout.splitlines()
    assert (command, flags[-2:]) == ("up", ["--port", "0"])
    assert isinstance(up.make_context("up", flags), click.Context)
