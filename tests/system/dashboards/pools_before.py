"""`router pools` before the router of a fleet: one pool, to which every request goes."""

import json
from pathlib import Path
from typing import Any

from tests.system.faults.children import Children
from tests.system.faults.fleet import Fleet
from tests.system.faults.traffic import MODEL

NAMESPACE = "only"
CONFIG: dict[str, Any] = {
    "mode": "agg",
    "num_agg_pools": 1,
    "agg_pool_dynamo_namespaces": [NAMESPACE],
    "agg_pool_selection_strategy": {
        "ttft_min_ms": 0, "ttft_max_ms": 1000, "ttft_resolution": 1,
        "itl_min_ms": 0, "itl_max_ms": 100, "itl_resolution": 1,
        "agg_pool_mapping": [[0]],
    },
    "pools": {"look_period_s": 0.2, "ttft_bound_ms": 60_000, "itl_bound_ms": 60_000, "window_requests_min": 1},
}  # fmt: skip


async def start_pools(children: Children, running: Fleet, directory: Path) -> tuple[str, str]:
    """Return the addresses of its data plane and of its control plane."""
    file = directory / "pools.json"
    file.write_text(json.dumps(CONFIG))
    pool = f"--pool={NAMESPACE}={running.data_url},{running.urls['router']}"
    command = ("pools", "--config", str(file), "--model-name", MODEL, "--port", "0", "--control-port", "0", pool)
    child = await children.start_ours("pools", "router", *command, ready="control plane")
    data, control = [(await child.line_with(words)).split()[2] for words in ("pools on", "control plane")]
    return data, control
