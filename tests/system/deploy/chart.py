"""`charts/kv-router` as helm renders it."""

import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.paths import ROOT

HELM = ROOT / "build" / "deploy" / "helm" / "helm"
CHART = ROOT / "charts" / "kv-router"
needs_helm = pytest.mark.skipif(not HELM.exists(), reason="helm is not installed: make deploy-tools")
Manifest = dict[str, Any]


class Release(NamedTuple):
    """What is installed: files of values, and values on the command line."""

    files: tuple[str, ...] = ()
    values: str = ""

    def __str__(self) -> str:
        return f"{' '.join(self.files) or 'values'}{self.values and ' ' + self.values[:40]}"


def helm(verb: str, release: Release) -> subprocess.CompletedProcess[str]:
    files = [word for file in release.files for word in ("-f", f"{CHART}/values-{file}.yaml")]
    values = ["--set", release.values] if release.values else []
    name = ["kv"] if verb == "template" else []
    command = [str(HELM), verb, *name, str(CHART), *files, *values]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@cache
def rendered(release: Release) -> list[Manifest]:
    ran = helm("template", release)
    assert ran.returncode == 0, ran.stderr
    return [each for each in yaml.safe_load_all(ran.stdout) if each is not None]


def pod_specs(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the specifications of an object's pods."""
    spec = manifest.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
        if template is not None:
            yield template["spec"]


def containers(release: Release) -> list[Manifest]:
    return [one for each in rendered(release) for spec in pod_specs(each) for one in spec["containers"]]


def named(release: Release, kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in rendered(release) if each["kind"] == kind}
