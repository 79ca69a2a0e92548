"""The files that Grafana and Prometheus load, as committed: they can be written without their builder."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

GRAFANA, PROVISIONING, PROMETHEUS = "grafana", "provisioning", "prometheus"
RULES = f"{PROMETHEUS}/kv-router.rules.yaml"


def write(directory: Path) -> list[Path]:
    """The dashboards, their provisioning and the rules lie in `directory`, over what was there; return the files."""
    root = files("dashboards")
    return [
        path
        for folder in (GRAFANA, PROVISIONING, PROMETHEUS)
        for path in _copied(root.joinpath(folder), directory / folder)
    ]


def rules() -> bytes:
    """Return the rules, as Prometheus loads them."""
    return files("dashboards").joinpath(RULES).read_bytes()


def _copied(source: Traversable, target: Path) -> list[Path]:
    if source.is_dir():
        inner = sorted(source.iterdir(), key=lambda each: each.name)
        return [path for each in inner for path in _copied(each, target / each.name)]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    return [target]
