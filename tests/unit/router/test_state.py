"""The fold: what each record changes, and what a decision reads of it."""

from typing import Any

import msgspec
import pytest

from indexer.embedded import OverlapColumns
from kv_protocol.decided import RouteRequest
from kv_protocol.fleet import FleetEvent, WorkerDraining, WorkerLeft
from kv_protocol.hashing import HASH_SCHEME, Hashing
from kv_protocol.ids import WorkerRank
from kv_protocol.images import FixedTokens, ImageRule
from kv_protocol.journal import (
    AttemptEnded,
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    LoadApplied,
    LogConnection,
    OutcomeKnown,
    PolicyChanged,
    TimePassed,
    WorkerHeard,
)
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, Routed
from kv_protocol.load import LoadReport
from router.decision.errors import NoEligibleWorker
from router.decision.policy import CostParameters, Policy
from router.decision.state import RouterState
from router.decision.state_settings import ApproximateLimits
from router.decision.verdict import Verdict
from router.decision.view import View
from router.fleet.trust import trust_of
from tests.reference.forecasts import ITL, TTFT, LatencyModel
from tests.reference.history import HALF_LIFE_S
from tests.unit.router.samples import BLOCK_SIZE, MODEL, Held, Row, answer, chain, joined, rank, registered, route

HELD: Held = ((2, 2, 2, 2), 7, 9, "")


def promise(folded: RouterState, lease_id: str = "l", name: str = "w0/0", now_s: float = 0.0, **changed: Any) -> None:
    at = rank(name)
    fields: dict[str, Any] = {"blocks": chain(100, 101), "uncached_tokens": 40, "extra_blocks": 1}
    routed = Routed(lease_id=lease_id, worker_id=at.worker_id, dp_rank=at.dp_rank, **fields | changed)
    folded.apply(LedgerApplied(now_s=now_s, event=routed))


def report(instance: str = "w0-1", name: str = "w0/0", running: int = 3) -> LoadApplied:
    at = rank(name)
    told = LoadReport(
        instance=instance, iteration=1, running_requests=running, waiting_requests=4, used_blocks=5, total_blocks=9
    )
    return LoadApplied(now_s=1.0, worker_id=at.worker_id, dp_rank=at.dp_rank, report=told)


def decided(
    folded: RouterState, now_s: float = 0.0, held: Held = HELD, isl_tokens: int = 40, **request: Any
) -> Verdict:
    return folded.decide(route(isl_tokens, **request), lambda _, ranks: answer([held] * len(ranks)), now_s, 1)


def seen(folded: RouterState, now_s: float = 0.0, held: Held = HELD, isl_tokens: int = 40, **request: Any) -> View:
    return decided(folded, now_s, held, isl_tokens, **request).view


def unfit(folded: RouterState, now_s: float = 0.0) -> tuple[str, ...]:
    return folded.model_view(MODEL, BLOCK_SIZE, HASH_SCHEME, now_s).unfit


def rows(folded: RouterState, now_s: float = 0.0, held: Held = HELD, isl_tokens: int = 40, **request: Any) -> list[Row]:
    """Return what a decision reads, rank by rank."""
    found = seen(folded, now_s, held, isl_tokens, **request)
    return [
        Row(
            rank=found.ranks[at],
            unfit=found.unfit[at],
            role=found.registrations[at].role,
            max_seq_len=found.registrations[at].max_seq_len,
            overlap_blocks=tuple(found.overlap[:, at].tolist()),
            predicted_blocks=int(found.predicted[at]),
            epoch=found.epochs[at],
            seq=found.seqs[at],
            trust=found.trust[at].state,
            trust_reason=found.trust[at].reason,
            prefill_tokens_queued=int(found.queued_tokens[at]),
            active_requests=int(found.active_requests[at]),
            active_blocks=int(found.active_blocks[at]),
            shared_blocks=int(found.shared_blocks[at]),
            history_blocks=float(found.history_blocks[at]),
            newcomer=found.newcomer[at],
        )
        for at in range(len(found.ranks))
    ]


# ---------------------------------------------------------------- the view


