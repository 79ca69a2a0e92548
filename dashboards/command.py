"""`router dashboards`: writes the Grafana dashboards and the Prometheus rules."""

from pathlib import Path

import click

from dashboards.files import write


@click.command()
@click.option("--write", "directory", required=True, type=click.Path(file_okay=False, path_type=Path))
def dashboards(directory: Path) -> None:
    """Write the Grafana dashboards and their provisioning into a directory.

    The Prometheus rules are written there, too.
    """
    for path in write(directory):
        click.echo(path)
