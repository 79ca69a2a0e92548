"""The last 15 minutes: what was added in each step, no more steps than are kept, and the rows of several processes."""

from router.attribution.contents import Figures
from router.live.trends import STEP_S, STEPS, Gauges, Trends, merged_trends
from tests.support.manual_clock import ManualClock


class Router:
    """What trends read of a router."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.arrived, self.saved, self.gauges = (0, [0, 0]), Figures(), Gauges(0, None)
        self.trends = Trends(self.clock, lambda: self.arrived, lambda: self.saved, lambda: self.gauges, (1.0,))

    async def step(self) -> None:
        """Let a step end."""
        await self.clock.advance(STEP_S)
        self.trends.step()


async def test_a_row_has_what_was_added_in_its_step() -> None:
    router = Router()
    router.arrived, router.saved = (3, [2, 1]), Figures(prompt_tokens=100, reused_tokens=60, saved_s=0.5)
    await router.step()
    router.arrived, router.gauges = (4, [2, 2]), Gauges(7, 0.25)
    await router.step()
    first, second = router.trends.shown().rows
    assert (first.requests, first.first_tokens, first.reused_tokens, first.saved_s) == (3, [2, 1], 60, 0.5)
    assert (second.requests, second.first_tokens, second.reused_tokens) == (1, [0, 1], 0)
    assert (second.in_flight, second.event_lag_s, second.at_s - first.at_s) == (7, 0.25, STEP_S)


async def test_the_rows_of_15_minutes_are_kept() -> None:
    router = Router()
    for _ in range(STEPS + 5):
        await router.step()
    assert len(router.trends.shown().rows) == STEPS


async def test_rows_of_processes_are_summed_by_their_times_and_gauges_are_the_largest() -> None:
    one, other = Router(), Router()
    one.arrived, one.gauges = (3, [2, 1]), Gauges(4, None)
    other.arrived, other.gauges = (2, [0, 2]), Gauges(5, 0.5)
    await one.step()
    await other.step()
    await other.step()
    both, alone = merged_trends([one.trends.shown(), other.trends.shown()]).rows
    assert (both.requests, both.first_tokens, both.in_flight, both.event_lag_s) == (5, [2, 3], 5, 0.5)
    assert (alone.requests, alone.at_s - both.at_s) == (0, STEP_S)
