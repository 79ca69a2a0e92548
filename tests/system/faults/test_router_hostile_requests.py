"""No request ends the router: what is written of a request later may not be more than can be written."""

from typing import Any

from tests.system.faults.fleet import SHAPE, fleet
from tests.system.faults.traffic import MODEL

_HUGE = 10**400
EXTREMES: tuple[dict[str, Any], ...] = (
    {"priority": 1e308},
    {"priority": -1e308},
    {"nvext": {"agent_hints": {"priority": (1 << 63) - 1, "strict_priority": 0xFFFF_FFFF, "osl": 1 << 24}}},
    {"nvext": {"agent_hints": {"priority": -(1 << 63)}}},
    {"nvext": {"backend_instance_id": _HUGE}},
    {"nvext": {"decode_worker_id": "w" * 100_000}},
    {"nvext": {"router": {"ttft_target": 3.6e6, "itl_target": 0}}},
    {"nvext": {"token_data": [0xFFFF_FFFF] * 40}},
    {"cache_salt": "\0" * 100_000},
    {"max_tokens": 1 << 24},
)


async def test_whatever_a_request_says_the_router_serves_the_next_one_and_its_journal_has_it() -> None:
    ordinary = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    async with fleet(SHAPE._replace(workers=1)) as running:
        url = f"{running.data_url}/v1/completions"
        for extreme in EXTREMES:
            async with running.session.post(url, json=ordinary | extreme) as response:
                assert response.status in {200, 400, 503}, (extreme, await response.text())
            async with running.session.post(url, json=ordinary) as response:
                assert response.status == 200, (extreme, await response.text())
        async with running.session.post(url, json=ordinary, headers={"x-required-taints": "t" * 30_000}) as response:
            assert response.status == 400
        assert (await running.scrape("router")).total("journal_lost_records_total") == 0
