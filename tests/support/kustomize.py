"""Builds a kustomization as `kubectl kustomize` does, as far as ours use it."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "components", "configMapGenerator", "generatorOptions", "patches"}
HASH = "-hash"
"""Stands for the hash of its content that a generated ConfigMap's name ends with."""
_BUILT_IN = ("v1", "apps/v1", "batch/v1")
"""Versions of the kinds in which kustomize follows the name of a ConfigMap; it knows no other kinds' fields."""


class NotBuilt(Exception):
    """The kustomization names what is not there, or says what is not known here."""


def built(folder: Path) -> list[Manifest]:
    """Return the objects of a folder's kustomization; raise `NotBuilt`."""
    text = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := text.keys() - KNOWN:
        raise NotBuilt(f"{folder.name}: {sorted(unknown)}")
    return _named(_applied(folder, text, []))


def _applied(folder: Path, text: Manifest, objects: list[Manifest]) -> list[Manifest]:
    for name in text.get("resources", []):
        path = folder / name
        objects = [*objects, *(built(path) if path.is_dir() else yaml.safe_load_all(path.read_text()))]
    common = text.get("generatorOptions", {})
    objects = [*objects, *(_config_map(folder, each, common) for each in text.get("configMapGenerator", []))]
    for name in text.get("components", []):
        component = folder / name
        objects = _applied(component, yaml.safe_load((component / "kustomization.yaml").read_text()), objects)
    for patch in text.get("patches", []):
        objects = _patched(patch, objects)
    return objects


def with_component(folder: Path, component: Path) -> list[Manifest]:
    """Return the objects of the overlay in `folder`, where it would name the component too."""
    return _named(_applied(component, yaml.safe_load((component / "kustomization.yaml").read_text()), built(folder)))


def _named(objects: list[Manifest]) -> list[Manifest]:
    """Return the objects; volumes of built-in kinds name generated ConfigMaps with their hash."""
    objects = copy.deepcopy(objects)
    hashed = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    for spec in [spec for each in objects if each["apiVersion"] in _BUILT_IN for spec in pod_specs(each)]:
        for volume in spec.get("volumes", []):
            config_map = volume.get("configMap", {})
            if (name := f"{config_map.get('name')}{HASH}") in hashed:
                config_map["name"] = name
    return objects


def _config_map(folder: Path, generator: Manifest, common: Manifest) -> Manifest:
    data = {}
    for entry in generator["files"]:
        name, _, path = entry.rpartition("=")
        data[name or Path(path).name] = (folder / path).read_text()
    options = common | generator.get("options", {})
    metadata: Manifest = {"name": generator["name"] + ("" if options.get("disableNameSuffixHash") else HASH)}
    if labels := options.get("labels"):
        metadata["labels"] = labels
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _patched(patch: Manifest, objects: list[Manifest]) -> list[Manifest]:
    target = patch["target"]
    found = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])]
    if len(found) != 1:
        raise NotBuilt(f"a patch of {target['kind']} {target['name']}: there are {len(found)}")
    changed = copy.deepcopy(found[0])
    for step in yaml.safe_load(patch["patch"]):
        _add(changed, step)
    return [changed if each is found[0] else each for each in objects]


def _add(manifest: Manifest, step: Manifest) -> None:
    """Apply a step of a JSON patch (RFC 6902, 4.1)."""
    if step["op"] != "add":
        raise NotBuilt(f"op {step['op']}")
    *parents, last = step["path"].strip("/").split("/")
    at: Any = manifest
    for key in parents:
        try:
            at = at[int(key) if isinstance(at, list) else key]
        except (KeyError, IndexError) as error:
            raise NotBuilt(f"path {step['path']}: {key} is not there") from error
    if isinstance(at, list):
        at.insert(len(at) if last == "-" else int(last), step["value"])
    else:
        at[last] = step["value"]


def pod_specs(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the specifications of an object's pods."""
    spec = manifest.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
        if template is not None:
            yield template["spec"]
