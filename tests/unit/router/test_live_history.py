"""What is kept for people: the ring, rows of trends, use of prefixes."""

from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from indexer.embedded import OutlineNode
from kv_protocol.codec import pack_u64
from router.live.fleet import EXCERPT_TOKENS, uses
from router.live.service import OLD_S, OLD_STEP_S, RECENT_S, STEP_S, STEPS, Live, Ring, Row, merged_trends
from router.prompt.chains import KeptPrompts
from tests.support.manual_clock import ManualClock
from tests.unit.router.samples import route

BEGAN_S = 1_000_000.0


def filled(seconds: float, *, bytes_max: int = 1 << 30, size: int = 10) -> Ring:
    """Return a ring that got a sample each `STEP_S` for so long; each has its number in front."""
    ring = Ring(bytes_max)
    for number in range(int(seconds / STEP_S) + 1):
        ring.add(BEGAN_S + number * STEP_S, str(number).encode().ljust(size))
    return ring


def span(ring: Ring) -> tuple[float | None, float | None]:
    """Return the times of the first and of the last sample."""
    shown = ring.shown()
    return shown["from_s"], shown["to_s"]


def found(ring: Ring, seconds: float) -> int | None:
    """Return the number of the last sample at this time or before it."""
    sample = ring.at(BEGAN_S + seconds)
    return None if sample is None else int(sample)


def test_the_last_sample_at_a_time_or_before_it_is_found() -> None:
    assert (Ring(100).at(BEGAN_S), span(Ring(100))) == (None, (None, None))
    ring, expected = filled(60), {-0.001: None, 0.0: 0, 4.9: 0, 5.0: 1, 34.0: 6, 1e9: 12}
    assert {seconds: found(ring, seconds) for seconds in expected} == expected
    ring.add(BEGAN_S + 12.0, b"99")  # a clock that is set back ends what is later
    assert (span(ring), found(ring, 1000)) == ((BEGAN_S, BEGAN_S + 12.0), 99)


def test_what_is_old_is_thinned_and_what_is_older_is_dropped() -> None:
    seconds = OLD_S + RECENT_S
    ring = filled(seconds)
    now_s = BEGAN_S + seconds
    first_s, _ = span(ring)
    assert first_s is not None
    assert ring.shown()["steps"] == [
        {"step_s": STEP_S, "from_s": now_s - RECENT_S + STEP_S},
        {"step_s": OLD_STEP_S, "from_s": first_s},
    ]
    assert now_s - OLD_S < first_s <= now_s - OLD_S + OLD_STEP_S
    assert len(ring.samples) <= RECENT_S / STEP_S + OLD_S / OLD_STEP_S
    for ago_s, step_s in ((100.0, STEP_S), (RECENT_S + 1000.0, OLD_STEP_S)):
        number = found(ring, now_s - ago_s - BEGAN_S)
        assert number is not None
        assert 0 <= now_s - ago_s - (BEGAN_S + number * STEP_S) < step_s


def test_the_oldest_are_dropped_beyond_the_bytes_and_a_sample_beyond_all_is_not_kept() -> None:
    ring = filled(RECENT_S * 2, bytes_max=5000, size=100)
    assert (len(ring.samples), ring.size, found(ring, 0.0)) == (50, 5000, None)
    assert found(ring, RECENT_S * 2) == RECENT_S * 2 / STEP_S
    ring = Ring(10)
    ring.add(BEGAN_S, b"x" * 11)
    assert (ring.samples, ring.size, ring.at(BEGAN_S)) == ({}, 0, None)


def test_samples_are_in_order_and_within_the_bytes_whatever_comes() -> None:
    random = Random(5)
    ring, now_s = Ring(3000), BEGAN_S
    for _ in range(3000):
        now_s += random.choice([5.0, 5.0, 5.0, 60.0, 1800.0, -500.0])
        data = b"x" * random.randrange(1, 200)
        ring.add(now_s, data)
        assert ring.size <= 3000
        assert (ring.at(now_s), span(ring)[1]) == (data, now_s)
        assert [*ring.samples] == sorted(ring.samples)


