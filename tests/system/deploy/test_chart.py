"""`charts/kv-router` as helm renders it: valid objects, whose flags, variables and files are those of the code."""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

import indexer.__main__
import router.__main__
import worker_agent.__main__
from bench.sweep.command import sweep
from dashboards.command import rules
from indexer.config import IndexerSettings
from kv_runtime.config.loading import load_settings
from router.config import RouterSettings
from tests.support.metric_families import COMMANDS
from tests.support.paths import ROOT
from tests.system.deploy.chart import (
    CHART,
    HELM,
    Manifest,
    Release,
    containers,
    helm,
    named,
    needs_helm,
    pod_specs,
    rendered,
)
from worker_agent.attached.config import AttachSettings
from worker_agent.config import AgentSettings

KUBECTL = ROOT / "build" / "deploy" / "kubectl" / "kubectl"
SWEEP = ROOT / "configs" / "kubernetes" / "sweep.yaml"
KUBERNETES = ("1.29", "1.37")
"""The oldest release that the chart allows, and the newest that kubernetes-validate has."""
CUSTOM = {
    "DataLoad", "Dataset", "HTTPRoute", "InferencePool", "JindoRuntime", "LeaderWorkerSet", "PodMonitor",
    "PrometheusRule", "ScaledObject", "ServiceMonitor",
}  # fmt: skip
"""Kinds of others, whose schemas kubernetes-validate does not have."""
FOREIGN_VARIABLES = {
    *("POD_NAME", "POD_IP", "GPUS_PER_NODE"),
    *("TRTLLM_ENABLE_PDL", "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL"),  # docs/SOURCES.md, D13
}
EVERYTHING = (
    "monitoring.enabled=true,indexer.enabled=true,gateway.name=inference,workerDefaults.replicasMax=8,"
    "models.download.repository=Qwen/Qwen3-0.6B,models.download.revision=c1899de,models.download.tokenSecret=hub"
)

pytestmark = needs_helm


VALUES = [Release(), Release(("vllm",)), Release(("sglang",)), Release(("trtllm",))]
MODELS = [
    Release(("gpt-oss-120b",)),
    Release(("gpt-oss-120b", "gpt-oss-120b-disagg")),
    Release(("deepseek-r1",)),
    Release(("llava-epd",)),
]
VARIANTS = [
    Release(("vllm",), "attach=router"),
    Release(
        ("sglang",),
        "router.credentials=clients,router.config.data.accounts_file=/etc/credentials/accounts.yaml,attach=router,nats.url=nats://nats.example:4222,nats.roles=true,networkPolicy.enabled=false",
    ),
    Release(("vllm",), EVERYTHING),
    Release(("trtllm",), f"{EVERYTHING},monitoring.operator=true,autoscaling.by=hpa,nats.replicas=1,router.replicas=8"),
    Release(("gpt-oss-120b",), "models.fluid.mountPoint=s3://models/gpt-oss-120b"),
]
RELEASES = [*VALUES, *MODELS, *VARIANTS]
of_release = pytest.mark.parametrize("release", RELEASES, ids=str)


@pytest.mark.parametrize("version", KUBERNETES)
@of_release
def test_every_object_has_the_fields_of_its_kind(release: Release, version: str) -> None:
    names = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in rendered(release)]
    assert sorted(set(names)) == sorted(names)
    for each in rendered(release):
        check(each, version)


def check(manifest: Manifest, version: str = KUBERNETES[0]) -> None:
    """Check against Kubernetes' own schema; the pods of foreign kinds alone."""
    if manifest["kind"] not in CUSTOM:
        checked(json.dumps(manifest), version)
        return
    for spec in pod_specs(manifest):
        checked(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}), version)


