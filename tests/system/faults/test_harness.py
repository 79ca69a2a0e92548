"""The harness sees what it is there to see: readers that stand still."""

from pathlib import Path

import pytest

from tests.system.faults.fleet import READY_S, fleet_on_one_server


async def test_an_index_that_stands_still_is_not_taken_for_right(tmp_path: Path) -> None:
    async with fleet_on_one_server(tmp_path) as (_, running):
        async with running.traffic() as sent:
            await running.until_equal(READY_S)
            running.processes["index"].freeze()
            with pytest.raises(AssertionError, match="not equal within"):
                await running.until_equal(2.0, only=["index"])
            await running.until_equal(READY_S, only=["router"])
            running.processes["index"].thaw()
            await sent.more(80)
            await running.until_equal(READY_S)
        assert sent.failed == []
        workers = [await running.scrape(worker_id) for worker_id in running.worker_ids]
        removed = [each.total("mirror_blocks_changed_total", kind="removed") for each in workers]
        assert min(removed) > 0, "caches are small enough to forget"
