"""History of ranks over very long times (`tests/reference/history.py`)."""

from kv_protocol.ledger import Routed
from router.decision.state import RouterState
from tests.reference.history import HALF_LIFE_S
from tests.unit.router.samples import BLOCK_SIZE, ask, chain, joined, rank, registered, route, tell


def workers() -> RouterState:
    return joined(registered("a", dp_ranks=(0, 1)), registered("b"))


def add(folded: RouterState, name: str, blocks: int, now_s: float) -> None:
    """A request with this many blocks to compute is routed to the rank."""
    at, tokens = rank(name), blocks * BLOCK_SIZE
    routed = Routed(lease_id="l", worker_id=at.worker_id, dp_rank=at.dp_rank, blocks=chain(1), uncached_tokens=tokens)
    tell(folded, routed, now_s=now_s)


def blocks(folded: RouterState, now_s: float) -> dict[str, float]:
    seen = folded.decide(route(), ask, now_s, 1).view
    return dict(zip(map(str, seen.ranks), seen.history_blocks.tolist(), strict=True))


def test_after_a_very_long_time_it_is_nothing_and_no_error() -> None:
    folded = workers()
    add(folded, "a/0", 1 << 35, 0.0)
    assert blocks(folded, 1e9)["a/0"] == 0.0


def test_after_many_half_lives_it_goes_on_as_if_there_had_been_fewer() -> None:
    early, late = workers(), workers()
    for folded, begin_s in ((early, 0.0), (late, 10_000 * HALF_LIFE_S)):
        add(folded, "a/0", 1, 0.0)
        for later_s in (0.0, 15.0, 100 * HALF_LIFE_S, 100 * HALF_LIFE_S + 15.0):
            add(folded, "a/0", 5, begin_s + later_s)
    times = (100 * HALF_LIFE_S + 15.0, 10_100 * HALF_LIFE_S + 15.0)
    assert blocks(early, times[0])["a/0"] == blocks(late, times[1])["a/0"] == 5.0 + 5.0 * 2**-0.5
