"""The manifests of `configs/deploy/kubernetes`: flags and variables exist, and so does what one names of another."""

import json
import re
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import router.__main__
import worker_agent.__main__
from bench.sweep.command import sweep
from dashboards.files import rules
from kv_runtime.config.loading import ConfigurationError, load_settings
from router.config import RouterSettings
from tests.support.kustomize import HASH, built, pod_specs, with_component
from tests.support.metric_families import COMMANDS
from tests.support.paths import ROOT
from worker_agent.config import AgentSettings

FOLDER = ROOT / "configs" / "deploy" / "kubernetes"
FILES = sorted(file for file in FOLDER.rglob("*.yaml") if file.name != "kustomization.yaml")
OBJECTS: list[dict[str, Any]] = [each for file in FILES for each in yaml.safe_load_all(file.read_text())]
PODS = [spec for each in OBJECTS for spec in pod_specs(each)]
CONTAINERS = [container for spec in PODS for container in spec["containers"]]
OURS = [each for each in CONTAINERS if each["name"] in ("router", "worker")]
SWEEPS = [each for each in CONTAINERS if each["name"] == "sweep"]
OVERLAYS = sorted((FOLDER / "overlays").iterdir())
COMPONENTS = sorted((FOLDER / "components").iterdir())
KUBERNETES = "1.33"
CUSTOM = {
    "DataLoad", "Dataset", "HTTPRoute", "InferencePool", "JindoRuntime", "LeaderWorkerSet", "PodMonitor",
    "ScaledObject", "ServiceMonitor",
}  # fmt: skip
"""Kinds of others, whose schemas no package has."""
ENGINE_VARIABLES = {"TRTLLM_ENABLE_PDL", "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL"}
"""Of TensorRT-LLM (docs/SOURCES.md, D13)."""
FOREIGN_VARIABLES = {"POD_NAME", "GPUS_PER_NODE", *ENGINE_VARIABLES}


def arguments(container: dict[str, Any]) -> list[str]:
    """Return the arguments of our command: behind a script that passes them on."""
    args: list[str] = container["args"]
    return args[1:] if args[0].startswith("/") else args


def of(containers: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("container", containers, ids=lambda each: f"{each['name']}-{len(str(each))}")


@of(OURS)
def test_every_flag_exists(container: dict[str, Any]) -> None:
    command: Any = router.__main__.main
    if container["name"] == "worker":
        command = worker_agent.__main__.main.commands["serve"].imported()  # type: ignore[attr-defined]
    known = {flag for parameter in command.params for flag in parameter.opts}
    flags = {word for word in arguments(container) if word.startswith("--")}
    assert flags <= known
    assert len(flags) >= 2


@of(OURS)
def test_every_variable_is_a_setting(container: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in container["env"]:
        if entry["name"] not in FOREIGN_VARIABLES:
            assert entry["name"].startswith("KVROUTER_")
            monkeypatch.setenv(entry["name"], entry.get("value", "10.0.0.1"))
    given = [word for before, word in pairwise(container["args"]) if before == "--set"]
    kind: type[AgentSettings | RouterSettings] = AgentSettings if container["name"] == "worker" else RouterSettings
    assert isinstance(load_settings(kind, assignments=given), kind)


@of([each for each in OURS if each["name"] == "worker"])
def test_engine_files_are_those_of_the_overlay(container: dict[str, Any]) -> None:
    overlays = [
        folder for folder in OVERLAYS if container in [one for spec in pods(folder) for one in spec["containers"]]
    ]
    assert overlays
    for folder in overlays:
        (engine,) = [each for each in built(folder) if each["metadata"]["name"] in ("engine", f"engine{HASH}")]
        named = {word.rpartition("/")[2] for word in re.findall(r"/etc/engine/[\w.-]+", str(arguments(container)))}
        assert named
        assert named <= engine["data"].keys()


def pods(folder: Path) -> list[dict[str, Any]]:
    return [spec for each in built(folder) for spec in pod_specs(each)]


BUILDS = [
    *((overlay, None) for overlay in OVERLAYS),
    *((FOLDER / "overlays" / "qwen3-small", each) for each in COMPONENTS),
]


@pytest.mark.parametrize(("overlay", "component"), BUILDS, ids=lambda folder: folder.name if folder else "alone")
def test_what_an_overlay_is_built_to_is_valid_and_whole(overlay: Path, component: Path | None) -> None:
    objects = built(overlay) if component is None else with_component(overlay, component)
    names = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in objects]
    assert sorted(set(names)) == sorted(names)
    for each in objects:
        check(each)
    kinds = {(kind, name) for _, kind, name in names}
    for spec in [spec for each in objects for spec in pod_specs(each)]:
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in kinds


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_every_object_has_the_fields_of_its_kind(manifest: dict[str, Any]) -> None:
    check(manifest)


def check(manifest: dict[str, Any]) -> None:
    """Check against Kubernetes' own schema; the pods of foreign kinds alone."""
    if manifest["kind"] not in CUSTOM:
        checked(json.dumps(manifest))
        return
    for spec in pod_specs(manifest):
        checked(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}))


