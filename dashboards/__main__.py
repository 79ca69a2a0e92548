"""`python -m dashboards` makes the dashboards' JSON from `boards.yaml`.

`router dashboards --write DIR` writes what is committed, for Grafana and Prometheus elsewhere.
"""

from pathlib import Path

from dashboards.boards import CONTENT, rendered
from dashboards.command import GRAFANA

for name, board in CONTENT.boards.items():
    (Path(__file__).parent / GRAFANA / f"{name}.json").write_bytes(rendered(board))
