"""An answer that comes whole is as long in coming as it is long: its worker is well, and so is the fleet."""

from pathlib import Path

from tests.system.faults.small_fleet import running

WORKERS = 2
_IMPATIENT = ("failures.first_byte_s=1", "failures.between_bytes_s=1")
_SLOW = ("engine.speed=0.2",)


async def test_a_whole_answer_may_take_longer_than_the_first_byte_of_a_stream(tmp_path: Path) -> None:
    async with running(tmp_path, WORKERS, _IMPATIENT, _SLOW) as fleet:
        status, body = await fleet.answer("a story", max_tokens=80)
        assert (status, await fleet.total("retries_total")) == (200, 0), body
        assert await fleet.total("rank_fit") == WORKERS
