"""What requests saved: by the worker's report and by prediction, against a candidate drawn evenly, and for whom."""

from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol import subjects
from kv_protocol.codec import encode_message, pack_u64
from kv_protocol.events import Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.journal import FleetApplied, LearntRates, OutcomeKnown, OutcomeName, RatesRestored, WorkerHeard
from router.attribution.journal import AFTER_S, BEFORE_S, Removals, count_removals, new_blocks
from router.attribution.report import (
    DIMENSIONS,
    PENDING_MAX,
    ROWS_MAX,
    Figures,
    merged,
    report_of,
    report_page,
    report_text,
    table,
)
from router.attribution.service import SHOWN_MAX, ReportSection, Savings
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.native import built
from tests.support.decide import decide
from tests.support.manual_clock import ManualClock
from tests.unit.router.samples import BLOCK_SIZE, MODEL, FakeIndex, rank, registered, route, row, state, view

W0, W1 = rank("w0/0"), rank("w1/0")
ISL = 10 * BLOCK_SIZE + 1
"""Ten blocks can be reused: the last token is always computed."""


class Requests:
    """Requests at workers that hold so many blocks, and what they saved."""

    def __init__(
        self, policy: Policy | None = None, settings: ReportSection | None = None, rows_max: int = 64, **holds: int
    ) -> None:
        self.clock, self.state = ManualClock(now_s=100.0), state()
        settings = settings or ReportSection()
        self.savings = Savings(settings, self.state.core, self.clock, "serving-1")
        found = built.Attribution(rows_max, settings.family_blocks, PENDING_MAX)
        self.savings.attribution = self.state.core.attribution = found
        index = FakeIndex()
        index.held = {rank(f"{name}/0"): blocks for name, blocks in holds.items()}
        self.routing = Routing(self.state, index, self.clock, policy or Policy(), seed=1, lease_s=8.0, decisions_max=9)
        for each in map(registered, holds):
            self.routing.apply(FleetApplied(now_s=100.0, event=each))
            self.routing.apply(WorkerHeard(now_s=100.0, worker_id=each.worker_id, instance=each.instance))
        self._count = 0

    def send(self, cached: int | None = None, outcome: OutcomeName = "ok", **changed: Any) -> str:
        """Send a request to its end; return the worker that got it."""
        self._count += 1
        fields: dict[str, Any] = {"isl_tokens": ISL, "decision_id": f"d{self._count}"} | changed
        verdict = self.routing.decide(route(**fields))
        self.routing.take(verdict).end(outcome, built.Answer(cached_tokens=cached))
        return verdict.winner.worker_id

    @property
    def total(self) -> Figures:
        return self.savings.report().total


def seconds(tokens: float) -> float:
    return tokens * built.PREFILL_TOKEN_S + tokens * tokens / 2 * built.PREFILL_PAIR_S


def test_reported_reuse_is_compared_with_a_candidate_drawn_evenly() -> None:
    sent = Requests(w0=8, w1=2, w2=2)
    assert sent.send(cached=7 * BLOCK_SIZE) == "w0"
    total = sent.total
    assert (total.requests, total.compared_requests, total.prompt_tokens) == (1, 1, ISL)
    assert (total.reused_tokens, total.reported_tokens) == (7 * BLOCK_SIZE, 7 * BLOCK_SIZE)
    assert total.baseline_tokens == pytest.approx((7 + 2 + 2) * BLOCK_SIZE / 3)
    assert total.routing_tokens == pytest.approx(7 * BLOCK_SIZE - total.baseline_tokens)
    assert total.foregone_tokens == 0


def test_without_a_report_the_prediction_counts_and_a_report_of_more_than_the_prompt_counts_as_the_prompt() -> None:
    sent = Requests(w0=8, w1=2)
    sent.send()
    assert (sent.total.reused_tokens, sent.total.reported_tokens) == (8 * BLOCK_SIZE, 0)
    assert sent.total.baseline_tokens == 5 * BLOCK_SIZE
    sent.send(cached=10**9)
    assert sent.total.reused_tokens == 8 * BLOCK_SIZE + ISL