@cache
def checked(text: str, version: str) -> None:
    """Validate an object, once: that takes a tenth of a second."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


def test_a_field_that_no_kind_has_would_be_seen() -> None:
    nats = named(VALUES[0], "StatefulSet")["kv-nats"]
    with pytest.raises(kubernetes_validate.ValidationError, match="replicaz"):
        check({**nats, "spec": {**nats["spec"], "replicaz": 3}})


@of_release
def test_helm_finds_nothing_to_complain_about(release: Release) -> None:
    ran = helm("lint", release)
    assert ran.returncode == 0, ran.stdout
    assert "[WARNING]" not in ran.stdout


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ("nats.replicas=2", "at '/nats/replicas': value must be one of 1, 3, 5"),
        ("nats.url=nats:4222", "at '/nats/url': 'nats:4222' does not match"),
        ("router.replica=3", "at '/router': additional properties 'replica' not allowed"),
        ("workers.worker.engine=vlm", "at '/workers/worker/engine': value must be one of"),
        ("workers.router.gpus=1", "at '/workers/router'"),
        ("workerDefaults.gpus=one", "at '/workerDefaults/gpus': got string, want integer"),
        ("model.path=models/x", "at '/model/path': 'models/x' does not match"),
        ("attach=router", "attach: found router, allowed with one entry of workers, of vllm or sglang"),
        ("workerDefaults.engine=vllm", "model.path: found none, allowed the directory of vllm's model"),
        ("workerDefaults.nodes=2", "workers.worker.nodes: found 2, allowed more than 1 of trtllm"),
        ("workerDefaults.engine=vllm,model.path=/models/x", "workerDefaults.image: "),
        ("workerDefaults.engineFile=qwen3/agg.yaml", "workers.worker.engineFile: found qwen3/agg.yaml"),
        (
            "workerDefaults.engine=trtllm,model.path=/models/x,workerDefaults.engineFile=qwen3/agc.yaml",
            "workers.worker.engineFile: found qwen3/agc.yaml, allowed a file of configs/engines",
        ),
        ("models.download.repository=a/b", "models.download.revision: found none"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(values: str, refused: str) -> None:
    ran = helm("template", Release(values=values))
    assert ran.returncode != 0
    assert refused in ran.stderr


@pytest.mark.parametrize("release", [*VALUES, *MODELS, VARIANTS[2]], ids=str)
def test_a_cluster_needs_no_prometheus_operator(release: Release) -> None:
    assert not [each for each in rendered(release) if each["apiVersion"].startswith("monitoring.coreos.com")]


def of_ours(release: Release) -> Iterator[tuple[Manifest, click.Command, type[Any], list[str]]]:
    """Yield our containers, each with its command, the class of its settings and its arguments."""
    agent = worker_agent.__main__.main.commands
    for each in containers(release):
        args = [word for word in each.get("args", []) if not word.startswith("/etc/launch/")]
        if each["name"] == "router":
            yield each, router.__main__.main, RouterSettings, args
        elif each["name"] == "indexer":
            yield each, indexer.__main__.serve, IndexerSettings, args[1:]
        elif each["name"] in ("worker", "agent"):
            kind = AgentSettings if args[0] == "serve" else AttachSettings
            yield each, agent[args[0]].imported(), kind, args[1:]  # type: ignore[attr-defined]


@of_release
def test_every_flag_exists(release: Release) -> None:
    found = list(of_ours(release))
    assert {each["name"] for each, *_ in found} >= {"router"}
    for _, command, _, args in found:
        known = {flag for parameter in command.params for flag in parameter.opts}
        assert {word for word in args if word.startswith("--")} <= known


@of_release
def test_every_variable_and_file_is_of_settings(
    release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for container, _, kind, args in of_ours(release):
        with monkeypatch.context() as patched:
            for entry in container["env"]:
                if entry["name"] not in FOREIGN_VARIABLES:
                    assert entry["name"].startswith("KVROUTER_")
                    is_list = entry["name"].endswith("_KEYS")
                    value = "10.0.0.1" if entry.get("value", "$(POD_IP)") == "$(POD_IP)" else entry["value"]
                    patched.setenv(entry["name"], '["0123456789abcdef"]' if is_list else value)
            file = None
            if "--config" in args:
                file = tmp_path / Path(args[1]).name
                file.write_text(named(release, "ConfigMap")[f"kv-{container['name']}"]["data"][file.name])
            assignments = [word for flag, word in pairwise(args) if flag == "--set"]
            settings = load_settings(kind, file=file, assignments=assignments)
        assert bool(settings.nats.user) == ("nats.roles" in release.values)
        assert settings.nats.credentials.get_secret_value()
        if kind is RouterSettings:
            assert (settings.workers_from != "") == ("attach=router" in release.values)
            assert settings.picker.enabled == ("gateway.name" in release.values)


@of_release
def test_what_an_object_names_is_there(release: Release) -> None:
    maps, claims = named(release, "ConfigMap"), {"models"}
    for each in rendered(release):
        own = {one["metadata"]["name"] for one in each.get("spec", {}).get("volumeClaimTemplates", [])}
        for spec in pod_specs(each):
            volumes = {one["name"]: one for one in spec.get("volumes", [])}
            assert {one["configMap"]["name"] for one in volumes.values() if "configMap" in one} <= maps.keys()
            named_claims = [one["persistentVolumeClaim"] for one in volumes.values() if "persistentVolumeClaim" in one]
            assert {one["claimName"] for one in named_claims} <= claims
            for container in spec["containers"]:
                assert {one["name"] for one in container.get("volumeMounts", [])} <= volumes.keys() | own
                for file in re.findall(r"/etc/engine/([\w.-]+)", str(container.get("args"))):
                    assert file in maps[volumes["engine"]["configMap"]["name"]]["data"]
    services = {
        f"{name}:{port['port']}" for name, each in named(release, "Service").items() for port in each["spec"]["ports"]
    }
    addresses = set(re.findall(r"(?:nats|dns|http)://(kv-[\w-]+:\d+)", json.dumps(rendered(release))))
    assert addresses <= services
    assert addresses or "nats.url" in release.values


@of_release
def test_pods_are_selected_by_what_selects_them(release: Release) -> None:
    labels = [
        template["metadata"]["labels"]
        for each in rendered(release)
        for spec in [each.get("spec", {})]
        for template in (
            spec.get("template"),
            *map(spec.get("leaderWorkerTemplate", {}).get, ("leaderTemplate", "workerTemplate")),
        )
        if template is not None
    ]
    for each in rendered(release):
        if each["kind"] in ("Service", "PodDisruptionBudget", "PodMonitor"):
            selector = each["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= one.items() for one in labels), each["metadata"]["name"]


@of_release
def test_no_container_may_gain_privileges(release: Release) -> None:
    for container in containers(release):
        confined = container["securityContext"]
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["capabilities"] == {"drop": ["ALL"]}
        is_with_engine = container["name"] in ("engine", "worker", "node")
        assert is_with_engine or (confined["runAsNonRoot"] and confined["runAsUser"] > 0)


@of_release
def test_workers_that_exchange_kv_may_connect_to_each_other(release: Release) -> None:
    has_prefill = "prefill" in str([each["metadata"]["name"] for each in rendered(release)])
    assert has_prefill == ("kv-kv-transfer" in named(release, "NetworkPolicy"))


OPERATOR = VARIANTS[3]


def test_every_job_that_the_alerts_name_is_scraped() -> None:
    monitors = [each["spec"] for each in rendered(OPERATOR) if each["kind"] in ("ServiceMonitor", "PodMonitor")]
    endpoints = [one for spec in monitors for one in spec.get("endpoints", spec.get("podMetricsEndpoints"))]
    given = {rule["replacement"] for one in endpoints for rule in one["relabelings"] if rule["targetLabel"] == "job"}
    without = named(VARIANTS[2], "ConfigMap")["kv-prometheus"]["data"]
    scraped = {each["job_name"] for each in yaml.safe_load(without["kv-router.scrape.yaml"])["scrape_configs"]}
    alerted = set(re.findall(r'job="([^"]+)"', rules().decode()))
    assert alerted
    assert alerted <= given == scraped


def test_rules_and_dashboards_are_those_of_the_product() -> None:
    expected = yaml.safe_load(rules())
    assert named(OPERATOR, "PrometheusRule")["kv"]["spec"] == expected
    maps = named(VARIANTS[2], "ConfigMap")
    assert all(len(json.dumps(each)) < 1 << 20 for each in maps.values()), "what a ConfigMap may have"
    assert yaml.safe_load(maps["kv-prometheus"]["data"]["kv-router.rules.yaml"]) == expected
    shown = {name: text for each in maps.values() for name, text in each["data"].items() if name.endswith(".json")}
    committed = {each.name: each.read_text() for each in (ROOT / "dashboards" / "grafana").iterdir()}
    assert {name: json.loads(text) for name, text in shown.items()} == {
        name: json.loads(text) for name, text in committed.items()
    }


def test_autoscalers_go_by_a_metric_that_exists() -> None:
    scalers = [named(VARIANTS[2], "ScaledObject")["kv-worker"], named(OPERATOR, "HorizontalPodAutoscaler")["kv-worker"]]
    for each in scalers:
        assert set(re.findall(r"\bkvrouter_[a-z_]+", json.dumps(each))) == {"kvrouter_planner_advised_workers"}
        assert each["spec"]["scaleTargetRef"]["name"] == "kv-worker"
    assert COMMANDS["router"]["kvrouter_planner_advised_workers"].labels == ("model", "role")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_kustomize_makes_of_the_chart_what_helm_makes(engine: str) -> None:
    flags = ["--enable-helm", "--load-restrictor", "LoadRestrictionsNone", "--helm-command", str(HELM)]
    command = [str(KUBECTL), "kustomize", *flags, str(SWEEP.parent / engine)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr
    ours = rendered(Release((engine,)))
    theirs = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(ran.stdout)}
    assert theirs == {(each["kind"], each["metadata"]["name"]): each for each in ours}


def launched(index: int, directory: Path) -> list[str]:
    """Return the programs that a pod of a group of three starts, each with its arguments."""
    log = directory / "calls"
    for name in ("getent", "ssh", "ssh-keygen", "mpirun"):
        program = directory / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n')
        program.chmod(0o755)
    script = (CHART / "launch.sh").read_text().replace("/usr/sbin/sshd", "ssh")
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


def test_aiperf_runs_against_the_service_that_is_there_and_writes_to_the_sweeps_claim() -> None:
    (job,) = yaml.safe_load_all((SWEEP.parent / "aiperf.yaml").read_text())
    check(job)
    ((container,),) = [spec["containers"] for spec in pod_specs(job)]
    assert "--url http://kv-router:8000 " in container["args"][0]
    claims = [each["persistentVolumeClaim"]["claimName"] for spec in pod_specs(job) for each in spec["volumes"]]
    assert claims == [next(yaml.safe_load_all(SWEEP.read_text()))["metadata"]["name"]]


def test_a_sweep_is_called_as_it_is_typed_against_a_service_that_is_there() -> None:
    objects = list(yaml.safe_load_all(SWEEP.read_text()))
    for each in objects:
        check(each)
    (container,) = [one for each in objects for spec in pod_specs(each) for one in spec["containers"]]
    (bench, name), flags = container["args"][:2], container["args"][2:]
    assert (bench, name) == ("bench", sweep.name)
    given = sweep.make_context("sweep", flags).params
    assert given["url"] == "http://kv-router:8000"
    assert 8000 in [port["port"] for port in named(VALUES[1], "Service")["kv-router"]["spec"]["ports"]]
    assert str(given["out"]) in {each["mountPath"] for each in container["volumeMounts"]}
    assert given["model"] in str(containers(VALUES[1]))
