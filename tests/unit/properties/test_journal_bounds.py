"""No record of the journal is longer than a message, whatever clients, workers and other routers send.

The worst of each kind goes through the same encoder as in a router; what is read back is what was recorded.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Exclusion
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    MESSAGE_BYTES_MAX,
    RECORD_BYTES_MAX,
    AttemptEnded,
    CheckpointBegan,
    CheckpointPart,
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    Refused,
    WorkerHeard,
    decode_journal,
    encode_record,
)
from kv_protocol.ledger import Routed
from router.decision.policy import Policy
from router.decision.state import ApproximateLimits, RouterState
from router.journal.encoder import JournalCheckpoint, JournalEncoder
from router.journal.replay import CheckpointRead, Replay
from tests.support.amount import examples
from tests.support.decide import decide
from tests.support.replayed import continuous
from tests.support.watched_routing import Told, tell
from tests.unit.properties.router_life import SETTINGS
from tests.unit.router.samples import BLOCK_SIZE, MODEL, registered, row, view

LONG = "x" * 128
"""The longest name that a client's header may have."""
BODY_BYTES = 64 << 20
"""`data.body_bytes_max` by default: so many tokens at most, where a token is a byte."""
EVENT_BYTES = 1 << 20
"""As large a message as nats-server takes by default: what a fleet event may have of text."""
WORST = settings(max_examples=examples(8, least=3))


def messages(told: Sequence[Told | JournalCheckpoint]) -> list[bytes]:
    """Return the messages of what was recorded."""
    encoder, cut = JournalEncoder(7, lambda: 2**64 - 1), list[bytes]()
    for what in told:
        tell(encoder, what)
        while len(encoder) or encoder.is_in_checkpoint:
            cut.append(encoder.cut().data)
    assert not encoder.lost
    return cut


def read_back(told: Sequence[Told | JournalCheckpoint]) -> list[JournalRecord]:
    found = messages(told)
    assert max(map(len, found)) <= MESSAGE_BYTES_MAX
    return list(continuous(map(decode_journal, found)))


def request(blocks: int) -> RouteRequest:
    return RouteRequest(
        decision_id=LONG,
        request_id=LONG,
        model=MODEL,
        isl_tokens=blocks * BLOCK_SIZE + 5,
        block_size=BLOCK_SIZE,
        sequence_hashes=np.random.default_rng(blocks).bytes(8 * blocks),
        session_id=LONG,
        tenant=LONG,
        preferred_taints=tuple((LONG + str(at), 0.5) for at in range(16)),
        tried=tuple(WorkerRank("w" * 64, at) for at in range(64)),
    )


@given(st.sampled_from([1, 64, 4096]), st.sampled_from([0, 1, 65_400, 65_536, BODY_BYTES // BLOCK_SIZE]))
@WORST
def test_a_decision_fits_whatever_its_ranks_and_its_prompt(ranks: int, blocks: int) -> None:
    """From one block and one rank to 4096 ranks that hold different parts of a prompt of 64 MiB, by a hash a block."""
    held = [(max(0, blocks - at % 7),) * 4 for at in range(ranks)]
    rows = [row(f"{'w' * 60}{at:04}/0", overlap_blocks=depths) for at, depths in enumerate(held)]
    told = decide(view(*rows), request(blocks), Policy(), 1)
    *standings, decided = read_back([told])
    assert len(standings) == sum(epoch > 0 for epoch in told.epochs or ())
    assert encode_record(decided) == told.journal_record(2**64 - 1)


@given(st.sampled_from([64, 4096, 20_000]), st.integers(1, 4096))
@WORST
def test_a_refusal_fits(ranks: int, reason: int) -> None:
    exclusions = tuple(Exclusion(worker_id="w" * 64, dp_rank=at, reason="r" * (reason % 512)) for at in range(ranks))
    refused = Refused(now_s=1.0, request=request(0), exclusions=exclusions)
    assert read_back([refused]) == [refused]


@given(st.integers(1, EVENT_BYTES))
@WORST
def test_what_workers_and_other_routers_send_fits(size: int) -> None:
    text = "t" * size
    records: list[JournalRecord] = [
        FleetApplied(now_s=1.0, event=registered("w-0", instance="i" * 128, loras=("l" * 256,) * min(4096, size))),
        WorkerHeard(now_s=1.0, worker_id="w-0", instance=text),
        AttemptEnded(now_s=1.0, worker_id="w-0", dp_rank=0, outcome="failed", reason=text),
        LedgerApplied(
            now_s=1.0,
            event=Routed(lease_id=text[:128], worker_id="w-0", dp_rank=0, blocks=bytes(8 * size), uncached_tokens=1),
            router="router-2",
        ),
    ]
    assert read_back(records) == records


@given(st.sampled_from([64, 512]), st.sampled_from([100, 20_000]))
@WORST
def test_a_checkpoint_fits_and_can_be_restored(ranks: int, blocks: int) -> None:
    made_of = msgspec.structs.replace(SETTINGS, approximate=ApproximateLimits(120.0))
    state = RouterState(made_of)
    for at in range(ranks):
        state.apply(FleetApplied(now_s=1.0, event=registered(f"w-{at}", loras=("l" * 256,) * 16)))
        chain = np.random.default_rng(at).bytes(8 * (blocks if at % 16 == 0 else 10))
        routed = Routed(
            lease_id=f"{at}", worker_id=f"w-{at}", dp_rank=0, blocks=chain, uncached_tokens=5, session_id=f"s{at}"
        )
        state.apply(LedgerApplied(now_s=1.0, event=routed))
    began = CheckpointBegan(now_s=2.0, router="router-1", settings=msgspec.to_builtins(made_of))
    records = read_back([JournalCheckpoint(state, began)])
    sizes = [len(each.rows) for each in records if isinstance(each, CheckpointPart) and each.table != "fleet"]
    assert (max(sizes) > RECORD_BYTES_MAX / 8) == (blocks > 100)
    again = Replay()
    assert [again.take(record) for record in records][-1] == CheckpointRead(is_compared=False)
    assert again.state is not None
    assert again.state.loads() == state.loads()
