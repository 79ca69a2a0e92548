"""Decisions in motion: seeds, promises and leases."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from kv_protocol.decided import Decided, RouteRequest
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.journal import (
    AttemptEnded,
    FleetApplied,
    JournalRecord,
    LedgerApplied,
    LogConnection,
    Lost,
    OutcomeKnown,
    Refused,
    WorkerHeard,
    decode_journal,
)
from kv_protocol.ledger import FirstToken, Renewed
from router.decision.policy import Policy
from router.decision.routing import Lease, Readiness, Routing
from router.decision.state import RankLoad
from router.journal.encoder import JournalEncoder
from router.native import built
from tests.support.manual_clock import ManualClock
from tests.support.replayed import continuous
from tests.unit.router.samples import BLOCK_SIZE, FakeIndex, chain, rank, registered, route, state

LEASE_S = 8.0


class Bench:
    """A `Routing`, its clock and its state."""

    def __init__(
        self,
        *workers: WorkerRegistered,
        holds: int = 0,
        seed: int = 1,
        stale: str = "",
        policy: Policy | None = None,
        recorders: Sequence[Callable[[JournalRecord], object]] = (),
        journal: JournalEncoder | None = None,
    ) -> None:
        self.clock = ManualClock(now_s=100.0)
        self.state = state(LEASE_S)
        for each in workers or (registered(),):
            self.state.apply(FleetApplied(now_s=100.0, event=each))
            self.state.apply(WorkerHeard(now_s=100.0, worker_id=each.worker_id, instance=each.instance))
        self.index = FakeIndex(holds, stale)
        self.problem = ""
        self.routing = Routing(
            self.state,
            self.index,
            self.clock,
            policy or Policy(),
            seed=seed,
            lease_s=LEASE_S,
            decisions_max=1000,
            journal=None if journal is None else journal.journal,
            recorders=recorders,
            noted=(lambda: self.problem,),
        )

    def take(self, request: RouteRequest) -> Lease:
        return self.routing.take(self.routing.decide(request))

    @property
    def load(self) -> RankLoad:
        return self.state.load_of(rank())


@pytest.mark.parametrize(
    ("isl_tokens", "holds", "blocks", "uncached"),
    [(40, 0, 3, 40), (40, 1, 3, 24), (40, 2, 3, 8), (32, 2, 2, 16), (32, 9, 2, 16), (16, 1, 1, 16), (1, 0, 1, 1)],
)
def test_what_is_promised_is_the_whole_prompt_and_what_is_not_held_of_it(
    isl_tokens: int, holds: int, blocks: int, uncached: int
) -> None:
    bench = Bench(holds=holds)
    bench.take(route(isl_tokens))
    assert (bench.load.active_blocks, bench.load.prefill_tokens_queued) == (blocks, uncached)


def test_deciding_promises_nothing_and_repeats_itself() -> None:
    bench = Bench(*[registered(f"w{number}") for number in range(8)])
    assert bench.routing.decide(route()).decision() == bench.routing.decide(route()).decision()
    assert bench.state.loads() == {}
    assert bench.routing.decisions.newest(9) == []


def test_every_decision_that_counts_has_a_seed_of_its_own() -> None:
    bench = Bench()
    seeds = []
    for number in range(50):
        request = route(decision_id=f"d{number}")
        seeds.append(bench.routing.decide(request).seed)
        bench.take(request).end("ok")
    assert len(set(seeds)) == 50


def test_routers_with_the_same_seed_decide_alike_and_with_others_not() -> None:
    def winners(seed: int) -> list[str]:
        bench = Bench(*[registered(f"w{number}") for number in range(8)], seed=seed)
        found = []
        for number in range(20):
            request = route(decision_id=f"d{number}")
            decision = bench.routing.decide(request)
            found.append(decision.winner.worker_id)
            bench.routing.take(decision).end("ok")
        return found

    assert winners(1) == winners(1)
    assert winners(1) != winners(2)


async def test_the_first_bytes_end_the_prefill_and_say_how_long_it_took() -> None:
    bench = Bench()
    lease = bench.take(route(40))
    before = lease.first_byte_s
    await bench.clock.advance(0.5)
    lease.on_bytes()
    await bench.clock.advance(0.5)
    lease.on_bytes()
    assert (before, lease.first_byte_s) == (None, 0.5)
    assert (bench.load.prefill_tokens_queued, bench.load.active_blocks) == (0, 3)


async def test_while_bytes_flow_a_lease_lives_on_and_without_them_it_ends() -> None:
    bench = Bench()
    lease = bench.take(route())
    for _ in range(30):
        await bench.clock.advance(1.0)
        lease.on_bytes()
        assert bench.state.tick(bench.clock.now()) == []
    await bench.clock.advance(LEASE_S)
    assert len(bench.state.tick(bench.clock.now())) == 1


async def test_a_lease_is_not_renewed_for_every_byte() -> None:
    journal = JournalEncoder(1)
    bench = Bench(journal=journal)
    lease = bench.take(route(decision_id="d"))
    for _ in range(100):
        await bench.clock.advance(0.05)
        lease.on_bytes()
    told = [each.event for each in decode_journal(journal.cut().data).records if isinstance(each, LedgerApplied)]
    assert told == [FirstToken(lease_id="d"), *[Renewed(lease_id="d")] * 2], "in five seconds of a lease of eight"


def test_a_refusal_is_recorded_without_its_hashes() -> None:
    told = list[object]()
    bench, asked = Bench(recorders=[told.append]), route(sequence_hashes=bytes(16))
    bench.routing.refuse(asked, ())
    without = msgspec.structs.replace(asked, sequence_hashes=b"")
    assert told[-1] == Refused(now_s=100.0, request=without, exclusions=())


async def test_the_first_byte_of_an_answer_that_came_whole_is_its_last() -> None:
    bench = Bench()
    lease = bench.take(route())
    await bench.clock.advance(0.5)
    lease.end("ok", built.Answer(came_whole=True))
    assert (lease.first_byte_s, lease.ttft_s) == (0.5, 0.5)


async def test_replicas_are_told_of_leases_that_are_open_when_they_ask_and_then_of_what_happens_to_them() -> None:
    bench = Bench()
    leases = bench.routing.leases
    expired = bench.take(route(decision_id="expired"))
    await bench.clock.advance(LEASE_S)
    for record in bench.state.tick(bench.clock.now()):
        bench.state.apply(record)
    begun, waits, ended = [bench.take(route(decision_id=name)) for name in ("begun", "waits", "ended")]
    leases.take(bench.routing.decide(route(decision_id="dropped")))
    begun.on_bytes()
    ended.end("ok")
    assert leases.news() == ([], [(begun.verdict, True), (waits.verdict, False)])
    waits.on_bytes()
    begun.end("ok")
    waits.end("cancelled")
    assert leases.news() == ([("first_token", "waits"), ("finished", "begun"), ("cancelled", "waits")], [])
    assert leases.news() == ([], [])
    assert expired.first_byte_s is None


def test_who_waits_for_news_of_leases_is_called_once() -> None:
    bench, called = Bench(), list[str]()
    leases = bench.routing.leases

    def waits_for(what: str) -> None:
        leases.on_news = lambda: called.append(what)

    waits_for("a lease")
    lease = bench.take(route(decision_id="a"))
    bench.take(route(decision_id="b"))
    leases.news()
    waits_for("a first token")
    lease.on_bytes()
    waits_for("an end")
    lease.end("ok")
    assert called == ["a lease", "a first token", "an end"]
    assert leases.on_news is None


@pytest.mark.parametrize("outcome", ["ok", "refused", "failed", "cancelled"])
def test_however_it_ends_nothing_is_promised_and_the_outcome_is_kept(outcome: str) -> None:
    bench = Bench()
    lease = bench.take(route(decision_id="d"))
    assert lease.outcome is None
    lease.end(outcome, built.Answer(cached_tokens=16))  # type: ignore[arg-type]
    lease.end("failed", built.Answer(cached_tokens=99))
    record = bench.routing.decisions.find("d")
    assert record is not None
    assert record.outcome is not None
    assert (record.outcome.outcome, record.outcome.cached_tokens) == (outcome, 16)
    assert (bench.load.active_requests, bench.load.active_blocks, bench.load.prefill_tokens_queued) == (0, 0, 0)


def recorded(*, came_whole: bool) -> list[type]:
    """Return what is recorded of a request, behind the standing of its rank."""
    journal = JournalEncoder(1)
    lease = Bench(journal=journal).take(route())
    if not came_whole:
        lease.on_bytes()
    lease.end("ok", built.Answer(came_whole=came_whole))
    return [type(record) for record in decode_journal(journal.cut().data).records][1:]


def test_of_a_request_there_are_two_records_and_a_third_of_its_first_token_where_it_did_not_come_whole() -> None:
    assert recorded(came_whole=True) == [Decided, OutcomeKnown]
    assert recorded(came_whole=False) == [Decided, LedgerApplied, OutcomeKnown]


def test_a_decision_longer_than_a_message_goes_in_parts_and_of_one_that_cannot_be_encoded_the_loss_is_recorded() -> (
    None
):
    journal = JournalEncoder(1)
    bench = Bench(journal=journal)
    bench.take(route(BLOCK_SIZE << 17, decision_id="long", sequence_hashes=bytes(8 << 17)))
    bench.take(route(decision_id="odd", request_id="\udc80"))
    messages = []
    while len(journal):
        messages.append(decode_journal(journal.cut().data))
    _, long, lost = continuous(messages)
    assert isinstance(long, Decided)
    assert (long.request.decision_id, type(lost), journal.lost) == ("long", Lost, {"not_encodable": 1})


@pytest.mark.parametrize("has_begun", [False, True])
async def test_nothing_happens_to_a_lease_after_its_end(has_begun: bool) -> None:
    journal = JournalEncoder(1)
    bench = Bench(journal=journal)
    lease = bench.take(route())
    if has_begun:
        lease.first_token()
    lease.end("cancelled")
    records, first_byte_s = len(journal), lease.first_byte_s
    await bench.clock.advance(LEASE_S)
    lease.first_token()
    lease.on_bytes()
    lease.end("ok", built.Answer(4, 3))
    assert (len(journal), lease.first_byte_s) == (records, first_byte_s)
    assert bench.routing.leases.news() == ([], [])


async def test_a_lease_that_expired_may_still_go_on_and_end() -> None:
    bench = Bench()
    lease = bench.take(route())
    await bench.clock.advance(LEASE_S)
    for record in bench.state.tick(bench.clock.now()):
        bench.state.apply(record)
    lease.on_bytes()
    lease.end("ok")
    assert bench.load == RankLoad()


async def test_a_rank_that_asked_to_be_left_alone_is_unfit_for_its_time() -> None:
    bench = Bench()
    pressed = AttemptEnded(now_s=100.0, worker_id="w0", dp_rank=0, outcome="back_pressure", retry_after_s=3.0)
    bench.routing.apply(pressed)
    assert bench.routing.readiness().reasons == ["no worker is fit"]
    await bench.clock.advance(3.0)
    assert bench.routing.readiness().reasons == []


# ---------------------------------------------------------------- siblings of a burst


def burst(*suffixes: int) -> list[RouteRequest]:
    """Return requests of one prefix of 32 blocks, each with a block of its own and one token more."""
    prefix = range(100, 132)
    return [
        route(16 * 33 + 1, decision_id=f"d{suffix}", sequence_hashes=chain(*prefix, suffix), request_id=f"r{suffix}")
        for suffix in suffixes
    ]


@pytest.mark.parametrize(("predict_on_route", "more"), [(True, 16 + 1), (False, 16 * 33 + 1)])
def test_what_is_on_its_way_is_not_promised_again_where_that_is_predicted(predict_on_route: bool, more: int) -> None:
    bench = Bench(policy=Policy(predict_on_route=predict_on_route))
    first, second = burst(1000, 2000)
    bench.take(first)
    assert bench.load.prefill_tokens_queued == 16 * 33 + 1
    bench.take(second)
    assert bench.load.prefill_tokens_queued == (16 * 33 + 1) + more


@pytest.mark.parametrize(("predict_on_route", "worker_id"), [(True, "w0"), (False, "w1")])
def test_before_any_event_has_come_a_sibling_goes_where_its_prefix_was_computed(
    predict_on_route: bool, worker_id: str
) -> None:
    policy = Policy(predict_on_route=predict_on_route)
    bench = Bench(registered("w0"), registered("w1"), policy=policy)
    first, second = burst(1000, 2000)
    lease = bench.take(msgspec.structs.replace(first, pinned_worker="w0"))
    lease.on_bytes()
    decision = bench.routing.decide(second).decision()
    assert decision.chosen.worker_id == worker_id
    assert decision.candidates[0].overlap_blocks == (0, 0, 0, 0), "the index has heard nothing"
    assert decision.candidates[0].predicted_blocks == (32 if predict_on_route else 0)


@pytest.mark.parametrize(("predict_on_route", "worker_id"), [(True, "w0"), (False, "w1")])
def test_a_sibling_waits_for_its_prefix_rather_than_have_it_computed_at_a_rank_that_is_less_busy(
    predict_on_route: bool, worker_id: str
) -> None:
    bench = Bench(registered("w0"), registered("w1"), policy=Policy(predict_on_route=predict_on_route))
    first, second = burst(1000, 2000)
    bench.take(msgspec.structs.replace(first, pinned_worker="w0"))
    bench.take(route(16 * 16 + 1, decision_id="d", sequence_hashes=chain(*range(500, 516)), pinned_worker="w1"))
    assert bench.routing.decide(second).winner.worker_id == worker_id


@pytest.mark.parametrize("mode", ["kv", "predicted-ttft"])
def test_no_policy_that_needs_the_index_decides_instead_of_one_that_did_not_ask_it(mode: str) -> None:
    bench = Bench(policy=Policy(mode="round-robin"))
    verdict = bench.routing.decide(route())
    with pytest.raises(ValueError, match="the index was not asked"):
        bench.state.decide_instead(verdict, Policy(mode=mode))


@pytest.mark.parametrize("outcome", ["ok", "cancelled", "failed"])
def test_of_requests_that_come_one_after_the_other_the_index_alone_says_what_is_held(outcome: str) -> None:
    bench = Bench(holds=3)
    first, second = burst(1000, 2000)
    bench.take(first).end(outcome)  # type: ignore[arg-type]
    chosen = bench.routing.decide(second).decision().chosen
    assert (chosen.overlap_blocks, chosen.predicted_blocks) == ((3, 3, 3, 3), 0)


async def test_a_long_answer_predicts_for_two_seconds_only() -> None:
    bench = Bench()
    first, second = burst(1000, 2000)
    lease = bench.take(first)
    await bench.clock.advance(1.0)
    lease.on_bytes()
    await bench.clock.advance(1.9)
    assert bench.routing.decide(second).decision().chosen.predicted_blocks == 32
    await bench.clock.advance(0.1)
    assert bench.routing.decide(second).decision().chosen.predicted_blocks == 0


def test_a_rank_without_events_is_promised_what_was_not_routed_to_it_before() -> None:
    bench = Bench(stale="never_heard", holds=9)
    first, second = burst(1000, 2000)
    bench.take(first).end("ok")
    bench.take(second)
    assert bench.load.prefill_tokens_queued == 16 + 1


# ---------------------------------------------------------------- trust and readiness


def test_the_trust_of_every_rank_of_the_fleet_is_known_without_a_request() -> None:
    bench = Bench(registered("w0", dp_ranks=(0, 1)), registered("w1", template_digest="x"), stale="log_away")
    away = ("DEGRADED", "event log away")
    differs = ("FALLBACK", "template_digest: found 'x', allowed 'template-1'; approximate")
    assert bench.routing.trust() == {rank("w0/0"): away, rank("w0/1"): away, rank("w1/0"): differs}


def test_trust_is_made_anew_only_after_a_change() -> None:
    bench = Bench(registered(), registered("w1", tokenizer_digest="x"))
    before = bench.routing.trust()
    assert bench.routing.trust() is before
    bench.index.doubt = "behind"
    assert bench.routing.trust()[rank()] == ("DEGRADED", "behind")
    bench.index.doubt = ""
    bench.state.apply(FleetApplied(now_s=100.0, event=registered("w1")))
    assert {each.state for each in bench.routing.trust().values()} == {"EXACT"}


def test_only_an_index_that_is_catching_up_makes_the_router_unready_and_other_problems_are_noted() -> None:
    bench, ready = Bench(), Readiness(ready=True, reasons=[], notes=[])
    bench.index.progress = "index at 40 of 100"
    assert bench.routing.readiness().reasons == ["index at 40 of 100"]
    bench.index.progress = ""
    assert bench.routing.readiness() == ready
    bench.state.apply(LogConnection(now_s=100.0, heard=False))
    note = "the event log is away: requests are routed from memory"
    assert bench.routing.readiness() == ready._replace(notes=[note])
    bench.state.apply(LogConnection(now_s=100.0, heard=True))
    bench.problem = "the journal is not written"
    assert bench.routing.readiness() == ready._replace(notes=["the journal is not written"])
    for stale in ("never_heard", "refused", "resyncing", "source", "behind", "no_events"):
        assert Bench(stale=stale).routing.readiness() == ready._replace(notes=[f"w0/0: {stale}"]), stale
    assert Bench(stale="overfull").routing.readiness() == ready, "a full index"
