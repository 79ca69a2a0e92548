"""Replay: from the bytes of a journal alone, every decision in it is taken again, bit for bit.

Of the index only what was recorded of its answers is used: its own replay is the index's affair. What was promised,
what was routed, what is on its way, which ranks are fit and what is trusted is found again by the fold alone.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.decided import TERMS, Decided, RouteRequest, best_terms, overlap_depths
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    VERSION,
    AttemptEnded,
    FleetApplied,
    JournalBegan,
    JournalMessage,
    JournalRecord,
    LedgerApplied,
    Lost,
    OutcomeKnown,
    PolicyChanged,
    RankStanding,
    Refused,
    TimePassed,
    WorkerHeard,
)
from router.cli.journals import Replays
from router.decision.eligibility import NoEligibleWorker
from router.decision.policies import MODES
from router.decision.policy import CostParameters, Policy
from router.decision.state import RouterState
from router.journal.encoder import JournalEncoder
from router.journal.replay import JournalEntry, Redecided, Replay
from router.shadows.comparison import Comparison, ShadowReport
from tests.support.amount import examples
from tests.support.replayed import continuous, replay
from tests.support.watched_routing import Told, tell
from tests.unit.properties.router_life import MODELS, POLICIES, Life, journal
from tests.unit.router.samples import BLOCK_SIZE, answer, chain

SEEDS = range(6)
LIVES = settings(max_examples=examples(12, least=4))


def lived(seed: int, policy: str = "kv") -> tuple[Life, list[JournalRecord]]:
    return asyncio.run(journal(seed, POLICIES[policy]))


def differences(records: Sequence[JournalRecord]) -> list[Redecided]:
    return [each for each in replay(records) if not each.equal]


def count(records: Sequence[JournalRecord], kind: type[Any]) -> int:
    return sum(isinstance(record, kind) for record in records)


@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)))
@LIVES
def test_every_decision_is_taken_again_bit_for_bit(seed: int, policy: str) -> None:
    _, records = lived(seed, policy)
    again = list(replay(records))
    assert [each for each in again if not each.equal] == []
    assert len(again) == count(records, Decided) + count(records, Refused)


class Beside:
    """A second journal of a life, of the records that it is told."""

    def __init__(self) -> None:
        self.encoder = JournalEncoder(1, lambda: 1)

    def record(self, what: Told) -> None:
        tell(self.encoder, what)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_leases_write_has_the_bytes_of_the_records_as_which_it_is_read(policy: str) -> None:
    beside = Beside()
    life = Life(1, POLICIES[policy], lambda *_: beside)
    asyncio.run(life.run())
    cut = msgspec.msgpack.Decoder(tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw, list[msgspec.Raw]]).decode
    written = [bytes(record) for message in life.shelf.messages() for record in cut(message)[3]]
    told = list[bytes]()
    while len(beside.encoder):
        told += map(bytes, cut(beside.encoder.cut().data)[3])
    assert written[1:] == told, "but for the beginning"


def test_much_happens_in_such_a_life() -> None:
    journals = [lived(seed)[1] for seed in SEEDS]
    for kind in (Decided, OutcomeKnown, Refused, RankStanding, AttemptEnded, PolicyChanged, TimePassed):
        assert all(count(records, kind) > 0 for records in journals), kind
    decisions = [record for records in journals for record in records if isinstance(record, Decided)]
    assert len(decisions) > 100 * len(SEEDS) / 2
    reasons = {decided.reason for decided in decisions}
    assert reasons >= {"overlap", "load", "turn", "draw", "pinned", "affinity", "only"}
    refused = [record for records in journals for record in records if isinstance(record, Refused)]
    assert any(each.reason.startswith("kv transfer") for record in refused for each in record.exclusions)
    assert sum(len(best_terms(decided)) > 1 for decided in decisions) > 50
    assert sum(any(map(any, overlap_depths(decided))) for decided in decisions) > 50


# ------------------------------------------------------------------------------------------- the fold is the state


def statistics_of(state: RouterState) -> dict[str, Any]:
    """Return all that the state has."""
    return {
        "core": list(iter(state.core.checkpoint().next, None)),
        "workers": list(state.fleet.workers()),
        "refused_workers": state.fleet.refused_total,
        "breakers": msgspec.structs.astuple(state.breakers.statistics),
        "policy": state.policy,
    }


def shown(state: RouterState, model: str, now_s: float, doubt: str) -> Any:
    request = RouteRequest(
        decision_id="d",
        request_id="r",
        model=model,
        isl_tokens=200,
        block_size=BLOCK_SIZE,
        sequence_hashes=chain(*(2**63 + at for at in range(12))),
        session_id="s1",
    )
    policy = Policy(affinity="soft")
    state.apply(PolicyChanged(now_s=now_s, policy=msgspec.to_builtins(policy)))
    try:
        verdict = state.decide(request, lambda _, ranks: answer([((1, 1, 1, 1), 1, 1, doubt)] * len(ranks)), now_s, 1)
    except NoEligibleWorker as error:
        return str(error)
    view = verdict.view()
    columns = (*verdict.model_view.unfit, *view._replace(rates=None), *(view.rates or ()))
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in columns]


def folded(records: Sequence[JournalRecord]) -> RouterState:
    again = Replay()
    for record in records:
        again.take(record)
    assert again.state is not None
    return again.state


@given(st.integers(0, 2**32))
@LIVES
def test_the_folded_journal_is_the_state_that_wrote_it(seed: int) -> None:
    life, records = lived(seed)
    again, live = folded(records), life.state
    assert statistics_of(again) == statistics_of(live)
    for after_s in (0.0, 3.0, 100.0):
        now_s = life.clock.now() + after_s
        ticks = again.tick(now_s), live.tick(now_s)
        assert ticks[0] == ticks[1]
        for record in ticks[0]:
            again.apply(record)
            live.apply(record)
        assert statistics_of(again) == statistics_of(live)
        for model in MODELS:
            for doubt in ("", "never_heard"):
                assert shown(again, model, now_s, doubt) == shown(live, model, now_s, doubt)


def test_much_is_folded_in_such_a_life() -> None:
    states = [folded(lived(seed)[1]) for seed in SEEDS]
    assert all(sum(causes) > 0 for causes in zip(*(state.core.routed_totals() for state in states), strict=True))
    assert sum(state.breakers.statistics.opened_total for state in states) > 0


def test_a_router_that_begins_anew_knows_nothing_of_what_was_said_of_ranks_before() -> None:
    for seed in SEEDS:
        records = lived(seed)[1]
        began = next(at for at, record in enumerate(records) if isinstance(record, JournalBegan))
        doubted = [msgspec.structs.replace(each, doubt="behind") for each in records if isinstance(each, RankStanding)]
        assert differences([records[began], *doubted, *records]) == []


# ------------------------------------------------------------------------------------------- what is planted is found


@pytest.mark.parametrize(
    "kind",
    [LedgerApplied, OutcomeKnown, FleetApplied, WorkerHeard, AttemptEnded, PolicyChanged, RankStanding, Decided],
)
@pytest.mark.planted
def test_a_journal_that_leaves_out_a_kind_of_record_does_not_replay(kind: type[Any]) -> None:
    left = [[record for record in lived(seed)[1] if not isinstance(record, kind)] for seed in SEEDS]
    if kind is Decided:
        assert any(statistics_differ(seed, records) for seed, records in zip(SEEDS, left, strict=True))
    else:
        assert any(differences(records) for records in left)


def statistics_differ(seed: int, records: Sequence[JournalRecord]) -> bool:
    """Return whether a replay of these records ends with other statistics than the life that wrote them."""
    again = Replay()
    for record in records:
        again.take(record)
    return again.state is None or statistics_of(again.state) != statistics_of(lived(seed)[0].state)


def test_a_single_promise_that_is_another_is_found() -> None:
    _, records = lived(1)
    found = list[bool]()
    for at, record in enumerate(records):
        if isinstance(record, Decided) and len(found) < 20:
            other = msgspec.structs.replace(record, uncached_tokens=record.uncached_tokens + 5)
            again = differences([*records[:at], other, *records[at + 1 :]])
            found.append(again[0].difference.startswith("uncached_tokens: now "))
    assert all(found)


def test_a_single_decision_that_is_missing_is_found() -> None:
    _, records = lived(1)
    found = list[bool]()
    for at, record in enumerate(records):
        if isinstance(record, Decided) and len(found) < 20:
            found.append(bool(differences([*records[:at], *records[at + 1 :]])))
    assert sum(found) > len(found) / 2


def test_records_in_another_order_are_found() -> None:
    _, records = lived(2)
    swapped = [*records]
    for at in range(1, len(swapped) - 1, 2):
        swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
    assert differences(swapped)


def test_a_decision_that_says_something_else_is_found_and_said_in_words() -> None:
    records, at = next(
        (records, at)
        for records in (lived(seed)[1] for seed in range(100))
        for at, each in enumerate(records)
        if isinstance(each, Decided) and each.costs and each.overlap
    )
    told = records[at]
    assert isinstance(told, Decided)
    for changed, words in (
        ({"margin": 0.125}, "margin: now "),
        ({"reason": "said so"}, "recorded 'said so'"),
        ({"seed": told.seed ^ 1, "turn": told.turn + 1}, f"recorded {told.turn + 1}"),
        ({"terms": told.terms[:-1] + bytes((told.terms[-1] ^ 1,))}, f"{TERMS[-1]} now "),
        ({"costs": told.costs[:-4] + b"\x00\x00\x00\x01"}, "cost of another"),
        ({"overlap": b""}, "overlap"),
    ):
        planted = [*records[:at], msgspec.structs.replace(told, **changed), *records[at + 1 :]]
        (found, *_) = differences(planted)
        assert found.decision_id == told.request.decision_id
        assert words in found.difference


def test_another_weight_is_found() -> None:
    _, records = lived(1, "weighed")
    at, told = next((at, each) for at, each in enumerate(records) if isinstance(each, PolicyChanged))
    parameters = told.policy["parameters"] | {"ttft_weight": 1.7000001}
    planted = [*records]
    planted[at] = msgspec.structs.replace(told, policy=told.policy | {"parameters": parameters})
    assert any("cost now" in each.difference for each in differences(planted))


# ------------------------------------------------------------------------------------------- what is not there


def test_of_a_journal_without_its_beginning_nothing_is_said_to_be_equal() -> None:
    _, records = lived(1)
    again = list(replay(records[1:]))
    assert len(again) > 50
    assert {(each.equal, each.is_exact) for each in again} == {(False, False)}


def test_behind_lost_records_nothing_is_said_until_another_beginning() -> None:
    _, records = lived(1)
    middle = len(records) // 2
    assert isinstance(records[0], JournalBegan)
    cut = [*records[:middle], Lost(now_s=0.0, count=1), *records[middle:], *records]
    again = list(replay(cut))
    before, whole = count(records[:middle], Decided) + count(records[:middle], Refused), len(list(replay(records)))
    assert [each.equal for each in again] == [True] * before + [False] * (whole - before) + [True] * whole
    assert [each.is_exact for each in again] == [each.equal for each in again]


def numbered(records: Sequence[JournalRecord], life: int, batch: int) -> list[JournalMessage]:
    return [
        JournalMessage(version=1, life=life, first=at + 1, records=tuple(records[at : at + batch]))
        for at in range(0, len(records), batch)
    ]


def test_a_message_that_is_missing_is_noticed_and_one_that_came_twice_counts_once() -> None:
    records: list[JournalRecord] = [TimePassed(now_s=float(at)) for at in range(40)]
    messages = numbered(records, 5, 16)
    assert list(continuous([messages[0], messages[0], messages[1], messages[0], messages[2]])) == records
    without = list(continuous([messages[0], messages[2]]))
    assert [type(record) for record in without] == [TimePassed] * 16 + [Lost] + [TimePassed] * 8
    assert [record.count for record in without if isinstance(record, Lost)] == [16]
    cut = list(continuous(messages[1:]))
    assert isinstance(cut[0], Lost)
    assert cut[1:] == records[16:]


def test_lost_records_have_their_numbers() -> None:
    first = JournalMessage(version=1, life=5, first=1, records=(Lost(now_s=0.0, count=9), TimePassed(now_s=1.0)))
    second = JournalMessage(version=1, life=5, first=11, records=(TimePassed(now_s=2.0),))
    assert list(continuous([first, second])) == [*first.records, *second.records]


def test_another_life_begins_anew() -> None:
    records: list[JournalRecord] = [TimePassed(now_s=float(at)) for at in range(20)]
    assert list(continuous([*numbered(records, 5, 16), *numbered(records, 6, 16)])) == records + records
    crossed = list(continuous([numbered(records, 5, 16)[0], *numbered(records, 6, 16), numbered(records, 5, 16)[1]]))
    assert [type(record) for record in crossed] == [TimePassed] * 36 + [Lost] + [TimePassed] * 4


# ------------------------------------------------------------------------------------------- another policy


def winner(choice: Comparison | str) -> WorkerRank | None:
    return choice.rank if isinstance(choice, Comparison) else None


def test_the_policy_that_was_in_force_would_have_chosen_the_same() -> None:
    _, records = lived(1, "hot")
    changed = [at for at, record in enumerate(records) if isinstance(record, PolicyChanged)]
    only = [each for each in replay(records[: changed[1]], policies=[POLICIES["hot"]]) if each.recorded is not None]
    assert len(only) > 1
    assert [[winner(other) for other in each.otherwise] for each in only] == [[each.recorded] for each in only]


def test_another_policy_would_have_chosen_others_and_the_fold_stays_as_it_was() -> None:
    _, records = lived(3)
    other = Policy(parameters=CostParameters(ttft_weight=100.0, overlap_credit=0.0))
    again = list(replay(records, policies=[other]))
    assert [each for each in again if not each.equal] == []
    chosen = [(each.recorded, winner(each.otherwise[0])) for each in again if each.recorded is not None]
    assert any(rank == recorded for recorded, rank in chosen)
    assert any(rank not in (None, recorded) for recorded, rank in chosen)


def test_only_the_overlap_has_to_be_recorded_for_another_policy() -> None:
    _, records = lived(1, "round-robin")
    changed = [at for at, record in enumerate(records) if isinstance(record, PolicyChanged)]
    others = [Policy(), Policy(mode="least-loaded"), Policy(mode="round-robin", affinity="soft")]
    found = [each.otherwise for each in replay(records[: changed[1]], policies=others) if each.recorded is not None]
    assert len(found) > 1
    for overlap, *known in found:
        assert (overlap, [each for each in known if isinstance(each, str)]) == ("unreadable", [])


def test_a_decision_that_cannot_be_repeated_is_skipped_in_a_comparison() -> None:
    _, records = lived(1)
    at = next(at for at, record in enumerate(records) if isinstance(record, Decided))
    decided = msgspec.structs.replace(cast("Decided", records[at]), ranks=99)
    told = Replays({"other": Policy(mode="random")}, MODES, 0, print)
    message = JournalMessage(version=VERSION, life=1, first=1, records=(*records[:at], decided))
    told.take(JournalEntry("router-1", 1, 0, message))
    (report,) = cast("list[ShadowReport]", told.as_object()["policies"])
    assert (told.counts["different"], report.decisions, report.skipped["no_choice"]) == (1, 0, 1)


def test_a_decision_in_a_mode_that_is_not_known_here_is_not_said_to_be_equal() -> None:
    _, records = lived(1)
    again = [each for each in replay(records, modes={"round-robin": MODES["round-robin"]}) if not each.equal]
    assert {each.is_exact for each in again} == {False}
    assert any(each.difference.startswith("mode kv is not known here") for each in again)
