"""A real router and a real worker show the metrics that `docs/reference/metrics.md` lists for them, and no other."""

import pytest

from kv_runtime.http.server import CONTROL_CONNECTIONS_MAX
from tests.support.metric_families import COMMANDS, shown_families
from tests.system.e2e.client import Client

OF_ENCODE_WORKERS = ("kvrouter_encode_", "kvrouter_embedding_")


async def metrics(client: Client, url: str) -> str:
    async with client.session.get(f"{url}/metrics") as response:
        return await response.text()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_shows_what_is_listed_and_that_its_control_plane_has_a_bound_of_its_own(client: Client) -> None:
    shown = await metrics(client, client.control_url)
    assert shown_families(shown) == COMMANDS["router"].keys()
    assert f"kvrouter_server_connections_max {CONTROL_CONNECTIONS_MAX}.0" in shown.splitlines()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_shows_what_is_listed_but_for_encode_workers(client: Client) -> None:
    listed = {name for name in COMMANDS["worker-agent serve"] if not name.startswith(OF_ENCODE_WORKERS)}
    assert shown_families(await metrics(client, await client.base_url("w0"))) == listed
