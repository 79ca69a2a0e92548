"""`python -m dashboards` builds the dashboards' JSON and the rules' YAML; `--check` tests whether they are so.

`router dashboards --write DIR` writes what is committed, for Grafana and Prometheus elsewhere; that needs no builder.
"""

import sys
from pathlib import Path

import click

from dashboards import rules
from dashboards.alerts import GROUPS
from dashboards.boards import ANNOTATIONS, BOARDS, VARIABLES
from dashboards.files import GRAFANA, RULES

HERE = Path(__file__).parent


def built() -> dict[str, bytes]:
    """Return every dashboard's JSON and the rules' YAML, by path."""
    from dashboards.render import rendered

    boards = {f"{GRAFANA}/{name}.json": rendered(board, VARIABLES, ANNOTATIONS) for name, board in BOARDS.items()}
    return boards | {RULES: rules.rendered(GROUPS)}


@click.command()
@click.option("--check", is_flag=True, help="write nothing; exit with 1 where a file is not as it would be written")
def main(check: bool) -> None:
    """Build the dashboards' JSON and the rules' YAML."""
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