@cache
def checked(text: str) -> None:
    """Validate an object, once: that takes a tenth of a second."""
    kubernetes_validate.validate(json.loads(text), KUBERNETES, strict=True)


def test_a_field_that_no_kind_has_would_be_seen() -> None:
    (nats,) = [each for each in OBJECTS if each["kind"] == "StatefulSet"]
    with pytest.raises(kubernetes_validate.ValidationError, match="replicaz"):
        check({**nats, "spec": {**nats["spec"], "replicaz": 3}})


def test_monitors_give_targets_the_jobs_that_the_alerts_name() -> None:
    monitors = [each["spec"] for each in OBJECTS if each["kind"] in ("ServiceMonitor", "PodMonitor")]
    endpoints = [one for spec in monitors for one in spec.get("endpoints", spec.get("podMetricsEndpoints"))]
    given = {rule["replacement"] for one in endpoints for rule in one["relabelings"] if rule["targetLabel"] == "job"}
    named = set(re.findall(r'job="([^"]+)"', rules().decode()))
    assert named <= given
    assert named


def test_the_dashboards_component_has_every_dashboard() -> None:
    (generator,) = yaml.safe_load((FOLDER / "components/dashboards/kustomization.yaml").read_text())[
        "configMapGenerator"
    ]
    found = {Path(each).name for each in generator["files"]}
    assert found == {each.name for each in (ROOT / "dashboards" / "grafana").iterdir()}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda folder: folder.name)
def test_workers_that_exchange_kv_may_connect_to_each_other(overlay: Path) -> None:
    objects = built(overlay)
    has_prefill = any("prefill" in each["metadata"]["name"] for each in objects)
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    of_workers = [rule for each in policies if "worker" in str(each["podSelector"]) for rule in each["ingress"]]
    assert has_prefill == any("ports" not in rule and "worker" in str(rule["from"]) for rule in of_workers)


def launched(index: int, directory: Path) -> list[str]:
    """Return the programs that a pod of a group of three starts, each with its arguments."""
    log = directory / "calls"
    for name in ("getent", "ssh", "ssh-keygen", "mpirun"):
        program = directory / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n')
        program.chmod(0o755)
    script = (FOLDER / "overlays" / "deepseek-r1" / "launch.sh").read_text().replace("/usr/sbin/sshd", "ssh")
    variables = {
        "PATH": f"{directory}:/bin:/usr/bin",
        "LWS_WORKER_INDEX": f"{index}",
        "LWS_GROUP_SIZE": "3",
        "LWS_LEADER_ADDRESS": "decode-0.decode.models",
        "GPUS_PER_NODE": "8",
    }
    subprocess.run(["/bin/sh", "-c", script, "launch.sh", "serve", "--port", "9000"], env=variables, check=True)
    return log.read_text().splitlines()


def test_node_0_starts_the_agent_behind_mpirun_once_all_nodes_answer(tmp_path: Path) -> None:
    calls = launched(0, tmp_path)
    nodes = ["decode-0-1.decode.models", "decode-0-2.decode.models"]
    assert [each.split()[2] for each in calls if each.startswith("getent")] == nodes
    assert [each.split()[-2] for each in calls if each.startswith("ssh ")] == nodes
    mpirun = calls[-1]
    assert "-np 24 --host decode-0.decode.models:8,decode-0-1.decode.models:8,decode-0-2.decode.models:8" in mpirun
    assert mpirun.endswith("trtllm-llmapi-launch worker-agent serve --port 9000")


def test_other_nodes_serve_ssh(tmp_path: Path) -> None:
    made, served = launched(1, tmp_path)
    assert made.startswith("ssh-keygen")
    assert "-D -e -p 2222" in served


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
    args = [word for each in OURS if each["name"] == "worker" for word in each["args"]]
    assert given["model"] in args


def test_a_misspelt_variable_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_DATA__HOSTZ", "x")
    with pytest.raises(ConfigurationError, match="KVROUTER_DATA__HOSTZ: unknown"):
        load_settings(RouterSettings)


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("kustomization.yaml")), ids=lambda file: file.parent.name)
def test_the_variables_of_a_patch_are_settings(file: Path) -> None:
    text = yaml.safe_load(file.read_text())
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


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_mounts_have_volumes(manifest: dict[str, Any]) -> None:
    claims = {one["metadata"]["name"] for one in manifest.get("spec", {}).get("volumeClaimTemplates", [])}
    for spec in pod_specs(manifest):
        volumes = claims | {one["name"] for one in spec.get("volumes", [])}
        for container in spec["containers"]:
            assert {one["name"] for one in container.get("volumeMounts", [])} <= volumes
