"""The timeout sweeper: it checks every entry, and without entries it checks nothing."""

import asyncio

from router.http.timeout_sweeper import SLOTS, TimeoutSweeper


class Looked:
    """Says that time passed for it."""

    due_s = 0.0

    def __init__(self) -> None:
        self.at = asyncio.Event()

    def check_timeouts(self, now_s: float) -> None:
        """Time passed."""
        assert now_s > 0
        self.at.set()


async def added(sweep: TimeoutSweeper) -> None:
    """Return once time has passed for one more, which is then watched no more."""
    looked = Looked()
    slot = sweep.add(looked)
    await looked.at.wait()
    slot.discard(looked)


async def test_time_passes_for_every_entry_whichever_slot_it_is_in() -> None:
    sweep = TimeoutSweeper(0.001)
    sweep.start()
    entries = [Looked() for _ in range(2 * SLOTS)]
    for each in entries:
        sweep.add(each)
    await asyncio.gather(*(each.at.wait() for each in entries))
    assert len(sweep) == 2 * SLOTS
    sweep.stop()


async def test_without_connections_nothing_is_checked_until_one_comes() -> None:
    sweep = TimeoutSweeper(0.001)
    sweep.start()
    await added(sweep)
    while sweep._timer is not None:  # noqa: ASYNC110, SLF001 - a timer has no event
        await asyncio.sleep(0)
    await added(sweep)
    sweep.stop()
    assert sweep._timer is None  # noqa: SLF001


async def test_a_connection_from_before_the_start_is_checked_too() -> None:
    sweep, looked = TimeoutSweeper(0.001), Looked()
    sweep.add(looked)
    sweep.start()
    await looked.at.wait()
    sweep.stop()
