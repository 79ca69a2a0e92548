"""The dashboards and rules as Kubernetes objects, for the sidecar of Grafana's Helm chart and the Prometheus operator.

A ConfigMap for each dashboard, because one may have 1 MiB: the sidecar loads those with the label `grafana_dashboard`,
into the folder that the annotation `grafana_folder` names (`sidecar.dashboards.folderAnnotation` of the chart).
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from dashboards.files import GRAFANA, rules

LABEL = ("grafana_dashboard", "1")
FOLDER = ("grafana_folder", "KV router")


def manifests() -> dict[str, bytes]:
    """Return the objects by the names of their files; JSON, which is YAML, too."""
    boards = sorted(files("dashboards").joinpath(GRAFANA).iterdir(), key=lambda each: each.name)
    objects = {f"dashboard-{each.name.removesuffix('.json')}": _board(each.name, each.read_text()) for each in boards}
    objects["rules"] = _rules()
    return {f"{name}.json": json.dumps(each, indent=1).encode() + b"\n" for name, each in objects.items()}


def write_manifests(directory: Path) -> list[Path]:
    """The objects lie in `directory`, over what was there; return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    written = {directory / name: content for name, content in manifests().items()}
    for path, content in written.items():
        path.write_bytes(content)
    return list(written)


def _board(file: str, content: str) -> dict[str, Any]:
    named = {
        "name": f"kv-router-dashboard-{file.removesuffix('.json')}",
        "labels": dict([LABEL]),
        "annotations": dict([FOLDER]),
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": {file: content}}


def _rules() -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kv-router"},
        "spec": yaml.safe_load(rules()),
    }
