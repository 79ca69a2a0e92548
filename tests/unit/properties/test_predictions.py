"""Whatever befalls requests: what is on its way to a rank is what a naive list of the requests in flight says."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.codec import unpack_u64
from kv_protocol.ids import WorkerRank
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Renewed, Routed
from router.fleet import predictions
from router.fleet.predictions import SEEN_S, Predictions
from tests.support.amount import examples
from tests.support.load_columns import expected_blocks
from tests.support.planting import plant
from tests.unit.properties.test_approximate import chain

RANKS = (WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0))
EPOCHS = (0, 7)
LEASES = [f"l{number}" for number in range(5)]


class Tick(NamedTuple):
    """Time is looked at."""


class Gone(NamedTuple):
    """A worker left."""

    worker_id: str


Step = tuple[float, LedgerEvent | Tick | Gone]

lease_ids = st.sampled_from(LEASES)
paths = st.lists(st.integers(1, 2), max_size=6)
events = st.one_of(
    st.builds(
        lambda lease_id, rank, path, epoch: Routed(
            lease_id=lease_id,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            blocks=chain(path),
            uncached_tokens=0,
            epoch=epoch,
        ),
        lease_ids,
        st.sampled_from(RANKS),
        paths,
        st.sampled_from(EPOCHS),
    ),
    *(st.builds(kind, lease_id=lease_ids) for kind in (FirstToken, FirstToken, Renewed, Finished, Cancelled, Expired)),
    st.builds(Tick),
    st.builds(Gone, st.sampled_from(["a", "b"])),
)
steps = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.5]), events), max_size=50)


class Naive:
    """The requests in flight, when each of them is over, and in which life of its rank's stream it was routed."""

    def __init__(self) -> None:
        self.lives: dict[WorkerRank, tuple[int, int]] = {}  # number, and the epoch
        self.life_of: dict[str, int] = {}
        self.routed: dict[str, Routed] = {}
        self.ends_at_s: dict[str, float] = {}

    def apply(self, event: LedgerEvent, now_s: float) -> None:
        match event:
            case Routed(lease_id=lease_id):
                if self.ends_at_s.get(lease_id, now_s) <= now_s:
                    self.routed[lease_id], self.ends_at_s[lease_id] = event, float("inf")
                    rank = WorkerRank(event.worker_id, event.dp_rank)
                    number, epoch = self.lives.get(rank, (0, event.epoch))
                    self.lives[rank] = number + (epoch != event.epoch), event.epoch
                    self.life_of[lease_id] = self.lives[rank][0]
            case FirstToken(lease_id=lease_id) if lease_id in self.ends_at_s:
                self.ends_at_s[lease_id] = min(self.ends_at_s[lease_id], now_s + SEEN_S)
            case Finished(lease_id=lease_id) | Cancelled(lease_id=lease_id) | Expired(lease_id=lease_id):
                self.ends_at_s.pop(lease_id, None)

    def forget(self, worker_id: str) -> None:
        for lease_id in [lease_id for lease_id in self.ends_at_s if self.routed[lease_id].worker_id == worker_id]:
            del self.ends_at_s[lease_id]

    def depths(self, chain: bytes, now_s: float) -> dict[WorkerRank, tuple[int, int]]:
        longest = dict[WorkerRank, tuple[int, int]]()
        for lease_id, ends_at_s in self.ends_at_s.items():
            routed = self.routed[lease_id]
            rank = WorkerRank(routed.worker_id, routed.dp_rank)
            shared = leading(routed.blocks, chain)
            if ends_at_s > now_s and self.life_of[lease_id] == self.lives[rank][0] and shared:
                longest[rank] = max(longest.get(rank, (routed.epoch, 0)), (routed.epoch, shared))
        return longest


def leading(blocks: bytes, chain: bytes) -> int:
    alike = [block == other for block, other in zip(unpack_u64(blocks), unpack_u64(chain), strict=False)]
    return [*alike, False].index(False)


def assert_equal(folded: Predictions, naive: Naive, asked: list[bytes], now_s: float) -> None:
    for hashes in asked:
        assert expected_blocks(folded, hashes, now_s, RANKS, EPOCHS) == naive.depths(hashes, now_s)


def run(script: list[Step]) -> tuple[Predictions, Naive, float]:
    folded, naive, now_s = Predictions(), Naive(), 0.0
    routed = {step.blocks for _, step in script if isinstance(step, Routed)}
    asked = [*routed, *(blocks + chain((3,)) for blocks in routed), b""]
    for advance_s, step in script:
        now_s += advance_s
        if isinstance(step, Tick):
            folded.tick(now_s)
        elif isinstance(step, Gone):
            folded.forget(step.worker_id)
            naive.forget(step.worker_id)
        else:
            folded.apply(step, now_s)
            naive.apply(step, now_s)
        assert_equal(folded, naive, asked, now_s)
    return folded, naive, now_s


@given(steps)
@settings(max_examples=examples(300), deadline=None)
def test_every_answer_is_that_of_a_naive_list(script: list[Step]) -> None:
    run(script)


@given(steps)
@settings(deadline=None)
def test_when_nothing_is_in_flight_nothing_is_on_its_way(script: list[Step]) -> None:
    folded, _, now_s = run(script)
    for lease_id in LEASES:
        folded.apply(Finished(lease_id=lease_id), now_s)
    assert folded.is_empty()


SCRIPT: list[Step] = [
    (0.0, Routed(lease_id="l0", worker_id="a", dp_rank=0, blocks=chain((1, 2, 3)), uncached_tokens=0, epoch=7)),
    (0.0, Routed(lease_id="l1", worker_id="a", dp_rank=0, blocks=chain((1, 2, 4)), uncached_tokens=0, epoch=7)),
    (1.0, FirstToken(lease_id="l0")),
    (1.0, Finished(lease_id="l1")),
    (1.0, Renewed(lease_id="l0")),
    (0.0, Gone("a")),
]


@pytest.mark.interpreted
@pytest.mark.planted
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run(SCRIPT)
    plant(predictions, "SEEN_S", 0.5, monkeypatch)
    with pytest.raises(AssertionError):
        run(SCRIPT)
