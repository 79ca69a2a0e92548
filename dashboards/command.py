"""`router dashboards`: writes the files that Grafana and Prometheus load, as committed."""

from pathlib import Path

import click

GRAFANA = "grafana"
RULES = "prometheus/kv-router.rules.yaml"
_HERE = Path(__file__).parent


@click.command()
@click.option("--write", "directory", required=True, type=click.Path(file_okay=False, path_type=Path))
def dashboards(directory: Path) -> None:
    """Write the Grafana dashboards and their provisioning into a directory.

    The Prometheus rules are written there, too.
    """
    for folder in (GRAFANA, "provisioning", "prometheus"):
        for source in sorted(path for path in _HERE.joinpath(folder).rglob("*") if path.is_file()):
            target = directory / source.relative_to(_HERE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            click.echo(target)


def rules() -> bytes:
    """Return the rules, as Prometheus loads them."""
    return _HERE.joinpath(RULES).read_bytes()
