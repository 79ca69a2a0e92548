"""`python -m dashboards` builds the dashboards' JSON; `--check` tests whether it is as committed.

`router dashboards --write DIR` writes what is committed, for a Grafana elsewhere; that needs no builder.
"""

import sys
from pathlib import Path

import click

from dashboards.boards import ANNOTATIONS, BOARDS, VARIABLES
from dashboards.files import GRAFANA

HERE = Path(__file__).parent / GRAFANA


def built() -> dict[str, bytes]:
    """Return the JSON of every dashboard by the name of its file."""
    from dashboards.render import rendered

    return {f"{name}.json": rendered(board, VARIABLES, ANNOTATIONS) for name, board in BOARDS.items()}


@click.command()
@click.option("--check", is_flag=True, help="write nothing; exit with 1 where a file is not as it would be written")
def main(check: bool) -> None:
    """Build the dashboards' JSON."""
    differing = [
        name for name, content in built().items() if not (HERE / name).exists() or (HERE / name).read_bytes() != content
    ]
    if check and differing:
        sys.exit(f"not as built: {', '.join(differing)}; run python -m dashboards")
    for name in differing:
        (HERE / name).write_bytes(built()[name])
        print(f"{HERE / name}")


if __name__ == "__main__":
    main()
