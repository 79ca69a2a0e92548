"""`router doctor` as typed: on a fleet that is well, on half of one, on a router without workers, and on nothing."""

import asyncio

import pytest

from bench.processes import FleetProcesses
from tests.support.forked import Ended
from tests.support.processes import running_router
from tests.system.e2e.client import Client
from tests.system.e2e.typed import typed

pytestmark = pytest.mark.slow

TOKEN = "a-secret-of-the-control-plane"
UNREACHABLE_URL = "http://127.0.0.1:1"


def by_id(doctor: Ended) -> dict[str, list[str]]:
    """Return what each kind of finding is about."""
    found: dict[str, list[str]] = {}
    for each in doctor.json["findings"]:
        found.setdefault(each["id"], []).append(each["of"])
    return found


async def doctor(*arguments: str) -> Ended:
    return await typed("-m", "router", "doctor", *arguments)


def at(fleet: FleetProcesses) -> tuple[str, ...]:
    return "--nats-url", fleet.nats_url, "--router", fleet.control_url, "--data", fleet.data_url


@pytest.mark.asyncio(loop_scope="module")
async def test_in_a_fleet_that_is_well_nothing_is_found(fleet: FleetProcesses, client: Client) -> None:
    await client.complete(list(range(200)))
    words, told_ = await asyncio.gather(doctor(*at(fleet)), doctor(*at(fleet), "--json"))
    assert (words.code, told_.code) == (0, 0), words.out + words.err + told_.out
    assert by_id(told_) == {}
    assert told_.json["looked_at"] == {"workers": 2, "ranks": 2, "routers": 1}
    assert told_.json["exit_code"] == 0
    assert words.out.startswith("0 errors, 0 warnings; looked at 2 workers, 2 ranks, 1 router, for ")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_reached_is_an_error_while_the_other_half_answers(fleet: FleetProcesses) -> None:
    without_router, without_log = await asyncio.gather(
        doctor("--nats-url", fleet.nats_url, "--router", UNREACHABLE_URL, "--json"),
        doctor("--nats-url", "nats://127.0.0.1:1", "--router", fleet.control_url, "--json"),
    )
    assert (without_router.code, by_id(without_router)["router.not_ready"]) == (2, [UNREACHABLE_URL])
    assert (without_log.code, [*by_id(without_log)]) == (2, ["log.unreachable"])
    assert without_log.json["looked_at"]["workers"] == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_where_nothing_can_be_seen_it_says_so_and_why(fleet: FleetProcesses) -> None:
    nothing, no_time, no_url, with_user, no_token = await asyncio.gather(
        doctor("--nats-url", "nats://127.0.0.1:1", "--router", UNREACHABLE_URL),
        doctor("--listen", "0"),
        doctor("--router", "127.0.0.1:8001"),
        doctor("--data", "http://me:secret@127.0.0.1:8000"),
        doctor(*at(fleet), "--token", "two\nlines"),
    )
    assert [each.code for each in (nothing, no_time, no_url, with_user, no_token)] == [3] * 5
    assert "nats.url nats://127.0.0.1:1" in nothing.err
    assert f"--router {UNREACHABLE_URL}: " in nothing.err
    assert "'--listen': 0.0 is not in the range 1.5<=x<=600." in no_time.err
    assert "--router: found '127.0.0.1:8001', allowed http(s)://host:port" in no_url.err
    assert "--data: found an address with a user, allowed http(s)://host:port" in with_user.err
    assert "secret" not in with_user.err
    assert "control.token: allowed text without control characters" in no_token.err
    assert "lines" not in no_token.err


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_without_workers_is_seen_with_its_token_only() -> None:
    settings = ("nats.port=0", f"control.token={TOKEN}", "journal.enabled=false")
    async with running_router(*(word for each in settings for word in ("--set", each))) as router:
        control_url = router.control_url
        where = ("--nats-url", router.nats_url, "--router", control_url)
        none, wrong, right = await asyncio.gather(
            doctor(*where), doctor(*where, "--token", "another"), doctor(*where, "--token", TOKEN, "--json")
        )
    allowed = f"router: --token: found none or another at {control_url}, allowed its control.token\n"
    assert [(each.code, each.out, each.err) for each in (none, wrong)] == [(3, "", allowed)] * 2
    assert (right.code, sorted(by_id(right))) == (2, ["fleet.empty", "router.not_ready"])
    assert TOKEN not in right.out + right.err
