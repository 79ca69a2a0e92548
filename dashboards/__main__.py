"""`python -m dashboards` builds the dashboards' JSON; `--check` tests whether it is so.

`router dashboards --write DIR` writes what is committed, for Grafana and Prometheus elsewhere; that needs no builder.
"""

import sys
from pathlib import Path

import click

from dashboards.boards import CONTENT
from dashboards.command import GRAFANA

HERE = Path(__file__).parent


def built() -> dict[str, bytes]:
    """Return every dashboard's JSON, by path."""
    from dashboards.render import rendered

    return {f"{GRAFANA}/{name}.json": rendered(board) for name, board in CONTENT.boards.items()}


@click.command()
@click.option("--check", is_flag=True, help="write nothing; exit with 1 where a file is not as it would be written")
def main(check: bool) -> None:
    """Build the dashboards' JSON."""
    differing = {
        HERE / name: content
        for name, content in built().items()
        if not (HERE / name).exists() or (HERE / name).read_bytes() != content
    }
    if check and differing:
        sys.exit(f"not as built: {', '.join(map(str, differing))}; run python -m dashboards")
    for path, content in differing.items():
        path.write_bytes(content)
        print(path)


if __name__ == "__main__":
    main()
