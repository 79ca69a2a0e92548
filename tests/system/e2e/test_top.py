"""`router top` as it is typed, on a real router with simulated workers."""

import pytest

from bench.processes import FleetProcesses, free_ports
from tests.system.e2e.client import Client
from tests.system.e2e.typed import typed


async def top(*arguments: str) -> tuple[int | None, str]:
    ended = await typed("-m", "router", "top", "--interval", "0.2", *arguments)
    return ended.code, ended.out + ended.err


@pytest.mark.asyncio(loop_scope="module")
async def test_the_fleet_and_its_last_decisions_are_printed(fleet: FleetProcesses, client: Client) -> None:
    answered = await client.complete([7] * 100, x_request_id="r-top")
    code, out = await top("--router", fleet.control_url)
    assert (code, "\x1b" in out) == (0, False)
    assert [line.split()[0] for line in out.splitlines() if line.startswith("w")] == ["w0", "w1"]
    (last,) = [line for line in out.splitlines() if line.endswith(" ok")]
    assert f" {answered.worker}/0 " in last


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_that_is_away_is_named() -> None:
    (port,) = free_ports(1)
    code, out = await top("--router", f"http://127.0.0.1:{port}")
    assert code == 2
    assert f"at http://127.0.0.1:{port}, allowed the control plane" in out
