"""Trust in ranks; which of them are newcomers, until when, and how large the slice of full misses of each is."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, LoadApplied, WorkerHeard
from kv_protocol.ledger import Routed
from kv_protocol.load import LoadReport
from router.decision.state import RouterState
from router.fleet.trust import Disparity, trust_of
from tests.reference.newcomers import GATHER_S
from tests.unit.router.samples import BLOCK_SIZE, ask, chain, joined, rank, registered, route, tell

SIZE = Disparity("block_size", 32, 16)
TOKENIZER = Disparity("tokenizer_digest", "x", "y")


@pytest.mark.parametrize(
    ("stale", "state", "reason"),
    [
        ("", "EXACT", ""),
        ("behind", "DEGRADED", "behind"),
        ("resyncing", "DEGRADED", "resyncing"),
        ("source", "DEGRADED", "source"),
        ("overfull", "DEGRADED", "overfull"),
        ("log_away", "DEGRADED", "event log away"),
        ("never_heard", "FALLBACK", "no KV events heard; approximate"),
        ("refused", "FALLBACK", "no room in the index; approximate"),
    ],
)
def test_trust_follows_the_stream(stale: str, state: str, reason: str) -> None:
    trust = trust_of((), stale)
    assert trust == (state, reason)
    assert trust.overlap_source == ("approximate" if state == "FALLBACK" else "index")


@pytest.mark.parametrize("stale", ["", "behind", "never_heard", "log_away"])
def test_where_parity_is_broken_the_stream_has_no_say_and_every_field_is_named(stale: str) -> None:
    trust = trust_of((SIZE, TOKENIZER), stale)
    differences = "block_size: found 32, allowed 16; tokenizer_digest: found 'x', allowed 'y'"
    assert trust == ("FALLBACK", f"{differences}; approximate")
    assert trust.overlap_source == "approximate"


BLOCKS = 100
NOW_S = 2 * GATHER_S
W0 = rank("w0")


def worker(worker_id: str, total_kv_blocks: int = BLOCKS, **changed: object) -> WorkerRegistered:
    return registered(worker_id, total_kv_blocks=total_kv_blocks, **changed)


def join(folded: RouterState, event: WorkerRegistered, now_s: float = GATHER_S) -> None:
    folded.apply(FleetApplied(now_s=now_s, event=event))
    folded.apply(WorkerHeard(now_s=now_s, worker_id=event.worker_id, instance=event.instance))


def used(folded: RouterState, worker_id: str, blocks: int) -> None:
    """The engine of the worker's first rank reports so many blocks in use."""
    counts: dict[str, Any] = {
        "running_requests": 0,
        "waiting_requests": 0,
        "used_blocks": blocks,
        "total_blocks": blocks,
    }
    report = LoadReport(instance=f"{worker_id}-1", iteration=1, **counts)
    folded.apply(LoadApplied(now_s=NOW_S, worker_id=worker_id, dp_rank=0, report=report))


def promised(folded: RouterState, worker_id: str, blocks: int) -> None:
    tokens = blocks * BLOCK_SIZE
    tell(folded, Routed(lease_id="l", worker_id=worker_id, dp_rank=0, blocks=b"", uncached_tokens=tokens), now_s=NOW_S)


def missed(folded: RouterState, winner: WorkerRank = W0, times: int = 1) -> None:
    """Requests of which no rank has a block go to `winner`."""
    for _ in range(times):
        number = folded.core.attempts_total
        asked = route(
            decision_id=f"d{number}",
            sequence_hashes=chain(2 * number, 2 * number + 1),
            pinned_worker=winner.worker_id,
            pinned_dp_rank=winner.dp_rank,
        )
        folded.take(folded.decide(asked, ask, NOW_S, 1))


def held_back(folded: RouterState) -> list[str]:
    """Return the ranks of which the share is spent."""
    view = folded.decide(route(), ask, NOW_S, 1).view()
    return [str(each) for each, is_spent in zip(view.ranks, view.newcomer, strict=True) if is_spent]


def working(*, is_settled: bool = True) -> RouterState:
    """Return a fleet of two founders, and one worker that joined later."""
    folded = joined(worker("w0"), worker("w1"))
    if is_settled:
        used(folded, "w0", BLOCKS // 4)
    join(folded, worker("new"))
    return folded


def test_only_a_rank_that_joins_a_working_fleet_is_held_back() -> None:
    assert held_back(working()) == ["new/0"]


def test_the_first_workers_of_a_model_are_not_held_back_beside_another_models() -> None:
    folded = joined(worker("other", model="another"))
    join(folded, worker("w0"))
    join(folded, worker("w1"))
    used(folded, "w0", BLOCKS // 4)
    assert held_back(folded) == []


def test_every_sixth_full_miss_of_three_ranks_may_be_its_own() -> None:
    folded, went = working(), []
    for number in range(18):
        is_its_own = not held_back(folded)
        missed(folded, rank("new") if is_its_own else W0)
        went += [number] * is_its_own
    assert went == [5, 11, 17]


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 99), max_size=200))
def test_a_newcomer_gets_at_most_its_slice_of_any_stretch(founders: int, joining: int, wishes: list[int]) -> None:
    folded, ranks = joined(*(worker(f"w{at}", 1 << 20) for at in range(founders))), founders + joining
    used(folded, "w0", 1 << 20)
    for at in range(joining):
        join(folded, worker(f"n{at}", 1 << 20))
    names = [*(f"w{at}/0" for at in range(founders)), *(f"n{at}/0" for at in range(joining))]
    got = Counter[str]()
    for count, wish in enumerate(wishes, start=1):
        spent = held_back(folded)
        allowed = [name for name in names if name not in spent]
        winner = allowed[-1 - wish % len(allowed)]
        missed(folded, rank(winner))
        got[winner] += 1
        assert all(2 * ranks * times <= count for name, times in got.items() if name.startswith("n"))
