"""Every metric that a process shows stands in `docs/OPERATIONS.md`, and every one that stands there is shown."""

import re
from pathlib import Path

import pytest

from tests.e2e.client import Client

OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"


async def families(client: Client, url: str) -> set[str]:
    async with client.session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line.split() for line in lines if line.startswith("# TYPE kvrouter_")]
    return {name if kind != "counter" or name.endswith("_total") else f"{name}_total" for _, _, name, kind in found}


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_shown_is_documented_and_the_reverse(client: Client) -> None:
    shown = await families(client, client.control_url) | await families(client, await client.base_url("w0"))
    documented = set(re.findall(r"kvrouter_[a-z_]+", OPERATIONS.read_text()))
    assert shown - documented == set()
    assert documented - shown == set()