class Router:
    """What trends read of a router."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.reading = Row(first_tokens=[0, 0])
        routing: Any = SimpleNamespace(clock=self.clock)
        self.live = Live(routing, routing, lambda: self.reading, (1.0,))

    async def step(self, **changed: Any) -> None:
        """Let a step end, after which this is read."""
        self.reading = replace(self.reading, **changed)
        await self.clock.advance(STEP_S)
        self.live.step()


async def test_a_row_has_what_was_added_in_its_step() -> None:
    router = Router()
    await router.step(requests=3, first_tokens=[2, 1], prompt_tokens=100, reused_tokens=60, saved_s=0.5)
    await router.step(requests=4, first_tokens=[2, 2], in_flight=7, event_lag_s=0.25)
    first, second = router.live.trends().rows
    assert (first.requests, first.first_tokens, first.reused_tokens, first.saved_s) == (3, [2, 1], 60, 0.5)
    assert (second.requests, second.first_tokens, second.reused_tokens) == (1, [0, 1], 0)
    assert (second.in_flight, second.event_lag_s, second.at_s - first.at_s) == (7, 0.25, STEP_S)
    for _ in range(STEPS + 5):
        await router.step()
    assert len(router.live.trends().rows) == STEPS, "those of 15 minutes"


async def test_rows_of_processes_are_summed_by_their_times_and_gauges_are_the_largest() -> None:
    one, other = Router(), Router()
    await one.step(requests=3, first_tokens=[2, 1], in_flight=4)
    await other.step(requests=2, first_tokens=[0, 2], in_flight=5, event_lag_s=0.5)
    await other.step()
    both, alone = merged_trends([one.live.trends(), other.live.trends()]).rows
    assert (both.requests, both.first_tokens, both.in_flight, both.event_lag_s) == (5, [2, 3], 5, 0.5)
    assert (alone.requests, alone.at_s - both.at_s) == (0, STEP_S)


def record(tenant: str, *hashes: int, request_id: str = "r") -> Any:
    """Return a decision on a prompt of these blocks."""
    request = route(tenant=tenant, request_id=request_id, block_size=2, sequence_hashes=pack_u64(hashes))
    return SimpleNamespace(verdict=SimpleNamespace(request=request))


def node(first: int, *, blocks: int, depth: int) -> OutlineNode:
    """Return a node."""
    return OutlineNode(first, 0, blocks, blocks, depth, 0, 0.0, 0.0, 0.0)


def words(ids: Iterable[int]) -> str:
    """Return token ids as text."""
    return " ".join(map(str, ids))


def test_a_node_is_used_by_the_requests_that_have_its_first_block_at_its_place() -> None:
    records = [record("blue", 1, 2, 3), record("red", 1, 2, 4), record("blue", 2, 1)]
    trunk, leaf, strange = uses(
        [node(1, blocks=2, depth=2), node(4, blocks=1, depth=3), node(9, blocks=1, depth=1)], records
    )
    assert (trunk.tenants, leaf.tenants, strange.tenants) == (["blue", "red"], ["red"], [])
    assert (trunk.models, trunk.text) == (leaf.models, None)


def test_its_text_begins_where_the_node_begins_and_is_bounded() -> None:
    kept = KeptPrompts(words)
    hashes = range(1, 101)
    kept.keep("d-1", pack_u32(range(200)))
    short, long = uses([node(2, blocks=1, depth=2), node(3, blocks=98, depth=100)], [record("", *hashes)], kept)
    assert short.text == "2 3"
    assert long.text == words(range(4, 4 + EXCERPT_TOKENS))


def pack_u32(ids: Iterable[int]) -> bytes:
    """Return token ids as they are kept."""
    return b"".join(each.to_bytes(4, "little") for each in ids)