def test_a_fleet_of_one_saves_nothing_by_routing() -> None:
    sent = Requests(w0=8)
    sent.send(cached=3 * BLOCK_SIZE)
    assert (sent.total.reused_tokens, sent.total.routing_tokens, sent.total.routing_s) == (3 * BLOCK_SIZE, 0.0, 0.0)


def test_a_worse_choice_than_the_mean_is_a_negative_saving_and_is_foregone() -> None:
    sent = Requests(w0=8, w1=2)
    assert sent.send(cached=2 * BLOCK_SIZE, pinned_worker="w1") == "w1"
    assert sent.total.routing_tokens == 0.0, "the pin leaves one candidate"
    sent = Requests(policy=Policy(temperature=1e6), w0=8, w1=2)
    while sent.send() != "w1":
        pass
    requests = sent.total.requests
    assert sent.total.foregone_tokens == 6 * BLOCK_SIZE
    assert sent.total.routing_tokens == (requests - 1 - 1) * 3 * BLOCK_SIZE


@pytest.mark.parametrize("factor", [None, 3.0])
def test_seconds_are_of_the_tokens_and_of_their_pairs_by_the_reference_engine_until_a_rate_is_learnt(
    factor: float | None,
) -> None:
    sent, times = Requests(w0=8, w1=2), factor or 1.0
    if factor is not None:
        learnt = LearntRates(MODEL, prefill=factor, decode=1.0, output_tokens=9.0, answers=50)
        sent.routing.apply(RatesRestored(now_s=100.0, models=(learnt,)))
    sent.send()
    assert sent.total.saved_s == pytest.approx(times * seconds(8 * BLOCK_SIZE))
    assert sent.total.baseline_s == pytest.approx(times * (seconds(8 * BLOCK_SIZE) + seconds(2 * BLOCK_SIZE)) / 2)
    assert sent.total.learnt_s == (0.0 if factor is None else sent.total.saved_s)


def test_a_mode_that_reads_no_overlap_claims_no_saving_by_routing() -> None:
    sent = Requests(policy=Policy(mode="round-robin"), w0=8, w1=2)
    sent.send(cached=4 * BLOCK_SIZE)
    total = sent.total
    assert (total.requests, total.compared_requests, total.reused_tokens) == (1, 0, 4 * BLOCK_SIZE)
    assert (total.routing_tokens, total.routing_s, total.foregone_tokens) == (0.0, 0.0, 0)


def test_what_is_not_counted_is_counted_by_reason() -> None:
    sent = Requests(w0=8, w1=2)
    sent.send(outcome="failed")
    sent.send(outcome="cancelled")
    sent.send(isl_tokens=0, sequence_hashes=b"")
    sent.routing.take(sent.routing.decide(route(decision_id="open")))
    sent.savings.attribution.decided(
        decide(view(row(role="decode")), route(decision_id="fetches", phase="decode"), Policy(), 1)
    )
    report = sent.savings.report()
    assert report.not_counted == {"not_answered": 2, "unseen": 1, "dropped": 0, "not_repeated": 0, "pending": 1}
    assert report.total.requests == 0


def test_decisions_without_an_outcome_are_bounded_and_the_oldest_are_dropped() -> None:
    sent = Requests(w0=8)
    found = built.Attribution(ROWS_MAX, 4, 3)
    for number in range(5):
        found.decided(sent.routing.decide(route(decision_id=f"d{number}")))
    counted = report_of(found).not_counted
    assert (counted["pending"], counted["dropped"]) == (3, 2)
    found.ended("d1", is_ok=True, cached_tokens=None)
    found.ended("d2", is_ok=True, cached_tokens=None)
    assert Figures.of(found.total()).requests == 1


