"""What a router sums up while it runs is what its journal says, number for number, whatever happens to the fleet."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kv_protocol.decided import Decided
from kv_protocol.journal import JournalMessage, JournalRecord, Lost
from router.attribution.journal import JournalSavings
from router.attribution.report import PENDING_MAX, SavingsReport, report_of
from router.attribution.service import ReportSection, Savings
from router.journal.replay import JournalEntry
from router.native import built
from tests.support.amount import examples
from tests.unit.properties.router_life import POLICIES, Life

LIMITS = 2, 2, PENDING_MAX


def lived(seed: int, policy: str, checkpoint_every: int = 0) -> tuple[SavingsReport, list[JournalRecord]]:
    life = Life(seed, POLICIES[policy])
    savings = Savings(ReportSection(), life.state.core, life.clock)
    savings.attribution = life.state.core.attribution = built.Attribution(*LIMITS)
    records = asyncio.run(life.run(checkpoint_every))
    return savings.report(), records


def read(records: list[JournalRecord], since_ns: int | None = None, until_ns: int | None = None) -> SavingsReport:
    """Return the report of a journal whose record `n` was written in message `n`, at `n` ns."""
    savings, first = JournalSavings(built.Attribution(*LIMITS), since_ns, until_ns), 1
    for record in records:
        message = JournalMessage(version=1, life=1, first=first, records=(record,))
        savings.take(JournalEntry("router-1", first, first, message))
        first += record.count if isinstance(record, Lost) else 1
    return report_of(savings.attribution, not_repeated=savings.not_repeated)


@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)))
@settings(max_examples=examples(10, least=4))
def test_the_journal_says_what_the_router_summed_up(seed: int, policy: str) -> None:
    live, records = lived(seed, policy)
    assert read(records) == replace(live, since="", until="")


def test_periods_that_follow_each_other_add_up() -> None:
    live, records = lived(1, "kv")
    middle = len(records) // 2
    before, after = read(records, until_ns=middle), read(records, since_ns=middle)
    assert before.total.requests > 0 < after.total.requests
    assert before.total.requests + after.total.requests == live.total.requests
    assert before.total.reused_tokens + after.total.reused_tokens == live.total.reused_tokens


def test_behind_lost_records_decisions_are_counted_as_not_repeated_until_a_checkpoint() -> None:
    live, records = lived(2, "kv", checkpoint_every=50)
    at = len(records) // 2
    report = read([records[0], Lost(now_s=0.0, count=at - 1), *records[at:]])
    decided = sum(isinstance(each, Decided) for each in records)
    assert 0 < report.not_counted["not_repeated"] < decided
    assert 0 < report.total.requests < live.total.requests
