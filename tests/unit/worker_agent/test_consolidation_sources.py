"""Several publishers of one worker: whose word concerns what, and what one source's loss leaves of the others'."""

from itertools import count

import pytest
from msgspec.structs import replace

from bench.capture.payloads import encode_payload
from kv_protocol.events import Cleared, Event, Removed, Stored, Tier
from tests.unit.worker_agent.test_consolidation import BLOCK_SIZE, CHAIN, STORED, TOKENS, payload, told
from worker_agent.events.consolidation import Consolidation, Origin
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineStored

ENGINE, HOST = Origin("engine"), Origin("host")
HOST_STORED = EngineStored(
    block_hashes=(71, 72), parent_block_hash=None, token_ids=TOKENS[:4], block_size=BLOCK_SIZE, tier=Tier.HOST
)
HOST_COPY_ON_GPU = replace(HOST_STORED, tier=Tier.GPU)


@pytest.fixture
def core() -> Consolidation:
    """Two ranks, and two publishers which speak for both."""
    return Consolidation((0, 1), BLOCK_SIZE, "instance", count(1000).__next__, origins=(ENGINE, HOST))


def without_rank(*events: EngineEvent) -> bytes:
    return encode_payload(1.5, events, 0)[:-1] + b"\xc0"


def events_told(core: Consolidation) -> list[Event]:
    """Return what the outbox of rank 0 publishes now."""
    return [batch.event for batch in told(core)]


def held(core: Consolidation, dp_rank: int = 0) -> dict[int, tuple[Tier, ...]]:
    return {block.sequence_hash: tuple(block.tiers) for block in core.mirrors[dp_rank].dump()}


# -------------------------------------------------------------------- losses and clears
def test_a_loss_at_one_publisher_concerns_its_source_alone(core: Consolidation) -> None:
    core.on_payload(0, payload(STORED), ENGINE)
    core.on_payload(0, payload(HOST_COPY_ON_GPU, HOST_STORED), HOST)
    core.on_payload(1, payload(STORED, dp_rank=1), ENGINE)
    told(core)
    assert core.on_loss(ENGINE) == {0, 1}
    assert events_told(core) == [Removed((CHAIN[2],))]
    assert held(core) == {CHAIN[0]: (Tier.GPU, Tier.HOST), CHAIN[1]: (Tier.GPU, Tier.HOST)}
    assert held(core, 1) == {}
    assert (core.publishers[ENGINE].losses_total, core.publishers[HOST].losses_total) == (1, 0)


def test_what_a_source_says_after_its_loss_is_had_again(core: Consolidation) -> None:
    core.on_payload(0, payload(STORED), ENGINE)
    core.on_loss(ENGINE, began_anew=True)
    assert core.on_payload(0, payload(STORED), ENGINE) == {0}
    assert events_told(core) == [Stored(CHAIN), Cleared(), Stored(CHAIN)]
    assert core.publishers[ENGINE].decoder.counts["stored"] == 2


# -------------------------------------------------------------------- why a rank is stale
def test_reasons_are_kept_for_each_source_and_end_with_what_that_source_held(core: Consolidation) -> None:
    core.on_payload(0, b"\xc1", ENGINE)
    core.on_payload(0, b"\xc1", HOST)
    core.on_payload(1, payload(EngineCleared()), HOST)
    assert core.stale(0).startswith("engine: unreadable batch: ")
    assert "; host: unreadable batch: " in core.stale(1)
    core.on_loss(ENGINE)
    assert (core.stale(0), core.stale(1)[:24]) == ("", "host: unreadable batch: ")


# -------------------------------------------------------------------- publishers of one rank
@pytest.fixture
def by_rank() -> Consolidation:
    """Two ranks, each with a publisher of its own."""
    origins = (Origin("engine", 0), Origin("engine", 1))
    return Consolidation((0, 1), BLOCK_SIZE, "instance", count(1000).__next__, origins=origins)


def test_a_batch_without_a_rank_is_its_publisher_s(by_rank: Consolidation) -> None:
    assert by_rank.on_payload(0, without_rank(STORED), Origin("engine", 1)) == {1}
    assert (len(held(by_rank, 0)), len(held(by_rank, 1))) == (0, 3)


def test_a_batch_without_a_rank_is_rank_0_s_where_the_publisher_speaks_for_all(core: Consolidation) -> None:
    assert core.on_payload(0, without_rank(STORED), ENGINE) == {0}


def test_a_batch_of_another_rank_than_its_publisher_s_is_refused_and_named(by_rank: Consolidation) -> None:
    origin = Origin("engine", 1)
    assert by_rank.on_payload(0, payload(STORED, dp_rank=0), origin) == set()
    assert by_rank.publishers[origin].foreign_rank_batches_total == 1
    assert (by_rank.stale(0), by_rank.stale(1)) == ("", "engine: dp_rank: found 0, allowed 1")


def test_an_engine_with_one_rank_may_name_any_place_in_a_group_but_only_one() -> None:
    core = Consolidation((0,), BLOCK_SIZE, "instance", count(1000).__next__)
    assert core.on_payload(0, payload(STORED, dp_rank=7)) == {0}
    assert (len(held(core, 0)), core.stale(0)) == (3, "")
    assert core.on_payload(1, payload(STORED, dp_rank=1)) == set()
    assert core.stale(0) == "engine: dp_rank: found 1 beside 7, allowed one rank"


def test_an_engine_with_one_rank_may_come_back_at_another_place_in_its_group() -> None:
    core = Consolidation((0,), BLOCK_SIZE, "instance", count(1000).__next__)
    core.on_payload(0, payload(STORED, dp_rank=7))
    core.on_loss(began_anew=True)
    assert core.on_payload(0, payload(STORED, dp_rank=1)) == {0}
    assert (len(held(core, 0)), core.stale(0)) == (3, "")


def test_a_loss_at_the_publisher_of_one_rank_concerns_that_rank_alone(by_rank: Consolidation) -> None:
    for dp_rank in (0, 1):
        by_rank.on_payload(0, payload(STORED, dp_rank=dp_rank), Origin("engine", dp_rank))
    by_rank.on_payload(1, b"\xc1", Origin("engine", 0))
    assert by_rank.on_loss(Origin("engine", 1)) == {1}
    assert (len(held(by_rank, 0)), len(held(by_rank, 1))) == (3, 0)
    assert (by_rank.stale(0) != "", by_rank.stale(1)) == (True, "")
