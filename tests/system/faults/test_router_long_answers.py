"""An answer that comes whole is as long in coming as it is long: its worker is well, and so is the fleet."""

from bench.processes import FleetShape
from tests.system.e2e.client import MODEL, fleet_of

WORKERS = 2
SHAPE = FleetShape(
    workers=WORKERS,
    worker_settings=("engine.speed=0.2", "telemetry.log_level=error"),
    router_settings=("failures.first_byte_s=1", "failures.between_bytes_s=1", "telemetry.log_level=error"),
)


async def test_a_whole_answer_may_take_longer_than_the_first_byte_of_a_stream() -> None:
    async with fleet_of(SHAPE) as (_, client):
        answered = await client.post("/v1/completions", {"model": MODEL, "prompt": "a story", "max_tokens": 80})
        shown = await client.scrape()
        assert (answered.status, shown.total("retries_total")) == (200, 0), answered.body
        assert shown.total("rank_fit") == WORKERS
