"""What is kept of a model's ranks from one decision to the next changes nothing: nothing kept is the same."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.embedded import OverlapColumns
from kv_protocol.fleet import WorkerDraining, WorkerLeft
from kv_protocol.hashing import HASH_SCHEME
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    AttemptEnded,
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    LogConnection,
    PolicyChanged,
    WorkerHeard,
)
from kv_protocol.ledger import Finished, FirstToken, Routed
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.fleet.breakers import Breakers
from tests.support.amount import examples
from tests.unit.router.samples import BLOCK_SIZE, MODEL, answer, chain, registered, route, state

WORKERS = ("w0", "w1", "w2")
workers = st.sampled_from(WORKERS)
leases = st.sampled_from(("l0", "l1", "l2"))

events = st.one_of(
    st.builds(
        lambda worker_id, instance, block_size, role: FleetApplied(
            now_s=0.0, event=registered(worker_id, instance=instance, block_size=block_size, role=role)
        ),
        workers,
        st.sampled_from(("i0", "i1")),
        st.sampled_from((16, 32)),
        st.sampled_from(("aggregated", "aggregated", "prefill")),
    ),
    st.builds(
        lambda kind, worker_id, instance: FleetApplied(now_s=0.0, event=kind(worker_id=worker_id, instance=instance)),
        st.sampled_from((WorkerDraining, WorkerLeft)),
        workers,
        st.sampled_from(("i0", "i1")),
    ),
    st.builds(WorkerHeard, now_s=st.just(0.0), worker_id=workers, instance=st.sampled_from(("i0", "i1"))),
    st.builds(LogConnection, now_s=st.just(0.0), heard=st.booleans()),
    st.builds(
        AttemptEnded,
        now_s=st.just(0.0),
        worker_id=workers,
        dp_rank=st.just(0),
        outcome=st.sampled_from(("ok", "failed", "back_pressure")),
        phase=st.sampled_from(("", "connect")),
    ),
    st.builds(
        lambda lease_id, worker_id: LedgerApplied(
            now_s=0.0,
            event=Routed(lease_id=lease_id, worker_id=worker_id, dp_rank=0, blocks=chain(100, 101), uncached_tokens=9),
        ),
        leases,
        workers,
    ),
    st.builds(
        lambda kind, lease_id: LedgerApplied(now_s=0.0, event=kind(lease_id=lease_id)),
        st.sampled_from((FirstToken, Finished)),
        leases,
    ),
    st.builds(
        lambda mode: PolicyChanged(now_s=0.0, policy=msgspec.to_builtins(Policy(mode=mode))),
        st.sampled_from(list(MODES)),
    ),
)
Step = tuple[JournalRecord, float, int]
steps = st.lists(
    st.tuples(events, st.sampled_from((0.0, 0.5, 2.0, 5.0)), st.sampled_from((0, 1, 2))), min_size=1, max_size=30
)
"""What happens, how long after the one before, and in what doubt the streams are then."""
_DOUBTS = (("",) * 8, ("behind",) * 8, ("never_heard",) * 8)


def looked(folded: RouterState, now_s: float, doubt: int) -> list[Any]:
    def ask(_: object, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        held = answer([((1, 1, 1, 1), 0, 0, "")] * len(ranks))
        return held._replace(doubts=_DOUBTS[doubt][: len(ranks)])

    try:
        decided: Any = folded.decide(route(), ask, now_s, 1).decision()
    except (NoEligibleWorker, WorkerNotNamed) as error:
        decided = str(error)
    standing, doubts = folded.model_view(MODEL, BLOCK_SIZE, HASH_SCHEME, now_s), _DOUBTS[doubt]
    known = standing.ranks, standing.registrations, standing.unfit, standing.roles
    trust = standing.trusted(doubts[: len(standing.ranks)])[0]
    return [*known, standing.seq_len_min, standing.has_misfits, trust, decided]


def differences(told: list[Step]) -> list[str]:
    """Return where a state that may reuse what was kept differs from one that kept nothing."""
    kept, records, now_s, found = state(), list[JournalRecord](), 0.0, list[str]()
    for record, later_s, doubt in told:
        now_s += later_s
        records.append(msgspec.structs.replace(record, now_s=now_s))
        kept.apply(records[-1])
        forgetful = state()
        for each in records:
            forgetful.apply(each)
        one, other = looked(kept, now_s, doubt), looked(forgetful, now_s, doubt)
        found += [f"after {record}: {one}, not {other}"] if one != other else []
    return found


@settings(max_examples=examples(60))
@given(steps)
def test_a_view_is_a_function_of_what_was_applied_and_the_time(told: list[Step]) -> None:
    assert differences(told) == []


JOINED = FleetApplied(now_s=0.0, event=registered("w0", instance="i0"))
HEARD = WorkerHeard(now_s=0.0, worker_id="w0", instance="i0")
FAILED = AttemptEnded(now_s=0.0, worker_id="w0", dp_rank=0, outcome="failed", phase="connect")
CAME_BACK: list[Step] = [(JOINED, 0.0, 0), (HEARD, 0.0, 0), (FAILED, 0.0, 0), *[(HEARD, 2.0, 0)] * 5]


@pytest.mark.planted
def test_not_heeding_the_time_of_breakers_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differences(CAME_BACK) == []
    monkeypatch.setattr(Breakers, "valid_until_s", lambda *_: float("inf"))
    assert differences(CAME_BACK)