def test_every_dimension_adds_up_to_the_total() -> None:
    sent = Requests(rows_max=3, w0=8, w1=2)
    for number in range(20):
        sent.send(tenant=f"t{number % 7}", lora="", sequence_hashes=pack_u64(range(number, number + 10)))
    report = sent.savings.report()
    for found in report.by.values():
        assert len(found.rows) <= 3
        for field in Figures.__struct_fields__[:-1]:
            whole = sum(getattr(row, field) for row in found.rows) + getattr(found.other, field)
            assert whole == pytest.approx(getattr(report.total, field))


def test_a_family_is_the_hash_of_a_block_near_the_beginning_and_has_a_title_if_one_is_configured() -> None:
    for blocks, name in ((1, "000000000000000a"), (2, "fedcba9876543210"), (9, "000000000000000c")):
        sent = Requests(settings=ReportSection(family_blocks=blocks, families={name: "support bot"}), w0=8)
        sent.send(sequence_hashes=pack_u64([0xA, 0xFEDCBA9876543210, 0xC]))
        (found,) = sent.savings.report().by["prefix"].rows
        assert (found.name, found.title) == (name, "support bot")
    sent.send(sequence_hashes=b"")
    assert sent.savings.report().by["prefix"].rows[0].name == ""


def test_reports_of_two_routers_add_up_to_that_of_one() -> None:
    both = [Requests(w0=8, w1=2), Requests(w0=8, w1=2)]
    one = Requests(w0=8, w1=2)
    for number in range(9):
        for sent in (one, both[number % 2]):
            sent.send(tenant=f"t{number % 3}")
    found = merged([each.savings.report() for each in both])
    expected = one.savings.report()
    assert found.total.requests == expected.total.requests == 9
    assert found.total.saved_s == pytest.approx(expected.total.saved_s)
    assert {row.name: row.requests for row in found.by["tenant"].rows} == {"t0": 3, "t1": 3, "t2": 3}


def test_metrics_name_the_most_requested_names_alone() -> None:
    sent = Requests(w0=8, w1=2)
    for number in range(2 * SHOWN_MAX):
        sent.send(tenant=f"t{number}")
        sent.send(tenant="acme")
    families = {family.name: family for family in sent.savings.families()}
    samples = [*families["kvrouter_savings_requests"].samples]
    assert {(each.labels["by"] == "all", each.labels["process"]) for each in samples} == {
        (True, ""), (False, "serving-1")
    }  # fmt: skip
    tenants = {each.labels["name"]: each.value for each in samples if each.labels["by"] == "tenant"}
    assert (len(tenants), tenants["acme"]) == (SHOWN_MAX, 2 * SHOWN_MAX)
    assert [each.value for each in samples if each.labels["by"] == "all"] == [4 * SHOWN_MAX]


def test_the_text_says_what_was_saved_and_for_whom() -> None:
    sent = Requests(w0=8, w1=2)
    sent.send(cached=8 * BLOCK_SIZE, tenant="acme")
    sent.send(outcome="failed")
    lines = report_text(sent.savings.report(), ["tenant"])
    assert lines[1:4] == [
        f"1 requests answered, with {ISL} prompt tokens",
        "reused: 128 tokens (80%); all as workers reported",
        lines[3],
    ]
    assert lines[3].startswith(
        "due to routing: 48 tokens (38% of the reused): a candidate drawn evenly would have reused 80;"
    )
    assert (
        "not counted: 1 decisions that failed, were cancelled or were refused at the worker "
        "(after some, another one answered)"
    ) in lines
    assert lines[-1].split() == ["acme", "1", "161", "128", "80%", "48", "0", "0.003", "0.001"]


def test_a_name_that_a_terminal_would_act_on_is_escaped() -> None:
    sent = Requests(w0=8)
    sent.send(tenant="\x1b[2J")
    assert report_text(sent.savings.report(), ["tenant"])[-1].startswith("'\\x1b[2J'")


