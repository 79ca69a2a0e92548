"""The queue between a thread and the event loop: all entries, in order, and no more waiting than allowed."""

import asyncio
import threading
from typing import TypeVar

from worker_agent.events.source_poller import Handover

WAIT_S = 20.0
T = TypeVar("T")


def putting(waiting: Handover[T], *entries: T, weight: int) -> threading.Thread:
    """Return a thread that puts the entries."""

    def put() -> None:
        for entry in entries:
            waiting.put(entry, weight)

    thread = threading.Thread(target=put)
    thread.start()
    return thread


async def test_all_entries_come_in_their_order() -> None:
    waiting: Handover[int] = Handover(weight_max=10)
    thread = putting(waiting, *range(10_000), weight=3)
    async with asyncio.timeout(WAIT_S):
        assert [await waiting.next() for _ in range(10_000)] == list(range(10_000))
    thread.join()


async def test_the_thread_waits_while_the_bound_is_reached_and_an_entry_of_any_weight_passes() -> None:
    waiting: Handover[str] = Handover(weight_max=10)
    waiting.put("small", 9)
    waiting.put("large", 1000)
    thread = putting(waiting, "third", weight=1)
    assert await waiting.next() == "small"
    assert thread.is_alive()  # the large one waits, too heavy for more
    assert await waiting.next() == "large"
    async with asyncio.timeout(WAIT_S):
        assert await waiting.next() == "third"
    thread.join()


async def test_once_closed_a_waiting_thread_goes_on_and_entries_are_dropped() -> None:
    waiting: Handover[int] = Handover(weight_max=1)
    waiting.put(0, 1)
    thread = putting(waiting, 1, 2, 3, weight=1)
    waiting.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
