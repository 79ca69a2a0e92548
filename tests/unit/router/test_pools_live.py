"""What is known of pools: which are passed over, since when and until when; in which order the others are asked."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.doctor.pages import PageUnreadable, not_ready
from router.pools.config import Axis, LiveLimits, PoolGroup, PoolSettings, RouterAddress
from router.pools.selection import SelectionInput, Targets, plan, preference, select
from router.pools.state import Attained, PoolState, PoolStatus, ProbeResult, Queue, attained
from router.pools.watch import busyness, not_serving

PAGE = b"""# HELP kvrouter_queued_requests Requests that wait for room in the fleet
# TYPE kvrouter_queued_requests gauge
kvrouter_queued_requests 3.0
# TYPE kvrouter_ledger_reported_waiting gauge
kvrouter_ledger_reported_waiting{dp_rank="0",worker="w0"} 4.0
kvrouter_ledger_reported_waiting{dp_rank="1",worker="w0"} 5.0
# TYPE kvrouter_time_to_first_token_seconds histogram
kvrouter_time_to_first_token_seconds_bucket{le="0.1",mode="kv"} 10.0
kvrouter_time_to_first_token_seconds_bucket{le="0.5",mode="kv"} 30.0
kvrouter_time_to_first_token_seconds_bucket{le="+Inf",mode="kv"} 40.0
kvrouter_time_to_first_token_seconds_count{mode="kv"} 40.0
kvrouter_time_to_first_token_seconds_sum{mode="kv"} 9.0
kvrouter_time_to_first_token_seconds_bucket{le="0.1",mode="random"} 1.0
kvrouter_time_to_first_token_seconds_bucket{le="0.5",mode="random"} 1.0
kvrouter_time_to_first_token_seconds_bucket{le="+Inf",mode="random"} 1.0
kvrouter_queue_wait_seconds_bucket{le="0.1"} not a number
"""
LIMITS = LiveLimits(
    failures_max=2, successes_min=2, queue_requests_max=10, ttft_bound_ms=100.0, window_requests_min=10, hold_s=30.0
)


def pool(limits: LiveLimits, *urls: str) -> PoolSettings:
    routers = tuple(RouterAddress(url=url) for url in urls)
    return PoolSettings(routers=routers, **limits.model_dump(exclude_unset=True))


@dataclass
class World:
    """One pool, its two routers as looks see them, and each fitness that it had."""

    limits: LiveLimits = LIMITS
    urls: tuple[str, ...] = ("http://a", "http://b")
    now_s: float = 0.0
    state: PoolState = field(init=False)
    fitnesses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = PoolState("p", pool(self.limits, *self.urls))

    def look(
        self,
        url: str,
        *,
        ready: bool = True,
        queued: int | None = None,
        waiting: int = 0,
        ttft: tuple[float, float] | None = None,
    ) -> None:
        queue = None if queued is None else Queue(queued, waiting)
        look = ProbeResult("" if ready else "refused", queue=queue, attained={"ttft": Attained(*ttft)} if ttft else {})
        self.state.probed(url, look, self.now_s)
        self.fitnesses.append(self.now().fitness)

    def fail(self, url: str) -> None:
        self.state.attempt_failed(url, "no connection", self.now_s)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.state.tick(self.now_s)

    def now(self) -> PoolStatus:
        return self.state.status


def test_a_router_is_silent_once_it_is_down_without_an_answer_and_not_where_it_says_that_it_is_not_ready() -> None:
    state = PoolState("p", pool(LiveLimits(), "http://a"))

    def is_silent_after(*, ready: bool, answered: bool) -> bool:
        state.probed("http://a", ProbeResult("" if ready else "x", answered), 0.0)
        return state.is_silent("http://a")

    assert not is_silent_after(ready=True, answered=True)
    assert [is_silent_after(ready=False, answered=False) for _ in range(LiveLimits().failures_max)][-1]
    assert not is_silent_after(ready=False, answered=True)


def test_the_first_look_decides_alone_and_later_ones_take_two_in_a_row() -> None:
    world = World(urls=("http://a",))
    assert (world.now().fitness, world.now().routers_up) == ("fit", ("http://a",)), "before the first look"
    world.look("http://a", ready=False)
    assert (world.now().causes, world.now().reasons) == (("unhealthy",), ("http://a: refused",))
    for ready in (True, False, True, True, False, False):
        world.look("http://a", ready=ready)
    assert world.fitnesses == ["down", "down", "down", "down", "fit", "fit", "down"]


def test_a_pool_is_down_only_when_none_of_its_routers_is_up() -> None:
    world = World()
    for url in world.urls:
        world.look(url)
    for _ in range(2):
        world.look("http://a", ready=False)
    assert (world.now().fitness, world.now().routers_up) == ("fit", ("http://b",))
    for _ in range(2):
        world.look("http://b", ready=False)
    assert world.now().fitness == "down"


def test_attempts_that_find_no_connection_count_like_looks_that_fail() -> None:
    world = World(urls=("http://a",))
    world.look("http://a")
    world.fail("http://a")
    assert world.now().fitness == "fit"
    world.fail("http://a")
    assert (world.now().fitness, world.now().reasons) == ("down", ("http://a: no connection",))


def test_a_long_queue_strains_a_pool_until_it_is_half_as_long_as_it_may_be() -> None:
    world = World()
    world.look("http://a", queued=6)
    world.look("http://b", queued=4)
    assert (world.now().fitness, world.now().queued_requests) == ("fit", 10)
    world.look("http://b", queued=5)
    assert (world.now().fitness, world.now().causes) == ("strained", ("queue",))
    assert world.now().reasons == ("queue: 11 requests wait, allowed 10 at most, then half of that",)
    world.look("http://a", queued=1)
    assert world.now().fitness == "strained"
    world.look("http://b", queued=4)
    assert world.now().fitness == "fit"
    world.look("http://b", queued=9)
    assert world.now().fitness == "fit", "the bound is the bound again"


def test_routers_of_a_pool_share_its_engines_and_each_has_a_queue_of_its_own() -> None:
    world = World()
    world.look("http://a", queued=2, waiting=7)
    world.look("http://b", queued=1, waiting=6)
    assert world.now().queued_requests == 2 + 1 + 7


def test_a_queue_of_which_nothing_is_said_any_more_is_forgotten_after_a_while() -> None:
    world = World(urls=("http://a",))
    world.look("http://a", queued=11)
    world.look("http://a", queued=None)
    assert world.now().fitness == "strained"
    world.wait(29.0)
    assert world.now().fitness == "strained"
    world.wait(1.0)
    assert (world.now().fitness, world.now().queued_requests) == ("fit", None)


def test_too_few_answers_in_time_strain_a_pool_until_a_window_has_enough() -> None:
    world = World(urls=("http://a",))
    world.look("http://a", ttft=(1000.0, 5000.0))
    assert world.now().ttft_ratio is None, "what was before the first look is not judged"
    world.look("http://a", ttft=(1009.0, 5010.0))
    assert (world.now().fitness, world.now().ttft_ratio) == ("fit", 0.9)
    world.look("http://a", ttft=(1017.0, 5020.0))
    assert (world.now().fitness, world.now().causes) == ("strained", ("ttft",))
    assert world.now().reasons == ("ttft: 80% within 100 ms, allowed 90%",)
    world.look("http://a", ttft=(1026.0, 5030.0))
    assert world.now().fitness == "strained", "0.9 is enough to be fit, and not to become it"
    world.look("http://a", ttft=(1036.0, 5040.0))
    assert world.now().fitness == "fit"


def test_windows_wait_for_their_answers_and_add_those_of_all_routers() -> None:
    world = World()
    for url in world.urls:
        world.look(url, ttft=(0.0, 0.0))
    world.look("http://a", ttft=(0.0, 5.0))
    assert world.now().ttft_ratio is None
    world.look("http://b", ttft=(5.0, 5.0))
    assert world.now().ttft_ratio == 0.5


def test_a_router_that_began_anew_counts_from_there() -> None:
    world = World(urls=("http://a",))
    world.look("http://a", ttft=(100.0, 100.0))
    world.look("http://a", ttft=(0.0, 10.0))
    assert world.now().ttft_ratio == 0.0


def test_a_slow_pool_to_which_nothing_is_sent_is_tried_again_after_a_while() -> None:
    world = World(urls=("http://a",))
    world.look("http://a", ttft=(0.0, 0.0))
    world.look("http://a", ttft=(0.0, 10.0))
    world.wait(29.9)
    world.look("http://a", ttft=(0.0, 10.0))
    assert world.now().fitness == "strained"
    world.wait(0.1)
    assert (world.now().fitness, world.now().ttft_ratio) == ("fit", None)


def test_without_a_bound_nothing_is_judged() -> None:
    world = World(LiveLimits(queue_requests_max=None), urls=("http://a",))
    world.look("http://a", queued=10**6, ttft=(0.0, 0.0))
    world.look("http://a", queued=10**6, ttft=(0.0, 1000.0))
    assert (world.now().fitness, world.now().ttft_ratio) == ("fit", None)


# ------------------------------------------------------------------------------------------- attainment


def test_answers_in_time_are_a_linear_part_of_the_bucket_that_the_bound_lies_in() -> None:
    buckets = {0.1: 10.0, 0.5: 30.0, float("inf"): 40.0}
    assert attained(buckets, 0.1) == Attained(10.0, 40.0)
    assert attained(buckets, 0.3) == Attained(20.0, 40.0)
    assert attained(buckets, 0.05) == Attained(5.0, 40.0)
    assert attained(buckets, 9.0) == Attained(30.0, 40.0)
    assert attained({}, 1.0) == Attained(0.0, 0.0)


# ------------------------------------------------------------------------------------------- order


def group(priorities: tuple[int, ...]) -> PoolGroup:
    names = tuple(f"p{each}" for each in range(len(priorities)))
    axis = Axis("ttft_ms", 0.0, float(len(priorities)), len(priorities))
    mapping = tuple(range(len(priorities)))
    return PoolGroup(phase="agg", namespaces=names, priorities=priorities, axes=(axis,), mapping=mapping)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.data())
def test_all_pools_are_in_the_order_and_the_peers_retries_are_its_beginning(
    numbers: list[int], data: st.DataObject
) -> None:
    selected = data.draw(st.integers(0, len(numbers) - 1))
    found = preference(selected, numbers)
    assert sorted(found) == list(range(len(numbers)))
    faster = sorted({each for each in numbers if each < numbers[selected]}, reverse=True)
    peers = [selected] + [pool for number in faster for pool, own in enumerate(numbers) if own == number]
    assert [*found][: len(peers)] == peers


def standing(name: str, fitness: str) -> PoolStatus:
    state = PoolState(name, pool(LiveLimits(queue_requests_max=1), "http://u"))
    queued, ready = (2 if fitness == "strained" else 0), fitness != "down"
    state.probed("http://u", ProbeResult("" if ready else "x", queue=Queue(queued)), 0.0)
    assert state.status.fitness == fitness
    return state.status


def order(fitnesses: str, *, retry: bool, target: float = 2.0) -> tuple[list[int], list[int]]:
    words = {"f": "fit", "s": "strained", "d": "down"}
    pools = group(tuple(range(len(fitnesses))))
    standings = [standing(name, words[letter]) for name, letter in zip(pools.namespaces, fitnesses, strict=True)]
    found = plan(pools, select(pools, SelectionInput(targets=Targets(target)), Targets()), standings, retry=retry)
    return [each.pool for each in found.order], [each.pool for each in found.passed_over]


@pytest.mark.parametrize(
    ("fitnesses", "expected", "passed_over"),
    [
        ("ffff", [2, 1, 0, 3], []),
        ("ffsf", [1, 0, 3, 2], [2]),
        ("fddf", [0, 3, 2, 1], [2, 1]),
        ("sdsf", [3, 2, 0, 1], [2, 1, 0]),
        ("dsds", [1, 3, 2, 0], [2]),
        ("dddd", [2, 1, 0, 3], []),
    ],
)
def test_fit_pools_come_first_and_those_that_are_down_last(
    fitnesses: str, expected: list[int], passed_over: list[int]
) -> None:
    assert order(fitnesses, retry=True) == (expected, passed_over)
    assert order(fitnesses, retry=False) == (expected[:1], passed_over)


def test_a_candidate_says_why_it_is_there_and_why_not() -> None:
    pools = group((0, 1, 2))
    standings = [standing("p0", "fit"), standing("p1", "strained"), standing("p2", "fit")]
    found = plan(pools, select(pools, SelectionInput(targets=Targets(1.0)), Targets()), standings, retry=True)
    assert [(each.namespace, each.place, each.fitness, each.causes) for each in found.order] == [
        ("p0", "faster", "fit", ()), ("p2", "other", "fit", ()), ("p1", "selected", "strained", ("queue",)),
    ]  # fmt: skip
    assert found.selection.namespace == "p1"


def test_a_page_tells_queues_and_answers_within_the_bounds_of_all_modes() -> None:
    queue, bounds = Queue(3, 9), LiveLimits(ttft_bound_ms=300, itl_bound_ms=10)
    assert busyness(PAGE, LiveLimits()) == ProbeResult(queue=queue)
    assert busyness(PAGE, bounds) == ProbeResult(queue=queue, attained={"ttft": Attained(21.0, 41.0)})
    assert busyness(b"other_metric 1\n", bounds) == ProbeResult()


@pytest.mark.parametrize(
    "line",
    [
        b"kvrouter_queued_requests many\n",
        b'kvrouter_time_to_first_token_seconds_bucket{mode="kv"} 1\n',
        b"kvrouter_queued_requests NaN\n",
    ],
)
def test_a_page_that_no_router_makes_is_unreadable(line: bytes) -> None:
    with pytest.raises(PageUnreadable, match=r"^/metrics: "):
        busyness(line, LiveLimits(ttft_bound_ms=1))


def test_why_a_router_is_not_ready() -> None:
    assert not not_ready(b'{"ready":true,"reasons":[],"notes":[]}')
    assert not_ready(b'{"ready":false,"reasons":["a","b"],"notes":[]}') == "not ready: a; b"
    assert not_ready(b'{"ready":false}') == "not ready: it does not say why"
    with pytest.raises(PageUnreadable, match=r"^/ready: "):
        not_ready(b"<html>")


def test_why_a_router_is_of_no_use_for_a_model() -> None:
    body = b'{"object":"list","data":[{"id":"a"},{"id":"b"}]}'
    assert not not_serving(body, ("x", "b"))
    assert not_serving(body, ("x",)) == "serves a, b, wanted x"
    assert not_serving(b'{"data":[]}', ("x", "y")) == "serves no model, wanted x, y"
    with pytest.raises(PageUnreadable, match=r"^/v1/models: "):
        not_serving(b'{"data":1}', ("x",))
