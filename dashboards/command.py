"""`router dashboards`: writes the files that Grafana and Prometheus load, as committed; that needs no builder."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import click

GRAFANA, PROVISIONING, PROMETHEUS = "grafana", "provisioning", "prometheus"
RULES = f"{PROMETHEUS}/kv-router.rules.yaml"


@click.command()
@click.option("--write", "directory", required=True, type=click.Path(file_okay=False, path_type=Path))
def dashboards(directory: Path) -> None:
    """Write the Grafana dashboards and their provisioning into a directory.

    The Prometheus rules are written there, too.
    """
    for folder in (GRAFANA, PROVISIONING, PROMETHEUS):
        _copy(files("dashboards").joinpath(folder), directory / folder)


def rules() -> bytes:
    """Return the rules, as Prometheus loads them."""
    return files("dashboards").joinpath(RULES).read_bytes()


def _copy(source: Traversable, target: Path) -> None:
    """Copy a file or a folder over what is there; print the path of each file."""
    if source.is_dir():
        for each in sorted(source.iterdir(), key=lambda each: each.name):
            _copy(each, target / each.name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    click.echo(target)