def test_every_rank_of_every_worker_that_serves_the_model_has_a_row_eldest_first() -> None:
    folded = joined(
        registered("w2", dp_ranks=(0, 3)), registered("w0", served_names=("other",)), registered("w1", dp_ranks=(1,))
    )
    assert [str(each.rank) for each in rows(folded)] == ["w2/0", "w2/3", "w1/1"]
    assert [str(each.rank) for each in rows(folded, model="other")] == ["w0/0"]
    with pytest.raises(NoEligibleWorker, match="none is registered"):
        seen(folded, model="unheard-of")


def test_the_index_is_asked_for_what_a_cache_can_give_and_for_these_ranks() -> None:
    asked = []

    def ask(request: RouteRequest, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        asked.append((request.reusable_hashes, ranks))
        return answer([HELD] * len(ranks))

    joined(registered(dp_ranks=(0, 1))).decide(route(32), ask, 0.0, 1)
    assert asked == [(chain(100), (rank("w0/0"), rank("w0/1")))]


@pytest.mark.parametrize("mode", ["round-robin", "random", "power-of-two", "least-loaded", "direct"])
def test_for_a_mode_that_reads_no_overlap_the_index_is_not_asked(mode: str) -> None:
    folded = joined(registered())
    folded.apply(PolicyChanged(now_s=0.0, policy=msgspec.to_builtins(Policy(mode=mode))))
    promise(folded)

    def ask(request: RouteRequest, ranks: tuple[WorkerRank, ...]) -> OverlapColumns:
        raise AssertionError((request, ranks))

    found = folded.decide(route(pinned_worker="w0"), ask, 0.0, 1).view
    assert (found.ranks, found.overlap.tolist()) == ((rank(),), [[0]] * 4)
    assert found.active_requests.tolist() == [int(mode in ("power-of-two", "least-loaded"))]


def test_a_row_has_what_the_worker_said_and_where_its_stream_is() -> None:
    (found,) = rows(joined(registered(role="prefill", max_seq_len=99)), phase="prefill")
    assert (found.role, found.max_seq_len, found.unfit) == ("prefill", 99, "")
    assert (found.overlap_blocks, found.epoch, found.seq) == ((2, 2, 2, 2), 7, 9)


def test_promised_work_is_in_the_row_of_its_rank_alone() -> None:
    folded = joined(registered(dp_ranks=(0, 1)))
    promise(folded, "l", blocks=chain(100, 7), uncached_tokens=40)
    promise(folded, "m", blocks=chain(100, 101, 8), uncached_tokens=5, extra_blocks=0)
    first, second = rows(folded)
    assert (first.active_requests, first.active_blocks, first.prefill_tokens_queued) == (2, 5, 45)
    assert first.shared_blocks == 2
    assert (second.active_requests, second.active_blocks, second.prefill_tokens_queued) == (0, 0, 0)
    assert second.shared_blocks == 0


def test_history_is_what_was_routed_and_decays() -> None:
    folded = joined(registered(block_size=16))
    promise(folded, uncached_tokens=40)
    folded.apply(LedgerApplied(now_s=0.0, event=Cancelled(lease_id="l")))
    assert rows(folded)[0].history_blocks == 2.5
    assert rows(folded, HALF_LIFE_S)[0].history_blocks == 1.25


@pytest.mark.parametrize("stale", ["", "behind", "overfull", "log_away"])
def test_of_a_rank_whose_stream_is_followed_the_index_says_what_it_holds(stale: str) -> None:
    folded = joined(registered())
    promise(folded, blocks=chain(100))
    (found,) = rows(folded, held=((0, 2, 2, 2), 7, 9, stale))
    assert (found.trust, found.trust_reason) == trust_of((), stale)
    assert found.overlap_blocks == (0, 2, 2, 2)


@pytest.mark.parametrize("stale", ["never_heard", "refused"])
def test_of_a_rank_that_the_index_does_not_know_what_was_routed_there_says_what_it_holds(stale: str) -> None:
    folded = joined(registered(dp_ranks=(0, 1)))
    promise(folded, blocks=chain(100))
    first, second = rows(folded, held=((2, 2, 2, 2), 7, 9, stale))
    assert (first.overlap_blocks, second.overlap_blocks) == ((1, 1, 1, 1), (0, 0, 0, 0))
    assert first.trust_reason.endswith("; approximate")


@pytest.mark.parametrize("stale", ["", "behind", "never_heard"])
def test_of_a_worker_that_differs_what_was_routed_there_says_what_it_holds(stale: str) -> None:
    folded = joined(registered(tokenizer_digest="x"))
    promise(folded, blocks=chain(100))
    (found,) = rows(folded, held=((2, 2, 2, 2), 7, 9, stale))
    assert (found.trust, found.overlap_blocks) == ("FALLBACK", (1, 1, 1, 1))
    assert found.trust_reason == "tokenizer_digest: found 'x', allowed 'tokenizer-1'; approximate"


def test_a_worker_with_other_blocks_than_the_request_was_hashed_with_differs() -> None:
    folded = joined(registered(), registered("w1", block_size=32))
    assert [each.trust for each in rows(folded)] == ["EXACT", "FALLBACK"]


def test_a_worker_that_makes_something_else_of_images_differs_until_it_is_the_eldest_that_is_fit() -> None:
    images = ImageRule(placeholder="<image>", image_token_id=5, tokens=FixedTokens(576))
    folded = joined(registered(images=images), registered("w1"))
    assert [each.trust for each in rows(folded)] == ["EXACT", "FALLBACK"]
    folded.apply(FleetApplied(now_s=1.0, event=WorkerDraining(worker_id="w0", instance="w0-1")))
    assert [each.trust for each in rows(folded)] == ["FALLBACK", "EXACT"]


# ---------------------------------------------------------------- what was routed, and what is on its way

UNKNOWN: Held = ((0, 0, 0, 0), 0, 0, "never_heard")
NOTHING_HELD: Held = ((0, 0, 0, 0), 7, 9, "")


def end(folded: RouterState, lease_id: str = "l", now_s: float = 0.0) -> None:
    folded.apply(LedgerApplied(now_s=now_s, event=Finished(lease_id=lease_id)))


def test_what_was_routed_counts_for_its_time_with_or_without_a_tick() -> None:
    folded = joined(registered(), approximate=ApproximateLimits(ttl_s=30.0))
    promise(folded, blocks=chain(100, 101))
    end(folded)
    for now_s, depth in ((29.9, 2), (30.0, 0)):
        assert rows(folded, now_s, UNKNOWN)[0].overlap_blocks[0] == depth
        folded.tick(now_s)
        assert rows(folded, now_s, UNKNOWN)[0].overlap_blocks[0] == depth
    assert folded.core.routed_blocks() == []


def test_no_more_counts_than_the_worker_has_room_for() -> None:
    folded = joined(registered(total_kv_blocks=3))
    promise(folded, "l", blocks=chain(100, 101))
    promise(folded, "m", blocks=chain(200, 201))
    assert rows(folded, held=UNKNOWN)[0].overlap_blocks == (1, 1, 1, 1)
    assert folded.core.routed_blocks() == [(rank(), 3)]


@pytest.mark.parametrize(
    "ending",
    [registered(instance="w0-2"), WorkerLeft(worker_id="w0", instance="w0-1")],
    ids=["a new life", "its end"],
)
def test_of_a_former_life_nothing_that_was_routed_counts(ending: FleetEvent) -> None:
    folded = joined(registered())
    promise(folded)
    folded.apply(FleetApplied(now_s=1.0, event=ending))
    assert folded.core.routed_blocks() == []
    folded.apply(FleetApplied(now_s=1.0, event=registered(instance="w0-2")))
    folded.apply(WorkerHeard(now_s=1.0, worker_id="w0", instance="w0-2"))
    (found,) = rows(folded, 1.0, UNKNOWN)
    assert (found.overlap_blocks, found.predicted_blocks) == ((0, 0, 0, 0), 0)


def test_a_promise_to_an_unknown_worker_is_not_remembered() -> None:
    folded = joined(registered())
    promise(folded, name="w9/0")
    assert folded.core.routed_blocks() == []


def test_a_promise_predicts_that_its_blocks_will_be_held_by_its_rank_while_it_lasts() -> None:
    folded = joined(registered(dp_ranks=(0, 1)))
    promise(folded, blocks=chain(100, 101), epoch=7)
    assert [each.predicted_blocks for each in rows(folded, held=NOTHING_HELD)] == [2, 0]
    assert [each.overlap_blocks[0] for each in rows(folded, held=NOTHING_HELD)] == [0, 0]
    end(folded)
    assert [each.predicted_blocks for each in rows(folded, held=NOTHING_HELD)] == [0, 0]


def test_a_prediction_is_over_two_seconds_after_the_first_token_with_or_without_a_tick() -> None:
    folded = joined(registered())
    promise(folded, epoch=7)
    folded.apply(LedgerApplied(now_s=5.0, event=FirstToken(lease_id="l")))
    for now_s, predicted in ((6.9, 2), (7.0, 0)):
        assert rows(folded, now_s, NOTHING_HELD)[0].predicted_blocks == predicted
        folded.tick(now_s)
        assert rows(folded, now_s, NOTHING_HELD)[0].predicted_blocks == predicted


def test_a_prediction_for_a_cache_that_is_no_more_is_over() -> None:
    folded = joined(registered())
    promise(folded, epoch=6)
    assert rows(folded, held=NOTHING_HELD)[0].predicted_blocks == 0


def test_where_predictions_are_not_wanted_there_are_none() -> None:
    folded = joined(registered())
    promise(folded, epoch=7)
    folded.apply(PolicyChanged(now_s=0.0, policy=msgspec.to_builtins(Policy(predict_on_route=False))))
    assert rows(folded, held=NOTHING_HELD)[0].predicted_blocks == 0


# ---------------------------------------------------------------- block size


def test_prompts_are_hashed_as_the_eldest_worker_does() -> None:
    folded = joined(registered(block_size=32), registered("w1"))
    assert folded.fleet.hashing("m", 0.0) == Hashing(32)
    assert folded.fleet.hashing("unheard-of", 0.0) is None


def test_an_eldest_that_is_dead_does_not_make_all_others_differ() -> None:
    folded = joined(registered(block_size=32), registered("w1"))
    folded.apply(WorkerHeard(now_s=100.0, worker_id="w1", instance="w1-1"))
    assert folded.fleet.hashing("m", 100.0) == Hashing(16)


def test_while_no_worker_is_fit_the_eldest_defines_the_hashing() -> None:
    folded = joined(registered(block_size=32), registered("w1"))
    assert folded.fleet.hashing("m", 100.0) == Hashing(32)


# ---------------------------------------------------------------- turns


def test_a_turn_is_a_decision_for_the_same_model() -> None:
    folded = joined(registered(served_names=("m", "n")))
    turns = []
    for model in ("m", "n", "m", "n", "m"):
        verdict = decided(folded, model=model)
        turns.append(verdict.turn)
        folded.take(verdict)
    assert turns == [0, 0, 1, 1, 2]


# ---------------------------------------------------------------- fleet events


def test_a_new_instance_has_no_history_and_no_reported_load() -> None:
    folded = joined(registered())
    promise(folded)
    folded.apply(report())
    folded.apply(FleetApplied(now_s=1.0, event=registered(instance="w0-2")))
    assert unfit(folded, 1.0) == ("no heartbeat yet",)
    folded.apply(WorkerHeard(now_s=1.0, worker_id="w0", instance="w0-2"))
    (found,) = rows(folded, 1.0)
    assert found.history_blocks == 0.0
    assert folded.load_of(rank()).reported_running == 0
    assert found.active_requests == 1, "the request still runs, and ends by itself"
    folded.apply(LedgerApplied(now_s=1.0, event=Finished(lease_id="l")))
    assert rows(folded, 1.0)[0].active_blocks == 0


def test_the_same_instance_again_keeps_history_and_reported_load() -> None:
    folded = joined(registered())
    promise(folded)
    folded.apply(report())
    folded.apply(FleetApplied(now_s=0.0, event=registered(version="2")))
    assert rows(folded)[0].history_blocks == 2.5
    assert folded.load_of(rank()).reported_running == 3


def test_of_a_worker_that_left_nothing_is_left() -> None:
    folded = joined(registered(), registered("w1"))
    folded.apply(report())
    promise(folded, name="w1/0")
    folded.apply(FleetApplied(now_s=0.0, event=WorkerLeft(worker_id="w0", instance="w0-1")))
    assert [str(each.rank) for each in rows(folded)] == ["w1/0"]
    assert set(folded.loads()) == {rank("w1/0")}
    assert rows(folded)[0].history_blocks == 2.5


# ---------------------------------------------------------------- reports


@pytest.mark.parametrize(
    "late",
    [report("w0-0"), report("w9-1", "w9/0"), report("w0-1", "w0/7")],
    ids=["former life", "unknown worker", "unknown rank"],
)
def test_a_report_of_a_former_instance_or_an_unknown_worker_or_rank_changes_nothing(late: LoadApplied) -> None:
    folded = joined(registered())
    folded.apply(report())
    before = folded.loads()
    folded.apply(late)
    assert folded.loads() == before


def test_a_report_that_comes_after_its_worker_left_does_not_bring_it_back() -> None:
    folded = joined(registered())
    folded.apply(FleetApplied(now_s=0.0, event=WorkerLeft(worker_id="w0", instance="w0-1")))
    folded.apply(report())
    assert folded.loads() == {}


# ---------------------------------------------------------------- time and the rest


def test_the_log_is_folded() -> None:
    folded = joined(registered(), registered("w1"))
    folded.apply(LogConnection(now_s=1.0, heard=False))
    assert unfit(folded, 50.0)[0] == ""
    folded.apply(LogConnection(now_s=52.0, heard=True))
    folded.apply(WorkerHeard(now_s=54.0, worker_id="w1", instance="w1-1"))
    assert unfit(folded, 56.9)[0] == ""
    assert unfit(folded, 57.0)[0] == "silent for 5 s or longer"


def test_time_ends_leases_by_records_that_the_caller_applies() -> None:
    folded = joined(registered())
    promise(folded)
    assert folded.tick(9.999) == []
    due = folded.tick(10.0)
    assert due == [LedgerApplied(now_s=10.0, event=Expired(lease_id="l"))]
    assert rows(folded)[0].active_requests == 1
    for record in due:
        folded.apply(record)
    assert rows(folded)[0].active_requests == 0
    assert (folded.tick(1e9), folded.core.expired_total) == ([], 1)


def test_a_first_token_leaves_the_blocks() -> None:
    folded = joined(registered())
    promise(folded)
    folded.apply(LedgerApplied(now_s=0.0, event=FirstToken(lease_id="l")))
    (found,) = rows(folded)
    assert (found.prefill_tokens_queued, found.active_blocks) == (0, 3)


@pytest.mark.parametrize(
    "record",
    [
        TimePassed(now_s=1.0),
        OutcomeKnown(now_s=1.0, decision_id="d", outcome="ok"),
    ],
)
def test_records_that_change_nothing_here_are_welcome(record: JournalRecord) -> None:
    folded = joined(registered())
    promise(folded)
    before = (rows(folded), folded.loads())
    folded.apply(record)
    assert (rows(folded), folded.loads()) == before


# ---------------------------------------------------------------- the policy and what it reads


def under(folded: RouterState, **policy: Any) -> RouterState:
    """Return the state with another policy in force."""
    folded.apply(PolicyChanged(now_s=0.0, policy=msgspec.to_builtins(Policy(**policy))))
    return folded


def test_the_whole_policy_is_part_of_the_state() -> None:
    wanted = Policy(mode="least-loaded", temperature=0.25, spill_tokens=7, affinity="soft", itl_target_s=0.5)
    folded = joined(registered())
    assert folded.policy == Policy()
    folded.apply(PolicyChanged(now_s=0.0, policy=msgspec.to_builtins(wanted)))
    assert folded.policy == wanted


def test_a_journal_of_other_default_weights_is_read_with_those() -> None:
    former = CostParameters(prefill_scale=1.0, history_weight=0.5)  # of version 0.1
    recorded = msgspec.to_builtins(Policy(parameters=former))
    assert set(recorded["parameters"]) == set(CostParameters.__struct_fields__)
    folded = joined(registered())
    folded.apply(PolicyChanged(now_s=0.0, policy=recorded))
    assert folded.policy.parameters == former != CostParameters()


def test_a_session_is_at_home_where_it_was_routed_to_last_if_the_policy_cares() -> None:
    folded = joined(registered(), registered("w1"))
    promise(folded, name="w1/0", session_id="s")
    end(folded)
    assert seen(folded, session_id="s").bound is None
    assert seen(under(folded, affinity="hard"), session_id="s").bound == rank("w1/0")
    assert seen(folded, session_id="other").bound is None


def test_a_worker_that_joins_a_working_fleet_is_a_newcomer_that_has_had_its_share() -> None:
    folded = joined(registered(total_kv_blocks=400))
    promise(folded, blocks=chain(7), uncached_tokens=1600)
    folded.apply(FleetApplied(now_s=60.0, event=registered("w1", total_kv_blocks=400)))
    for worker_id in ("w0", "w1"):
        folded.apply(WorkerHeard(now_s=60.0, worker_id=worker_id, instance=f"{worker_id}-1"))
    flags, winners = [], []
    for number in range(4):
        hashes = chain(10 + number, 20 + number)
        verdict = decided(folded, 60.0, NOTHING_HELD, decision_id=f"d{number}", sequence_hashes=hashes)
        folded.take(verdict)
        flags.append(verdict.view.newcomer)
        winners.append(verdict.winner.worker_id)
    assert flags == [(False, True)] * 3 + [(False, False)], "of two ranks every fourth full miss is its own"
    assert winners == ["w0", "w0", "w0", "w1"]


def test_a_failed_attempt_is_held_against_its_rank_for_a_time() -> None:
    folded = joined(registered(dp_ranks=(0, 1)))
    folded.apply(AttemptEnded(now_s=0.0, worker_id="w0", dp_rank=1, outcome="back_pressure", retry_after_s=2.0))
    assert [bool(each) for each in unfit(folded, 1.0)] == [False, True]
    assert [bool(each) for each in unfit(folded, 2.0)] == [False, False]


def test_what_was_measured_changes_what_is_forecast_of_that_rank_alone() -> None:
    folded = under(joined(registered(), registered("w1")), mode="predicted-ttft")
    before = seen(folded).forecast
    assert before is not None
    assert before.ttft_s[0] == before.ttft_s[1]
    folded.take(decided(folded, pinned_worker="w0"))
    slow = OutcomeKnown(now_s=9.0, decision_id="d-1", outcome="ok", ttft_s=2.0, duration_s=4.0, output_tokens=11)
    folded.apply(slow)
    after = seen(folded).forecast
    assert after is not None
    assert (after.ttft_s[0] > before.ttft_s[0], after.itl_s[0] > before.itl_s[0]) == (True, True)
    assert (after.ttft_s[1], after.itl_s[1]) == (before.ttft_s[1], before.itl_s[1])


@pytest.mark.parametrize(("ttft_s", "duration_s"), [(0.5, 4.5), (4.5, 4.5)])
def test_a_record_of_the_former_version_is_learnt_as_that_version_learnt_it(ttft_s: float, duration_s: float) -> None:
    folded = under(joined(registered()), mode="predicted-ttft")
    verdict = decided(folded)
    folded.take(verdict)
    folded.apply(
        OutcomeKnown(now_s=9.0, decision_id="d-1", outcome="ok", ttft_s=ttft_s, duration_s=duration_s, output_tokens=11)
    )
    ttft, itl = LatencyModel(TTFT), LatencyModel(ITL)
    uncached_tokens = verdict.request.isl_tokens - verdict.expected_blocks * verdict.request.block_size
    ttft.learn(verdict.winner, (uncached_tokens, 0.0, 0.0), ttft_s)
    itl.learn(verdict.winner, (0.0, 0.0), (duration_s - ttft_s) / 10)
    after = seen(folded).forecast
    assert after is not None
    assert after.ttft_s.tolist() == [ttft.predict(rank(), (uncached_tokens, 0.0, 0.0))]
    assert after.itl_s.tolist() == [itl.predict(rank(), (0.0, 0.0))]


def test_what_is_not_known_of_an_outcome_is_not_learnt() -> None:
    folded = under(joined(registered()), mode="predicted-ttft")
    before = seen(folded).forecast
    folded.take(decided(folded))
    folded.apply(
        OutcomeKnown(now_s=9.0, decision_id="d-1", outcome="ok", duration_s=4.0, output_tokens=9, came_whole=True)
    )
    after = seen(folded).forecast
    assert before is not None
    assert after is not None
    assert (after.ttft_s.tolist(), after.itl_s.tolist()) == (before.ttft_s.tolist(), before.itl_s.tolist())


def test_of_an_outcome_that_was_not_ok_nothing_is_learnt() -> None:
    folded = under(joined(registered()), mode="predicted-ttft")
    before = seen(folded).forecast
    folded.take(decided(folded))
    folded.apply(OutcomeKnown(now_s=9.0, decision_id="d-1", outcome="failed", ttft_s=2.0, duration_s=4.0))
    after = seen(folded).forecast
    assert before is not None
    assert after is not None
    assert after.ttft_s.tolist() == before.ttft_s.tolist()
