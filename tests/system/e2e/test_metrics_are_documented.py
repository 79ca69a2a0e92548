"""A real router and a real worker show the metrics that `docs/reference/metrics.md` lists for them, and no other."""

import pytest

from tests.support.metric_families import COMMANDS, shown_families
from tests.system.e2e.client import Client

OF_ENCODE_WORKERS = ("kvrouter_encode_", "kvrouter_embedding_")


async def families(client: Client, url: str) -> set[str]:
    async with client.session.get(f"{url}/metrics") as response:
        return shown_families(await response.text())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_shows_what_is_listed(client: Client) -> None:
    assert await families(client, client.control_url) == COMMANDS["router"].keys()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_shows_what_is_listed_but_for_encode_workers(client: Client) -> None:
    listed = {name for name in COMMANDS["worker-agent serve"] if not name.startswith(OF_ENCODE_WORKERS)}
    assert await families(client, await client.base_url("w0")) == listed
