"""The manifests of `configs/deploy/kubernetes`: flags and variables exist, and so does what one names of another."""

import re
from itertools import pairwise
from typing import Any

import pytest
import yaml

import router.__main__
import worker_agent.__main__
from bench.sweep.command import sweep
from kv_runtime.config.loading import ConfigurationError, load_settings
from router.config import RouterSettings
from tests.support.metric_families import COMMANDS
from tests.support.paths import ROOT
from worker_agent.config import AgentSettings

FOLDER = ROOT / "configs" / "deploy" / "kubernetes"
FILES = sorted(file for file in FOLDER.rglob("*.yaml") if file.name != "kustomization.yaml")
OBJECTS: list[dict[str, Any]] = [each for file in FILES for each in yaml.safe_load_all(file.read_text())]
CONTAINERS = [
    (each["metadata"]["name"], container)
    for each in OBJECTS
    if each["kind"] in ("Deployment", "StatefulSet", "Job")
    for container in each["spec"]["template"]["spec"]["containers"]
]
OURS = [(name, container) for name, container in CONTAINERS if name not in ("nats", "sweep")]
SWEEPS = [container for name, container in CONTAINERS if name == "sweep"]


@pytest.mark.parametrize(("name", "container"), OURS)
def test_every_flag_exists(name: str, container: dict[str, Any]) -> None:
    command: Any = router.__main__.main
    if name == "worker":
        command = worker_agent.__main__.main.commands["serve"].imported()  # type: ignore[attr-defined]
    known = {flag for parameter in command.params for flag in parameter.opts}
    flags = {word for word in container["args"] if word.startswith("--")}
    assert flags <= known
    assert len(flags) >= 2


@pytest.mark.parametrize(("name", "container"), OURS)
def test_every_variable_is_a_setting(name: str, container: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in container["env"]:
        if entry["name"] != "POD_NAME":
            monkeypatch.setenv(entry["name"], entry.get("value", "10.0.0.1"))
    given = [word for before, word in pairwise(container["args"]) if before == "--set"]
    kind: type[AgentSettings | RouterSettings] = AgentSettings if name == "worker" else RouterSettings
    assert isinstance(load_settings(kind, assignments=given), kind)


def test_a_sweep_is_called_as_it_is_typed_against_a_service_that_is_there() -> None:
    (container,) = SWEEPS
    (bench, name), flags = container["args"][:2], container["args"][2:]
    assert (bench, name) == ("bench", sweep.name)
    given = sweep.make_context("sweep", flags).params
    services = {
        f"http://{each['metadata']['name']}:{port['port']}"
        for each in OBJECTS
        if each["kind"] == "Service"
        for port in each["spec"]["ports"]
    }
    assert given["url"] in services
    assert str(given["out"]) in {each["mountPath"] for each in container["volumeMounts"]}
    args = [word for name, each in OURS if name == "worker" for word in each["args"]]
    assert given["model"] in args


def test_a_misspelt_variable_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_DATA__HOSTZ", "x")
    with pytest.raises(ConfigurationError, match="KVROUTER_DATA__HOSTZ: unknown"):
        load_settings(RouterSettings)


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("kustomization.yaml")), ids=lambda file: file.parent.name)
def test_what_a_kustomization_names_is_there(file: Any) -> None:
    text = yaml.safe_load(file.read_text())
    for name in text["resources"]:
        assert (file.parent / name).exists()
    for generator in text.get("configMapGenerator", []):
        for entry in generator["files"]:
            assert (file.parent / entry.partition("=")[2]).is_file()
    for variable in re.findall(r"name: KVROUTER_(\w+), value", str(text.get("patches", ""))):
        section, _, field = variable.lower().partition("__")
        assert field in type(getattr(load_settings(RouterSettings), section)).model_fields


AUTOSCALERS = [each for each in OBJECTS if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]


def unknown_metrics(text: str) -> set[str]:
    return set(re.findall(r"\bkvrouter_[a-z_]+", text)) - COMMANDS["router"].keys()


def test_every_metric_exists_and_has_the_labels_that_are_selected() -> None:
    text = "".join(file.read_text() for file in FILES)
    assert "kvrouter_planner_advised_workers" in text
    assert unknown_metrics(text) == set()
    assert COMMANDS["router"]["kvrouter_planner_advised_workers"].labels == ("model", "role")


def test_a_metric_that_no_router_has_would_be_seen() -> None:
    assert unknown_metrics("max(kvrouter_planner_adviced_workers)") == {"kvrouter_planner_adviced_workers"}


@pytest.mark.parametrize("scaler", AUTOSCALERS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_autoscalers_scale_a_deployment_that_is_there(scaler: dict[str, Any]) -> None:
    target = scaler["spec"]["scaleTargetRef"]
    there = {(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in OBJECTS}
    assert (target["apiVersion"], target["kind"], target["name"]) in there


@pytest.mark.parametrize(("name", "container"), CONTAINERS)
def test_mounts_have_volumes(name: str, container: dict[str, Any]) -> None:
    for each in OBJECTS:
        if (
            each["kind"] in ("Deployment", "StatefulSet", "Job")
            and container in each["spec"]["template"]["spec"]["containers"]
        ):
            spec = each["spec"]
            volumes = {one["name"] for one in spec["template"]["spec"].get("volumes", [])}
            volumes |= {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", [])}
            assert {one["name"] for one in container.get("volumeMounts", [])} <= volumes, name
