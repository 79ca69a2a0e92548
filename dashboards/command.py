"""`router dashboards`: writes the Grafana dashboards and the Prometheus rules, as files or as Kubernetes objects."""

from pathlib import Path

import click

from dashboards.files import write
from dashboards.kubernetes import write_manifests


@click.command()
@click.option("--write", "directory", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--kubernetes", is_flag=True, help="ConfigMaps for Grafana's sidecar and a PrometheusRule instead")
def dashboards(*, directory: Path, kubernetes: bool) -> None:
    """Write the Grafana dashboards and their provisioning into a directory.

    The Prometheus rules are written there, too.
    """
    for path in write_manifests(directory) if kubernetes else write(directory):
        click.echo(path)
