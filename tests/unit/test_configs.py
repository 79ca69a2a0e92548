"""Every file in `configs/` loads, for the process that its name names."""

from pathlib import Path

import pytest

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