class _Read(HTMLParser):
    """The elements of a page, and the cells of its tables by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.rows = set[str](), list[list[str]]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in {"src", "href"}]
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag in {"td", "th"} and not data.isspace():
            self.rows[-1][-1] += data


def test_the_page_has_the_cells_of_the_text_and_executes_nothing() -> None:
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    sent = Requests(w0=8, w1=2)
    sent.send(cached=8 * BLOCK_SIZE, tenant=hostile[:40])
    sent.send(cached=BLOCK_SIZE, tenant="acme")
    report = sent.savings.report()
    found = _Read(report_page(report))
    assert found.rows == [list(row) for each in DIMENSIONS for row in table(report, each)[0]]
    assert hostile[:40] in [row[0] for row in found.rows]
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert len(_Read(report_page(report, ["tenant"])).rows) == 3


def test_a_report_without_requests_is_one() -> None:
    report = Requests(w0=1).savings.report()
    assert report_text(report)[1] == "0 requests answered, with 0 prompt tokens"
    assert merged([report]) == report
    assert report_of(ReportSection().attribution()).by["tenant"].rows == ()


def answered(held_blocks: int, outcome: OutcomeKnown) -> built.Placement:
    """Return a decision for a prompt of 10 blocks, of which its rank held so many, that was answered."""
    found = ReportSection().attribution()
    held = view(row(overlap_blocks=(held_blocks,) * 4))
    found.decided(decide(held, route(160, decision_id=outcome.decision_id), Policy(), 1))
    placement = found.ended(outcome.decision_id, is_ok=True, cached_tokens=outcome.cached_tokens)
    assert placement is not None
    return placement


def removed(*cells: tuple[int, int]) -> Removals:
    """Return what w0 removed: seconds, and blocks."""
    found = Removals()
    for second, blocks in cells:
        found.add(W0, second, blocks)
    return found


@pytest.mark.parametrize(
    ("second", "charged"), [(100 - AFTER_S - 1, 0), (100 - AFTER_S, 5), (100 + BEFORE_S, 5), (100 + BEFORE_S + 1, 0)]
)
def test_only_removals_soon_after_a_request_came_to_the_rank_are_charged_to_it(second: int, charged: int) -> None:
    seen = removed((100, 5))
    assert seen.charge(W1, second, 9) == 0
    assert seen.charge(W0, second, 9) == charged


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=30),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30),
)
def test_no_more_is_charged_than_was_removed_nor_than_was_new(
    cells: list[tuple[int, int]], placed: list[tuple[int, int]]
) -> None:
    seen = removed(*cells)
    charged = [seen.charge(W0, second, blocks) for second, blocks in placed]
    assert sum(charged) <= seen.total
    assert all(0 <= each <= blocks for each, (_, blocks) in zip(charged, placed, strict=True))


def test_new_blocks_are_full_ones_of_prompt_and_answer_that_were_not_reused() -> None:
    stated = OutcomeKnown(now_s=1.0, decision_id="d", outcome="ok", cached_tokens=64, output_tokens=20)
    assert new_blocks(answered(0, stated), stated) == (160 + 20) // BLOCK_SIZE - 64 // BLOCK_SIZE
    silent = OutcomeKnown(now_s=1.0, decision_id="d", outcome="ok")
    assert new_blocks(answered(2, silent), silent) == 10 - 2


def test_removals_of_the_gpu_tier_are_read_from_the_event_stream_and_nothing_else() -> None:
    removals = Removals()
    events: tuple[Event, ...] = (Stored((1, 2)), Removed((1,)), Removed((2,), Tier.HOST), Cleared(), Removed((3, 4)))
    message = encode_message([Batch(1, seq, event) for seq, event in enumerate(events, 1)])
    count_removals(removals, subjects.events(MODEL, W0), 7_900_000_000, message)
    count_removals(removals, "kv.v1.fleet.m.w0", 7_900_000_000, message)
    count_removals(removals, subjects.events(MODEL, W0), 7_900_000_000, b"\x01")
    assert (removals.charge(W0, 7, 9), removals.total) == (3, 3)
